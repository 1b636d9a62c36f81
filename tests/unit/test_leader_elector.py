"""A head's campaign over an election that a test writes: what it does whatever else stands still."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

import logging
import threading
from dataclasses import dataclass, field

import pytest

from phalanx.app.clock import SystemClock
from phalanx.app.leader_elector import LeaderElector
from phalanx.controller.leadership import LEASE_S
from phalanx.core.errors import TryLater
from phalanx.ports.election import ElectionUnavailable, HeadRecord, Leader

MINE = HeadRecord(name="a", head_id="a", url="http://a:1", version="1")


@dataclass
class Voice:
    """An election without rivals. `away`: the database does not answer any more."""

    row: Leader = field(default_factory=lambda: Leader(term=0, beat=0))
    away: bool = False

    def read_leader(self) -> Leader:
        if self.away:
            raise ElectionUnavailable("the database does not answer")
        return self.row

    def claim(self, seen: Leader, mine: HeadRecord, *, lease_s: float, grants_s: float) -> int | None:
        self.row = Leader(
            term=seen.term + 1, beat=seen.beat + 1, holder=mine.head_id, lease_s=lease_s, grants_s=grants_s
        )
        return self.row.term

    def renew(self, term: int) -> bool:
        return self.read_leader().term == term

    def register(self, mine: HeadRecord) -> None:
        pass

    def heads(self) -> list[HeadRecord]:
        return [MINE]


class Falters(Voice):
    """The database goes away in the moment after the claim."""

    def claim(self, seen: Leader, mine: HeadRecord, *, lease_s: float, grants_s: float) -> int | None:
        self.away = True
        return super().claim(seen, mine, lease_s=lease_s, grants_s=grants_s)


class Stuck(logging.Handler):
    """A log whose disk hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.freed.wait(30.0)


@pytest.mark.serial
def test_head_whose_log_hangs_gives_up_in_time_all_the_same():
    lost, voice, stuck = threading.Event(), Voice(), Stuck()
    campaign = LeaderElector(voice, MINE, SystemClock(), lease_s=9.0, on_lost=lambda _: lost.set())
    assert campaign.wait_for_term() is not None
    logging.getLogger("phalanx.heads").addHandler(stuck)
    try:
        voice.away = True
        began_s = SystemClock().boottime_s()
        assert lost.wait(100)
        assert not campaign.leads()
        assert SystemClock().boottime_s() - began_s < 9.0, "before its lease is over"
    finally:
        logging.getLogger("phalanx.heads").removeHandler(stuck)
        stuck.freed.set()


def test_term_that_was_claimed_is_held_though_the_row_cannot_be_read_after_it():
    campaign = LeaderElector(Falters(), MINE, SystemClock(), lease_s=9.0, on_lost=lambda _: None)
    guard = threading.Timer(10.0, campaign.stop_waiting)  # without the term it would wait for ever
    guard.start()
    try:
        tenure = campaign.wait_for_term()
        assert tenure is not None
        assert (tenure.term, campaign.leads(), campaign.previous_leader.term) == (1, True, 0)
    finally:
        guard.cancel()
        campaign.stop_waiting()


def test_news_that_are_passed_on_slowly_cost_no_term():
    told, freed, lost = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        told.set()
        freed.wait(30.0)

    campaign = LeaderElector(
        Voice(), MINE, SystemClock(), lease_s=9.0, on_lost=lambda _: lost.set(), on_heads_changed=slow
    )
    standing = threading.Thread(target=campaign.wait_for_term, daemon=True)
    standing.start()
    try:
        assert told.wait(100)
        assert not lost.wait(LEASE_S + 0.5)
        assert campaign.leads()
    finally:
        freed.set()
        campaign.stop_waiting()


def test_news_that_could_not_be_passed_on_are_passed_on_again():
    told: list[int] = []
    twice = threading.Event()

    def first_refused() -> None:
        told.append(1)
        if len(told) == 1:
            raise TryLater("8 reads of the database are under way already")
        twice.set()

    campaign = LeaderElector(
        Voice(), MINE, SystemClock(), lease_s=9.0, on_lost=lambda _: None, on_heads_changed=first_refused
    )
    try:
        assert campaign.wait_for_term() is not None
        assert twice.wait(100)
        assert campaign.leads()
    finally:
        campaign.stop_waiting()
