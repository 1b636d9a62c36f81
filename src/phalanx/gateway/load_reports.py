"""Counts the load of services, and reports it to the head each second: of those whose number of replicas follows it, and of those with requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from phalanx.core.work.services.log_histogram import class_of
from phalanx.gateway.engine_metrics import EngineMetrics
from phalanx.gateway.services import RoutedService, ServiceTable
from phalanx.wire.api.gateways import LoadOfService, LoadReport

REPORT_S: Final = 1.0
SOON_S: Final = 0.02  # before a report that cannot wait, so that a herd makes one


class StreamTimer:
    """Times one request until its first token. `stream`: the client wants a stream; other answers have no first token."""

    __slots__ = ("_meter", "began_s", "stream")

    def __init__(self, meter: LoadMeter, *, stream: bool) -> None:
        self._meter, self.stream, self.began_s = meter, stream, time.monotonic()

    def waits(self) -> None:
        """No replica can take the request now. It may wait several times until one is chosen."""
        self._meter.waiting.setdefault(id(self), time.monotonic())

    def chosen(self) -> None:
        """A replica gets the request."""
        self._meter.waiting.pop(id(self), None)

    def first_token(self) -> None:
        """Note the first bytes of the answer; the others change nothing."""
        if self.stream:
            self.stream = False
            self._meter.unanswered.pop(id(self), None)
            self._meter.first_tokens[class_of(time.monotonic() - self.began_s)] += 1


class LoadMeter:
    """What is counted of one service between two reports. `unanswered`: streams without a first token; `waiting`: since when requests wait.

    `tokens`: of answers that ended.
    """

    def __init__(self) -> None:
        self.arrived = self.tokens = 0
        self.first_tokens: Counter[int] = Counter()
        self.unanswered: dict[int, StreamTimer] = {}
        self.waiting: dict[int, float] = {}

    @contextmanager
    def request(self, *, stream: bool) -> Iterator[StreamTimer]:
        """Count a request while it is under way."""
        timer = StreamTimer(self, stream=stream)
        self.arrived += 1
        if stream:
            self.unanswered[id(timer)] = timer
        try:
            yield timer
        finally:
            self.unanswered.pop(id(timer), None)
            self.waiting.pop(id(timer), None)

    def take(self, service: RoutedService, now_s: float) -> LoadOfService:
        """Return the load since the last call and now."""
        arrived, tokens, first_tokens = self.arrived, self.tokens, dict(self.first_tokens)
        self.arrived = self.tokens = 0
        self.first_tokens.clear()
        replicas = service.replicas.values()
        return LoadOfService(
            service=service.view.name,
            in_flight=sum(one.in_flight for one in replicas),
            waiting=len(self.waiting),
            oldest_wait_s=now_s - min(self.waiting.values(), default=now_s),
            arrived=arrived,
            first_tokens=first_tokens,
            unanswered=dict(Counter(class_of(now_s - one.began_s) for one in self.unanswered.values())),
            kv=sum(one.cache_use_at(now_s) for one in replicas) / max(1, len(replicas)),
            tokens=tokens,
            revisions=[] if service.canary is None else service.canary.take(),
        )


class LoadReporter:
    """Reports the load of services to the head.

    Args:
        table: the services.
        send: posts a report.
    """

    def __init__(self, table: ServiceTable, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._table, self._send = table, send
        self._meters: dict[str, LoadMeter] = {}
        self._soon = asyncio.Event()
        self._engines = EngineMetrics(table)
        self.gateway_id = uuid.uuid4().hex

    def meter(self, service: str) -> LoadMeter:
        """Return what counts a service."""
        found = self._meters.get(service)
        if found is None:
            found = self._meters[service] = LoadMeter()
        return found

    def report_soon(self) -> None:
        """A request waits and no replica is there: report at once."""
        self._soon.set()

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engines.run())
            while True:
                await self.report()
                try:
                    await asyncio.wait_for(self._soon.wait(), REPORT_S)
                    await asyncio.sleep(SOON_S)
                except TimeoutError:
                    pass
                self._soon.clear()

    async def report(self) -> None:
        """Report the load now. Figures that the head does not take over are lost: newer ones follow."""
        now_s = time.monotonic()
        services = sorted(self._table.services.items())
        loads = [
            self.meter(name).take(one, now_s)
            for name, one in services
            if one.view.scale or one.view.canary or name in self._meters
        ]
        for name in [name for name in self._meters if name not in self._table.services]:
            if not (self._meters[name].unanswered or self._meters[name].waiting):
                del self._meters[name]
        if loads:
            await self._send(msgspec.json.encode(LoadReport(gateway=self.gateway_id, services=loads)))
