"""Reports of gateways to the head."""

from __future__ import annotations

from typing import Annotated

import msgspec

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
        shares: by scope, 0 to 1; `even`: of every other limit. None while the head has not heard of all gateways yet: the last ones hold.
    """

    gateways: int
    even: float | None = None
    shares: dict[str, float] = {}
