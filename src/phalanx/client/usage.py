"""API calls for usage reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.client.api_calls import ApiCalls, LazyModule, grouping, path_segment, query_string

if TYPE_CHECKING:
    from phalanx.wire.api import usage as api
    from phalanx.wire.api import waste as waste_api
else:
    api = LazyModule("phalanx.wire.api.usage")
    waste_api = LazyModule("phalanx.wire.api.waste")


class UsageApi(ApiCalls):
    """Report what GPUs were used for."""

    def usage_report(
        self, *, by: str, since_s: float, until_s: float | None = None, limit: int = 1000, waste_first: bool = False
    ) -> api.UsageReportView:
        """Return the GPU-hours of the fleet by state in the hours of a period, with a row for each project, user, queue, gpu, job, or value of a `label:NAME`."""
        given = {**grouping(by), "since_s": since_s, "until_s": until_s, "limit": limit, "waste_first": waste_first}
        return self._get("/v1/usage" + query_string(given), api.UsageReportView)

    def waste(
        self, *, early: bool = False, limit: int = 500, only: Mapping[str, str] | None = None
    ) -> waste_api.WasteView:
        """Return who wastes GPUs now. `early`: also those below their threshold. `only`: user, project, queue, kind."""
        return self._get(
            "/v1/waste" + query_string({"early": early, "limit": limit, **(only or {})}), waste_api.WasteView
        )

    def job_usage(self, job_id: str) -> api.JobUsageView:
        """Return what a job held, what it did with it, and advice for the next run."""
        return self._get(f"/v1/jobs/{path_segment(job_id)}/usage", api.JobUsageView)

    def node_usage(self, node_id: str) -> api.NodeUsageView:
        """Return the newest states of each device of a node."""
        return self._get(f"/v1/nodes/{path_segment(node_id)}/usage", api.NodeUsageView)
