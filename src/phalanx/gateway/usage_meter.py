"""Counts what requests use of services, by hour, until it is reported. Pure: times are given in Unix milliseconds that never go back.

A replica is busy while it has requests. Times that cross an hour are divided between both; requests and tokens belong to the hour of their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Final

from phalanx.core.ids import JobId, ProjectId, ServiceId, UserId
from phalanx.core.work.services.service_use import COUNTS, ReplicaUse, ServiceUse, ServiceUseHour

HOUR_MS: Final = 3_600_000
_Replica = tuple[str, str]  # service, job
_counts: Final = attrgetter(*COUNTS)


@dataclass(slots=True)
class _Hour:
    """What is counted of one hour: the counts by service, project and user, and the busy times of replicas."""

    uses: dict[tuple[ServiceId, ProjectId, UserId], tuple[int, ...]] = field(default_factory=dict)
    busy: dict[_Replica, int] = field(default_factory=dict)

    def whole(self, hour_ms: int) -> ServiceUseHour:
        """Return it as it is reported."""
        return ServiceUseHour(
            id=str(hour_ms // 1000),
            uses=tuple(
                ServiceUse(service=service, project=project, user=user, **dict(zip(COUNTS, counts, strict=True)))
                for (service, project, user), counts in self.uses.items()
            ),
            replicas=tuple(
                ReplicaUse(service=ServiceId(service), job=JobId(job), busy=busy)
                for (service, job), busy in self.busy.items()
            ),
        )


class UsageMeter:
    """The counts of one gateway since `take` was called last."""

    def __init__(self) -> None:
        self._hours: dict[int, _Hour] = {}
        self._running: dict[_Replica, list[int]] = {}  # number of requests, and since when they are counted
        self._known: set[tuple[int, _Replica]] = set()  # hours for which a replica is reported, even if it does nothing

    def begin(self, service: str, job: str, now_ms: int) -> None:
        """A replica got a request."""
        found = self._running.setdefault((service, job), [0, now_ms])
        found[0] += 1

    def end(self, service: str, job: str, now_ms: int) -> None:
        """It has one less."""
        key = (service, job)
        found = self._running[key]
        found[0] -= 1
        if not found[0]:
            self._add_busy(key, found[1], now_ms)
            del self._running[key]

    def add(self, use: ServiceUse, now_ms: int) -> None:
        """Count a request that has ended."""
        uses, key = self._hour(now_ms).uses, (use.service, use.project, use.user)
        known, counts = uses.get(key), _counts(use)
        uses[key] = counts if known is None else tuple(map(add, known, counts))

    def take(self, replicas: Iterable[_Replica], now_ms: int) -> list[ServiceUseHour]:
        """Return everything since the last call, also of requests that are under way. `replicas`: that are ready now."""
        for key, found in self._running.items():
            self._add_busy(key, found[1], now_ms)
            found[1] = now_ms
        hour_ms = now_ms - now_ms % HOUR_MS
        self._known = {one for one in self._known if one[0] == hour_ms}
        for key in replicas:
            if (hour_ms, key) not in self._known:
                self._known.add((hour_ms, key))
                self._hour(now_ms).busy.setdefault(key, 0)
        taken, self._hours = [self._hours[hour].whole(hour) for hour in sorted(self._hours)], {}
        return taken

    def _add_busy(self, key: _Replica, begin_ms: int, end_ms: int) -> None:
        for hour_ms, busy_ms in divide_by_hour(begin_ms, end_ms):
            busy = self._hour(hour_ms).busy
            busy[key] = busy.get(key, 0) + busy_ms

    def _hour(self, at_ms: int) -> _Hour:
        hour_ms = at_ms - at_ms % HOUR_MS
        found = self._hours.get(hour_ms)
        if found is None:
            found = self._hours[hour_ms] = _Hour()
        return found


def divide_by_hour(begin_ms: int, end_ms: int) -> Iterator[tuple[int, int]]:
    """Yield the hours of a span, each with the milliseconds in it."""
    while begin_ms < end_ms:
        hour_ms = begin_ms - begin_ms % HOUR_MS
        until_ms = min(end_ms, hour_ms + HOUR_MS)
        yield hour_ms, until_ms - begin_ms
        begin_ms = until_ms


def request_use(
    service: str, project: str, user: str, *, prompt: int, answer: int, estimated: bool, stream_ms: int
) -> ServiceUse:
    """Return the use of one request. Its tokens are in the KV cache for the time at its replica: the prompt for all of it, the answer for half."""
    return ServiceUse(
        service=ServiceId(service),
        project=ProjectId(project),
        user=UserId(user),
        requests=1,
        estimated=int(estimated),
        prompt_tokens=prompt,
        answer_tokens=answer,
        stream_ms=stream_ms,
        kv_token_ms=(2 * prompt + answer) * stream_ms // 2,
    )
