"""What the gateway knows of each service: its replicas, the prefixes that they have read, and the requests that wait for a replica."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from msgspec import structs

from phalanx.core.ids import ProjectId
from phalanx.gateway.canary_sessions import NoTrial, RevisionMeter, Session, SessionTrial
from phalanx.gateway.fair_queue import FairQueue
from phalanx.gateway.prefixes import PrefixIndex, prefix_hashes
from phalanx.gateway.routing import BYTES_PER_TOKEN, RoutedReplica, choose_replica, expected_tokens
from phalanx.wire.api.services import ProjectTerms, ServiceView

AVOIDED_S: Final = 5.0  # after a connection that failed: the head notices a dead replica within this
_numbers = itertools.count(1)


class RoutedService:
    """One service and its replicas that are ready. `prefixes`: that they have read. `clock`: monotonic seconds."""

    def __init__(
        self, view: ServiceView, *, replica_limit: int, waiting_max: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.view = view
        self._clock = clock
        self.replicas: dict[str, RoutedReplica] = {}
        self.waiting = FairQueue(waiting_max)
        self.canary: RevisionMeter | None = None
        self.prefixes = PrefixIndex()
        self.prefill: RoutedService | None = None  # its replicas read the prompts of this one
        self.reads_for = ""  # the service whose prompts this one reads, which pays for it
        self._limit = replica_limit
        self.update(view)

    def update(self, view: ServiceView) -> None:
        """Take over which replicas are ready. The counts of those that stay go on."""
        self.view = view
        self._follow_canary(view)
        revisions = {str(one.job_id): one.revision for one in view.endpoints}
        ready = {str(one.job_id): f"http://{_host(one.address)}:{one.port}" for one in view.endpoints if one.ready}
        gone = [job_id for job_id, replica in self.replicas.items() if ready.get(job_id) != replica.url]
        if gone:
            self.prefixes.forget(self.replicas.pop(job_id).slot for job_id in gone)
        for job_id in ready.keys() - self.replicas.keys():
            taken = {one.slot for one in self.replicas.values()}
            slot = next(number for number in itertools.count() if number not in taken)
            self.replicas[job_id] = RoutedReplica(
                job_id=job_id, url=ready[job_id], slot=slot, limit=self._limit, revision=revisions[job_id]
            )
        self.call_waiting()

    def choose(
        self,
        prompt: bytes,
        answer_tokens: int | None,
        excluded: frozenset[str] = frozenset(),
        session: Session | None = None,
    ) -> tuple[RoutedReplica, int] | None:
        """Choose a replica and count the request there; returns it with the tokens to count down. None if none can take it now.

        While sessions are divided, a replica of the other revision is chosen only where none of the session's own can take it.
        """
        hashes = prefix_hashes(prompt)
        matches = self.prefixes.matches(hashes)
        found = None
        for replicas in self._sides(session):
            found = found or choose_replica(
                replicas,
                matches,
                len(hashes),
                self._clock(),
                prompt_tokens=len(prompt) // BYTES_PER_TOKEN,
                excluded=excluded,
            )
        if found is None:
            return None
        share = matches.get(found.slot, 0) / max(1, len(hashes))
        tokens = expected_tokens(len(prompt), share, answer_tokens)
        found.begin(tokens, next(_numbers))
        self.prefixes.add(hashes, found.slot)
        return found, tokens

    def trial(
        self, replica: RoutedReplica, session: Session | None, *, stream: bool
    ) -> contextlib.AbstractContextManager[SessionTrial | NoTrial]:
        """Count a request at a replica while revisions are compared."""
        if self.canary is None or session is None:
            return contextlib.nullcontext(NoTrial())
        return self.canary.request(replica.revision, replica.job_id, session, stream=stream)

    def _sides(self, session: Session | None) -> Iterator[Iterable[RoutedReplica]]:
        if self.canary is not None:
            new, takes = self.canary.share.revision, self.canary.takes(session)
            yield [one for one in self.replicas.values() if (one.revision == new) == takes]
        yield self.replicas.values()

    def _follow_canary(self, view: ServiceView) -> None:
        share = view.canary
        if share is None:
            self.canary = None
        elif self.canary is None or self.canary.share.revision != share.revision:
            self.canary = RevisionMeter(str(view.name), share)
        else:
            self.canary.share = share

    def done(self, replica: RoutedReplica, tokens: int) -> None:
        """Count a request down, and call the next that waits."""
        replica.end(tokens)
        self.call_waiting()

    def failed(self, replica: RoutedReplica) -> None:
        """Avoid a replica that could not be reached for a while."""
        replica.avoided_until_s = self._clock() + AVOIDED_S

    def call_waiting(self) -> None:
        """Call as many waiting requests as the replicas can take now, beside those that were called and are not there yet.

        Those that come too late go before all others: if too many were called, a project's flood would keep the others waiting.
        """
        now_s = self._clock()
        usable = (one for one in self.replicas.values() if one.avoided_until_s <= now_s)
        self.waiting.call(sum(max(0, one.limit - one.in_flight) for one in usable) - self.waiting.coming)


class ServiceTable:
    """All services by name. `added`: gets each service to which replicas were added, with their jobs."""

    def __init__(self, *, replica_limit: int, waiting_max: int) -> None:
        self._limit, self._waiting_max = replica_limit, waiting_max
        self.services: dict[str, RoutedService] = {}
        self.terms: dict[ProjectId, ProjectTerms] = {}
        self.added: Callable[[RoutedService, set[str]], object] = lambda _service, _jobs: None

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
            before = set[str]()
            if name in self.services:
                before = set(self.services[name].replicas)
                self.services[name].update(view)
            else:
                self.services[name] = RoutedService(view, replica_limit=self._limit, waiting_max=self._waiting_max)
            added = self.services[name].replicas.keys() - before
            if added:
                self.added(self.services[name], added)
        self._pair()

    def _pair(self) -> None:
        """Join services with those that read prompts for them. Only the owner of a service may let another one read what it is asked."""
        for service in self.services.values():
            service.prefill, service.reads_for = None, ""
        for _, service in sorted(self.services.items()):
            answering = self.services.get(service.view.prefill_for)
            if answering is None or answering.view.prefill_for:
                continue
            ours, theirs = service.view, answering.view
            if (ours.user, ours.project) == (theirs.user, theirs.project) and answering.prefill is None:
                answering.prefill, service.reads_for = service, str(theirs.name)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
