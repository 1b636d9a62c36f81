"""What the gateway knows of each service: its replicas, the prefixes that they have read, and the requests that wait for a replica."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from phalanx.core.ids import ProjectId
from phalanx.gateway.prefixes import PrefixIndex, prefix_hashes
from phalanx.gateway.routing import RoutedReplica, choose_replica, expected_tokens
from phalanx.wire.api.services import ProjectTerms, ServiceView

AVOIDED_S: Final = 5.0  # after a connection that failed: the head notices a dead replica within this
_numbers = itertools.count(1)


class WaitingRoomFull(Exception):
    """As many requests wait as may."""


class WaitingRoom:
    """Requests without a replica, in the order of their arrival."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._called: OrderedDict[int, asyncio.Event] = OrderedDict()
        self._first = self._next = 0

    def __len__(self) -> int:
        return len(self._called)

    def enter(self, *, first: bool = False) -> tuple[int, asyncio.Event]:
        """Wait at the end of the line, or as the `first`. Returns the number of the place, and what is set once the request is called.

        Raises:
            WaitingRoomFull: there is no place.
        """
        if len(self._called) >= self.size_max and not first:
            raise WaitingRoomFull
        event = asyncio.Event()
        if first:
            self._first -= 1
            number = self._first
        else:
            number = self._next
            self._next += 1
        self._called[number] = event
        if first:
            self._called.move_to_end(number, last=False)
        return number, event

    def before(self, number: int) -> int:
        """Return how many requests are before this one, at most: those that left in between are counted."""
        return number - next(iter(self._called), number)

    def leave(self, number: int, called: asyncio.Event) -> None:
        """Forget a request that does not wait any longer. Once it was called, its number may be that of another."""
        if self._called.get(number) is called:
            del self._called[number]

    def call(self, count: int) -> None:
        """Call the first ones: the replicas can take this many."""
        for _ in range(min(count, len(self._called))):
            number, event = self._called.popitem(last=False)
            self._first = number + 1
            event.set()


class RoutedService:
    """One service and its replicas that are ready."""

    def __init__(self, view: ServiceView, *, replica_limit: int, waiting_max: int) -> None:
        self.view = view
        self.replicas: dict[str, RoutedReplica] = {}
        self.waiting = WaitingRoom(waiting_max)
        self._prefixes = PrefixIndex()
        self._limit = replica_limit
        self.update(view)

    def update(self, view: ServiceView) -> None:
        """Take over which replicas are ready. The counts of those that stay go on."""
        self.view = view
        ready = {str(one.job_id): f"http://{_host(one.address)}:{one.port}" for one in view.endpoints if one.ready}
        for job_id in [job_id for job_id, replica in self.replicas.items() if ready.get(job_id) != replica.url]:
            self._prefixes.forget(self.replicas.pop(job_id).slot)
        for job_id in ready.keys() - self.replicas.keys():
            taken = {one.slot for one in self.replicas.values()}
            slot = next(number for number in itertools.count() if number not in taken)
            self.replicas[job_id] = RoutedReplica(job_id=job_id, url=ready[job_id], slot=slot, limit=self._limit)
        self.call_waiting()

    def choose(
        self, prompt: bytes, answer_tokens: int | None, excluded: frozenset[str] = frozenset()
    ) -> tuple[RoutedReplica, int] | None:
        """Choose a replica and count the request there; returns it with the tokens to count down. None if none can take it now."""
        hashes = prefix_hashes(prompt)
        matches = self._prefixes.matches(hashes)
        whole = expected_tokens(len(prompt), 0.0, answer_tokens)
        now_s = time.monotonic()
        found = choose_replica(self.replicas.values(), matches, len(hashes), whole, now_s, excluded=excluded)
        if found is None:
            return None
        share = matches.get(found.slot, 0) / max(1, len(hashes))
        tokens = expected_tokens(len(prompt), share, answer_tokens)
        found.begin(tokens, next(_numbers))
        self._prefixes.add(hashes, found.slot)
        return found, tokens

    def done(self, replica: RoutedReplica, tokens: int) -> None:
        """Count a request down, and call the next that waits."""
        replica.end(tokens)
        self.call_waiting()

    def failed(self, replica: RoutedReplica) -> None:
        """Avoid a replica that could not be reached for a while."""
        replica.avoided_until_s = time.monotonic() + AVOIDED_S

    def call_waiting(self) -> None:
        """Call as many waiting requests as the replicas can take now."""
        now_s = time.monotonic()
        usable = (one for one in self.replicas.values() if one.avoided_until_s <= now_s)
        self.waiting.call(sum(max(0, one.limit - one.in_flight) for one in usable))


class ServiceTable:
    """All services by name."""

    def __init__(self, *, replica_limit: int, waiting_max: int) -> None:
        self._limit, self._waiting_max = replica_limit, waiting_max
        self.services: dict[str, RoutedService] = {}
        self.terms: dict[ProjectId, ProjectTerms] = {}

    def is_open(self, project: ProjectId) -> bool:
        """Return whether all users belong to a project."""
        terms = self.terms.get(project)
        return terms is not None and terms.open

    def update(self, views: Iterable[ServiceView], terms: Iterable[ProjectTerms] = ()) -> None:
        """Take over the list of the head, with the terms of projects."""
        self.terms = {one.project: one for one in terms}
        by_name = {str(view.name): view for view in views if view.stopped_s is None}
        for name in self.services.keys() - by_name.keys():
            gone = self.services.pop(name)
            gone.update(structs.replace(gone.view, endpoints=[]))
            gone.waiting.call(len(gone.waiting))  # they find no service
        for name, view in by_name.items():
            if name in self.services:
                self.services[name].update(view)
            else:
                self.services[name] = RoutedService(view, replica_limit=self._limit, waiting_max=self._waiting_max)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
