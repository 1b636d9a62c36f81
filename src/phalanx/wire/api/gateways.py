"""Reports of gateways to the head."""

from __future__ import annotations

from typing import Annotated

import msgspec

from phalanx.core.work.service_use import ServiceUseHour

GatewayDemand = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=200)], Annotated[float, msgspec.Meta(ge=0.0)]],
    msgspec.Meta(max_length=1000),
]


class DemandReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was asked of limits at a gateway lately: tokens, by scope ("project nlp", "key 0a1b2c")."""

    demand: GatewayDemand = {}


class LimitShares(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of limits that a gateway gets.

    Attributes:
        gateways: that have reported lately, with this one.
        shares: by scope, 0 to 1; `even`: of every other limit. None until the head has reports of all gateways: until then the last ones hold.
    """

    gateways: int
    even: float | None = None
    shares: dict[str, float] = {}


class UsageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gateway has counted since its last report.

    Attributes:
        sequence: one more than that of its last report; one that is counted already changes nothing.
        hours: by hour. `busy` of replicas is in milliseconds here; the head knows how many devices they have.
    """

    sequence: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    hours: Annotated[list[ServiceUseHour], msgspec.Meta(max_length=24)]


class UsageReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """`sequence`: the reports up to this one are counted. `ignored`: hours of this one that are too old, or in the future."""

    sequence: int
    ignored: int = 0
