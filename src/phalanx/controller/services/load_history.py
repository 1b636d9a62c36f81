"""How the load of services was: the last hour in points of 10 s and the last day in points of 5 minutes, in the memory of the head."""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import ServiceId
from phalanx.core.lifecycle.load_scaling import SLOW_SHARE
from phalanx.core.work.services.log_histogram import merged, quantile
from phalanx.core.work.services.service_load import ServiceLoad

LEVELS: Final = ((10, 360), (300, 288))  # seconds of a point, and how many of them are kept
SERVICES_MAX: Final = 500  # beyond it, the service that was silent for longest is dropped: 42 KB of memory each
_PACKED: Final = struct.Struct("<I7f")


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The load of a service in one span of time.

    Attributes:
        begin_s: Unix time at which it begins.
        requests_per_s, tokens_per_s: that came, and that were answered.
        ttft_s: time to the first token of 9 of 10 streams, 0 without any.
        in_flight, waiting: the most at one time.
        ready, wanted: replicas at its end, those that sleep not counted.
    """

    begin_s: int
    requests_per_s: float
    tokens_per_s: float
    ttft_s: float
    in_flight: float
    waiting: float
    ready: float
    wanted: float


@dataclass(slots=True)
class _Level:
    step_s: int
    points: deque[bytes]
    begin_s: int = -1
    requests: int = 0
    tokens: int = 0
    in_flight: int = 0
    waiting: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)
    replicas: tuple[int, int] = (0, 0)

    def add(self, load: ServiceLoad, now_s: float, replicas: tuple[int, int]) -> None:
        begin_s = int(now_s // self.step_s) * self.step_s
        if begin_s != self.begin_s:
            self._close()
            self.begin_s = begin_s
        self.requests += load.arrived
        self.tokens += load.tokens
        self.in_flight = max(self.in_flight, load.in_flight)
        self.waiting = max(self.waiting, load.waiting)
        self.first_tokens = merged((self.first_tokens, load.first_tokens))
        self.replicas = replicas

    def _close(self) -> None:
        if self.begin_s >= 0:
            ttft_s = quantile(self.first_tokens, SLOW_SHARE)
            rates = self.requests / self.step_s, self.tokens / self.step_s
            self.points.append(_PACKED.pack(self.begin_s, *rates, ttft_s, self.in_flight, self.waiting, *self.replicas))
        self.requests = self.tokens = self.in_flight = self.waiting = 0
        self.first_tokens = {}


@dataclass(slots=True)
class LoadHistory:
    """See the module. Memory is bounded by `SERVICES_MAX` and `LEVELS`; a head that starts has no history."""

    _levels: OrderedDict[ServiceId, list[_Level]] = field(default_factory=OrderedDict)  # that reported last at the end

    def add(self, service: ServiceId, load: ServiceLoad, now_s: float, *, ready: int, wanted: int) -> None:
        """Take over figures that gateways reported. `now_s`: Unix time."""
        if service not in self._levels:
            if len(self._levels) >= SERVICES_MAX:
                self._levels.popitem(last=False)
            self._levels[service] = [_Level(step_s, deque(maxlen=count)) for step_s, count in LEVELS]
        self._levels.move_to_end(service)
        for level in self._levels[service]:
            level.add(load, now_s, (ready, wanted))

    def points(self, service: ServiceId, span_s: float) -> tuple[int, list[LoadPoint]]:
        """Return the seconds of a point and the finished points, the oldest first, at the finest level that has such a span.

        May be called on any thread.
        """
        at = next((at for at, (step_s, count) in enumerate(LEVELS) if step_s * count >= span_s), len(LEVELS) - 1)
        levels = self._levels.get(service)
        packed = () if levels is None else tuple(levels[at].points)  # one bytecode, so no other thread can interleave
        return LEVELS[at][0], [LoadPoint(*_PACKED.unpack(one)) for one in packed]

    def forget(self, service: ServiceId) -> None:
        """Drop a service."""
        self._levels.pop(service, None)
