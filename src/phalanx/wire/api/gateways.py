"""Reports of gateways to the head."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from phalanx.core.ids import ServiceId
from phalanx.core.work.services.log_histogram import CLASSES
from phalanx.core.work.services.revision_figures import RevisionFigures
from phalanx.core.work.services.service_load import ServiceLoad
from phalanx.core.work.services.service_use import ServiceUseHour

SERVICES_MAX: Final = 10_000
REVISIONS_MAX: Final = 8  # of a service in one report; two are compared
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Counts = dict[Annotated[int, msgspec.Meta(ge=0, lt=CLASSES)], Count]
"""How many figures are in each class (core.work.log_histogram)."""
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


class FiguresOfRevision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The figures of one revision of a service at one gateway, as `core.work.services.revision_figures.RevisionFigures`."""

    revision: Annotated[int, msgspec.Meta(ge=1)]
    begun: Count = 0
    answered: Count = 0
    errors: Count = 0
    failing_sessions: Count = 0
    first_tokens: Counts = {}
    speeds: Counts = {}
    unanswered: Counts = {}

    def figures(self) -> RevisionFigures:
        """The figures."""
        return RevisionFigures(
            begun=self.begun,
            answered=self.answered,
            errors=self.errors,
            failing_sessions=self.failing_sessions,
            first_tokens=self.first_tokens,
            speeds=self.speeds,
            unanswered=self.unanswered,
        )


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
    tokens: Count = 0
    revisions: Annotated[list[FiguresOfRevision], msgspec.Meta(max_length=REVISIONS_MAX)] = []

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
            tokens=self.tokens,
            revisions={one.revision: one.figures() for one in self.revisions},
        )


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of services now. `gateway`: an id that the gateway has drawn at its start."""

    gateway: Annotated[str, msgspec.Meta(pattern="^[a-z0-9-]{8,64}$")]
    services: Annotated[list[LoadOfService], msgspec.Meta(max_length=SERVICES_MAX)]


class LoadReply(msgspec.Struct, frozen=True, kw_only=True):
    """Services whose figures were not taken over: they do not exist, or this token may not change them."""

    ignored: list[ServiceId] = []
