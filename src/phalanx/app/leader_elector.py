"""Leader election of one head: a thread waits until it leads; then one thread renews the term and another watches the clock.

`controller.leadership` decides when to claim the term and when to stop. `leads` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final

from phalanx.controller.leadership import (
    LEASE_S,
    RENEW_EVERY_S,
    LeaderObservation,
    Tenure,
    leads_until_s,
    may_claim,
    observe,
    poll_in_s,
    renewed,
)
from phalanx.core.errors import PhalanxError
from phalanx.node.logs.log_format import log_with_timeout
from phalanx.ports.clock import Clock
from phalanx.ports.election import (
    Election,
    ElectionUnavailable,
    HeadRecord,
    Leader,
)

ANNOUNCE_EVERY_S: Final = 1.0  # how often this head reports its presence to the others
PRESENT_FOR_S: Final = 5.0  # a head that was silent for this long is not a standby
_WATCH_EVERY_S: Final = 0.05
_log = logging.getLogger("phalanx.heads")


class LeaderElector:
    """Takes part in the election for one head.

    Args:
        election: the shared election record.
        own_record: this head's own record.
        clock: its CLOCK_BOOTTIME is used.
        grants_s: the lease that this head grants supervisors when it leads.
        on_lost: called once, on a thread of this object, when the term ends without being released. It must stop all work of a leader.
        on_heads_changed: called when the leader or the list of heads changes, on a separate thread; retried if it fails.

    Attributes:
        on_renewed: called with the new end of the term, as `leads_until_s`, on the thread that renews it. It must not wait.
    """

    def __init__(
        self,
        election: Election,
        own_record: HeadRecord,
        clock: Clock,
        *,
        lease_s: float,
        on_lost: Callable[[str], None],
        on_heads_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._election, self._mine, self._clock = election, own_record, clock
        self._grants_s = lease_s
        self._on_lost, self.on_heads_changed = on_lost, on_heads_changed
        self.on_renewed: Callable[[float], None] = lambda _: None
        self.previous_leader = Leader(term=0, beat=0)  # the leader record that this head replaced
        self._election_lock = threading.Lock()  # `Election` is not thread-safe
        self._ended = threading.Event()
        self._news = threading.Event()
        self._watch: LeaderObservation | None = None
        self._tenure: Tenure | None = None
        self._heads: list[HeadRecord] = []
        self._announced_s = 0.0
        self._last_error = ""
        self._threads: list[threading.Thread] = []

    # ---- status -------------------------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The term that this head holds, else the newest term seen."""
        return self._tenure.term if self._tenure is not None else self.leader().term

    @property
    def own_record(self) -> HeadRecord:
        """This head's own record."""
        return self._mine

    def leads(self) -> bool:
        """Whether this head leads now, so that it may answer requests and send commands."""
        return not self._ended.is_set() and self._clock.boottime_s() < self.leads_until_s()

    def leads_until_s(self) -> float:
        """Return the last moment at which this head may answer, by CLOCK_BOOTTIME; 0 without a term."""
        return 0.0 if self._tenure is None else leads_until_s(self._tenure)

    def leader(self) -> Leader:
        """Return the leader record as last read; before the first read one of term 0."""
        return Leader(term=0, beat=0) if self._watch is None else self._watch.leader

    def heads(self) -> list[HeadRecord]:
        """Return all heads by name, as last read."""
        return self._heads

    def urls(self) -> list[str]:
        """Return the URLs of the heads: this one first, then the others by name."""
        others = [head.url for head in self._heads if head.name != self._mine.name]
        return list(dict.fromkeys([self._mine.url, *others]))

    def has_standby(self) -> bool:
        """Whether a standby can take over at once."""
        return any(head.name != self._mine.name and head.seen_ago_s < PRESENT_FOR_S for head in self._heads)

    # ---- waiting ------------------------------------------------------------------------------------------------------

    def wait_for_term(self) -> Tenure | None:
        """Wait until this head leads, and return its tenure; None if `end` was called first."""
        threading.Thread(target=self._run_news, name="heads-news", daemon=True).start()
        while not self._ended.is_set():
            try:
                tenure = self._look()
            except ElectionUnavailable as error:
                self._log_unreachable(error.message)
                tenure = None
            if tenure is not None:
                return tenure
            self._ended.wait(poll_in_s(self._watch, self._clock.boottime_s()))
        return None

    def _look(self) -> Tenure | None:
        with self._election_lock:
            leader = self._election.read_leader()
            self._log_unreachable("")
            before, self._watch = self._watch, observe(self._watch, leader, self._clock.boottime_s())
            self._announce()
            if before is None or before.leader.holder != leader.holder:
                self._news.set()
            if not may_claim(self._watch, self._clock.boottime_s()):
                return None
            asked_s = self._clock.boottime_s()
            term = self._election.claim(leader, self._mine, lease_s=LEASE_S, grants_s=self._grants_s)
            if term is None:
                return None
            self.previous_leader = leader
            self._tenure = Tenure(term=term, sent_s=asked_s)
            with contextlib.suppress(ElectionUnavailable):  # the term is held; the next renewal reads the record again
                self._watch = observe(self._watch, self._election.read_leader(), self._clock.boottime_s())
        _log.info("this head leads term %d; the previous leader was %s", term, leader.holder or "none")
        self._start_threads()
        return self._tenure

    # ---- leading ------------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        for name, run in (("renew", self._run_renewals), ("term-watch", self._run_term_watch)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run_renewals(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            asked_s = self._clock.boottime_s()
            try:
                with self._election_lock:
                    held = self._election.renew(self.term)
                    if held and self._tenure is not None:
                        self._tenure = renewed(self._tenure, asked_s)
                        self.on_renewed(leads_until_s(self._tenure))
                        self._watch = observe(self._watch, self._election.read_leader(), self._clock.boottime_s())
                    if held:
                        self._announce()
            except ElectionUnavailable as error:
                self._log_unreachable(error.message)
                continue
            self._log_unreachable("")
            if not held:
                self.lose_term(f"term {self.term} has passed to another head")
                return

    def _run_term_watch(self) -> None:
        while not self._ended.wait(_WATCH_EVERY_S):
            if not self.leads():
                self.lose_term(f"term {self.term} could not be renewed in time")
                return

    def lose_term(self, why: str) -> None:
        """End the term, which was lost. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            log_with_timeout(lambda: _log.error("this head no longer leads, and restarts: %s", why))
            self._on_lost(why)

    def record_long_leases(self, lease_s: float) -> None:
        """Record that supervisors may have leases of this length."""
        with self._election_lock:
            self._election.grant_long(self.term, lease_s)

    # ---- the end ------------------------------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """Stop waiting for the leadership. Safe in a signal handler."""
        self._ended.set()

    def release(self) -> None:
        """Release the term and remove this head's record, so that another head leads at once. If that fails, the others wait for the timeout."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=LEASE_S)
        try:
            with self._election_lock:
                if self._tenure is not None:
                    self._election.release(self._tenure.term)
                self._election.unregister(self._mine.name)
        except ElectionUnavailable as error:
            _log.warning("the term was not released, so the takeover waits for its timeout: %s", error)
        self._election.close()

    # ---- this head's record -------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        now_s = self._clock.boottime_s()
        if self._announced_s and now_s - self._announced_s < ANNOUNCE_EVERY_S:
            return
        self._announced_s = now_s
        self._election.register(self._mine)
        before, self._heads = self._heads, self._election.heads()
        if [_address(head) for head in before] != [_address(head) for head in self._heads]:
            self._news.set()

    def _run_news(self) -> None:
        """Call `on_heads_changed`. It may wait for a slow store or disk, so it never runs within a renewal."""
        while not self._ended.is_set():
            if not self._news.wait(ANNOUNCE_EVERY_S):
                continue
            self._news.clear()
            try:
                self.on_heads_changed()
            except (PhalanxError, OSError) as error:
                _log.warning("the new list of heads could not be stored; trying again: %s", error)
                self._ended.wait(ANNOUNCE_EVERY_S)
                self._news.set()

    def _log_unreachable(self, why: str) -> None:
        """Log an error of the database once, not at each retry; "" means that it answers again."""
        if why != self._last_error:
            self._last_error = why
            if why:
                _log.warning("%s", why)
            else:
                _log.info("the shared database is reachable again")


def _address(head: HeadRecord) -> tuple[str, str, str]:
    return head.name, head.url, head.token_sha256
