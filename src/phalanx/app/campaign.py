"""One head's campaign: a thread waits for its turn to lead; once it leads, one thread renews and another watches the clock.

Decides nothing: `controller.leadership` says when to try and when to stop. `leads` may be asked from any thread.
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
    Tenure,
    Watch,
    leads_until_s,
    look_in_s,
    may_claim,
    renewed,
    watched,
)
from phalanx.core.errors import PhalanxError
from phalanx.node.shell.journal import briefly
from phalanx.ports.clock import Clock
from phalanx.ports.election import Election, HeadRecord, Leader, NoElection

SAY_EVERY_S: Final = 1.0  # how late another head or a handover learns that we are there
PRESENT_S: Final = 5.0  # a head that was not seen for this long does not stand by
_WATCH_EVERY_S: Final = 0.05
_log = logging.getLogger("phalanx.heads")


class Campaign:
    """Our part in the election.

    Args:
        election: our voice.
        mine: our row among the heads.
        clock: CLOCK_BOOTTIME is judged by.
        grants_s: the lease that we grant supervisors when we lead.
        on_lost: called once, on a thread of ours, when a term that we held is over without our having released it. Must not return
            to work that acts as a leader.
        on_news: called when another head leads or the heads are others; on a thread of ours that nothing else waits for, and again where
            it fails.
    """

    def __init__(
        self,
        election: Election,
        mine: HeadRecord,
        clock: Clock,
        *,
        grants_s: float,
        on_lost: Callable[[str], None],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._election, self._mine, self._clock = election, mine, clock
        self._grants_s = grants_s
        self._on_lost, self.on_news = on_lost, on_news
        self.before = Leader(term=0, beat=0)  # the row from which we took over
        self._speaking = threading.Lock()  # the election is not for several threads at once
        self._ended = threading.Event()
        self._news = threading.Event()
        self._watch: Watch | None = None
        self._tenure: Tenure | None = None
        self._heads: list[HeadRecord] = []
        self._said_s = 0.0
        self._silent = ""
        self._threads: list[threading.Thread] = []

    # ---- what others ask ----------------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The term that we hold, else the newest seen."""
        return self._tenure.term if self._tenure is not None else self.leader().term

    @property
    def mine(self) -> HeadRecord:
        """Our own row."""
        return self._mine

    def leads(self) -> bool:
        """Whether we may answer and command at this moment."""
        tenure = self._tenure
        return tenure is not None and not self._ended.is_set() and self._clock.boottime_s() < leads_until_s(tenure)

    def leader(self) -> Leader:
        """The row about who leads, as last read; before the first reading one of term 0."""
        return Leader(term=0, beat=0) if self._watch is None else self._watch.leader

    def heads(self) -> list[HeadRecord]:
        """All heads, as last read, by name."""
        return self._heads

    def urls(self) -> list[str]:
        """Where heads are: ours first, then the others by name."""
        others = [head.url for head in self._heads if head.name != self._mine.name]
        return list(dict.fromkeys([self._mine.url, *others]))

    def relieved(self) -> bool:
        """Whether another head stands by that would take over at once."""
        return any(head.name != self._mine.name and head.seen_ago_s < PRESENT_S for head in self._heads)

    # ---- waiting ------------------------------------------------------------------------------------------------------

    def stand(self) -> Tenure | None:
        """Wait until we lead; None where `end` came first."""
        threading.Thread(target=self._telling, name="heads-news", daemon=True).start()
        while not self._ended.is_set():
            try:
                tenure = self._look()
            except NoElection as error:
                self._note_silence(error.message)
                tenure = None
            if tenure is not None:
                return tenure
            self._ended.wait(look_in_s(self._watch, self._clock.boottime_s()))
        return None

    def _look(self) -> Tenure | None:
        with self._speaking:
            leader = self._election.look()
            self._note_silence("")
            before, self._watch = self._watch, watched(self._watch, leader, self._clock.boottime_s())
            self._say()
            if before is None or before.leader.holder != leader.holder:
                self._news.set()
            if not may_claim(self._watch, self._clock.boottime_s()):
                return None
            asked_s = self._clock.boottime_s()
            term = self._election.claim(leader, self._mine, lease_s=LEASE_S, grants_s=self._grants_s)
            if term is None:
                return None
            self.before = leader
            self._tenure = Tenure(term=term, asked_s=asked_s)
            with contextlib.suppress(NoElection):  # the term is ours; the next renewal reads the row as well
                self._watch = watched(self._watch, self._election.look(), self._clock.boottime_s())
        _log.info("this head leads: term %d, after %s", term, leader.holder or "nobody")
        self._hold()
        return self._tenure

    # ---- leading ------------------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        for name, run in (("renew", self._renewing), ("term-watch", self._watching)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _renewing(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            asked_s = self._clock.boottime_s()
            try:
                with self._speaking:
                    held = self._election.renew(self.term)
                    if held and self._tenure is not None:
                        self._tenure = renewed(self._tenure, asked_s)
                        self._watch = watched(self._watch, self._election.look(), self._clock.boottime_s())
                    if held:
                        self._say()
            except NoElection as error:
                self._note_silence(error.message)
                continue
            self._note_silence("")
            if not held:
                self.lost(f"term {self.term} has passed to another head")
                return

    def _watching(self) -> None:
        while not self._ended.wait(_WATCH_EVERY_S):
            if not self.leads():
                self.lost(f"term {self.term} could not be renewed in time")
                return

    def lost(self, why: str) -> None:
        """The term is over, whoever noticed. Harmless twice."""
        if not self._ended.is_set():
            self._ended.set()
            briefly(lambda: _log.error("this head leads no longer, and begins anew: %s", why))
            self._on_lost(why)

    def grant_long(self, lease_s: float) -> None:
        """Write down that supervisors may hold leases of this length."""
        with self._speaking:
            self._election.grant_long(self.term, lease_s)

    # ---- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """No longer wait for our turn. Safe in a signal handler."""
        self._ended.set()

    def release(self) -> None:
        """A planned end: give up the term and our row, so that another leads at once. What fails is found out by the others' patience."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=LEASE_S)
        try:
            with self._speaking:
                if self._tenure is not None:
                    self._election.release(self._tenure.term)
                self._election.leave(self._mine.name)
        except NoElection as error:
            _log.warning("the term was not given up: %s", error)
        self._election.close()

    # ---- our row ------------------------------------------------------------------------------------------------------

    def _say(self) -> None:
        now_s = self._clock.boottime_s()
        if self._said_s and now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        self._election.say(self._mine)
        before, self._heads = self._heads, self._election.heads()
        if [_address(head) for head in before] != [_address(head) for head in self._heads]:
            self._news.set()

    def _telling(self) -> None:
        """Pass news on: by a store or a disk that may be slow, so never within a renewal."""
        while not self._ended.is_set():
            if not self._news.wait(SAY_EVERY_S):
                continue
            self._news.clear()
            try:
                self.on_news()
            except (PhalanxError, OSError) as error:
                _log.warning("which heads there are could not be passed on, and is again: %s", error)
                self._ended.wait(SAY_EVERY_S)
                self._news.set()

    def _note_silence(self, why: str) -> None:
        """Into the log once for each kind, not five times a second."""
        if why != self._silent:
            self._silent = why
            if why:
                _log.warning("%s", why)
            else:
                _log.info("the shared database answers again")


def _address(head: HeadRecord) -> tuple[str, str, str]:
    return head.name, head.url, head.token_sha256
