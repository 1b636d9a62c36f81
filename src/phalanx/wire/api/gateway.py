"""Records of what gateways report."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from phalanx.core.ids import ServiceId
from phalanx.core.work.log_histogram import CLASSES
from phalanx.core.work.service_load import ServiceLoad

SERVICES_MAX: Final = 10_000
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Counts = dict[Annotated[int, msgspec.Meta(ge=0, lt=CLASSES)], Count]
"""How many figures are in each class (core.work.log_histogram)."""


class LoadOfService(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The load of one service at one gateway, as `core.work.service_load.ServiceLoad`."""

    service: ServiceId
    in_flight: Count = 0
    waiting: Count = 0
    oldest_wait_s: Seconds = 0.0
    arrived: Count = 0
    first_tokens: Counts = {}
    unanswered: Counts = {}
    kv: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0

    def load(self) -> ServiceLoad:
        """The figures."""
        return ServiceLoad(
            in_flight=self.in_flight,
            waiting=self.waiting,
            oldest_wait_s=self.oldest_wait_s,
            arrived=self.arrived,
            first_tokens=self.first_tokens,
            unanswered=self.unanswered,
            kv=self.kv,
        )


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of services now. `gateway`: an id that the gateway has drawn at its start."""

    gateway: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{8,64}$")]
    services: Annotated[list[LoadOfService], msgspec.Meta(max_length=SERVICES_MAX)]


class LoadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Services whose figures were not taken over: they do not exist, or this token may not change them."""

    ignored: list[ServiceId] = []
