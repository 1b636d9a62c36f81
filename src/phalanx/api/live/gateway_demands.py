"""How the gateways divide the limits on requests: each reports what was asked of it, and gets a share of each limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.services.request_limits import demand_share

SILENT_S: Final = 10.0  # after which a gateway has no share any more; it reports every second
SETTLING_S: Final = 3.0  # after the start of a head, in which every gateway reports
GATEWAYS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class _Demand:
    at_s: float
    demand: Mapping[str, float]


class GatewayDemands:
    """The newest report of each gateway.

    Args:
        began_s: when this head began, by the clock of the reports. Until every gateway has had the time to report, there are no shares.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._known: dict[str, _Demand] = {}

    def report(
        self, gateway_id: str, demand: Mapping[str, float], now_s: float
    ) -> tuple[int, float | None, dict[str, float]]:
        """Take over a report. Returns the number of gateways, the even share (None for not yet), and the shares by scope.

        Raises:
            BadRequest: there are too many gateways.
        """
        self._known = {name: one for name, one in self._known.items() if now_s - one.at_s < SILENT_S}
        if gateway_id not in self._known and len(self._known) >= GATEWAYS_MAX:
            raise BadRequest(f"{GATEWAYS_MAX} gateways report already", hint="stop some of them")
        self._known[gateway_id] = _Demand(now_s, demand)
        count = len(self._known)
        if now_s - self._began_s < SETTLING_S:
            return count, None, {}
        whole: dict[str, float] = {}
        for one in self._known.values():
            for scope, asked in one.demand.items():
                whole[scope] = whole.get(scope, 0.0) + asked
        shares = {scope: demand_share(demand.get(scope, 0.0), total, count) for scope, total in whole.items()}
        return count, 1.0 / count, shares
