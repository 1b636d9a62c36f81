"""API calls for the energy report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import energy as api
else:
    api = LazyModule("phalanx.wire.api.energy")


class EnergyApi(ApiCalls):
    """Report the energy of GPUs."""

    def energy_report(
        self, *, by: str, since_s: float, until_s: float | None = None, limit: int = 1000
    ) -> api.EnergyReportView:
        """Return the energy of GPUs in the hours of a period, with a row for each project, user, queue, gpu or job."""
        return self._get(
            "/v1/energy" + query_string({"by": by, "since_s": since_s, "until_s": until_s, "limit": limit}),
            api.EnergyReportView,
        )
