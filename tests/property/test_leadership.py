"""Two heads never lead at once, whatever the network delays and however their clocks run, within what the margin is for."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.controller.leadership import (
    LEASE_S,
    POLL_EVERY_S,
    RENEW_EVERY_S,
    LeaderObservation,
    Tenure,
    leads_until_s,
    may_claim,
    observe,
    poll_in_s,
    previous_leases_s,
    renewed,
)
from phalanx.ports.election import Leader
from tests.effort import examples

DELAY = st.floats(0.0, 8.0)  # of a message, in true seconds: far more than a lease
RATE = st.floats(0.99, 1.01)  # of a head's clock against the true time
TICK_S = 0.05


@dataclass
class Head:
    """A head in virtual time. `asleep_until_s`: it is stopped so long, in true seconds; messages wait."""

    name: str
    rate: float
    asleep_until_s: float = 0.0
    tenure: Tenure | None = None
    watch: LeaderObservation | None = None
    asks_at_s: float = 0.0
    on_its_way: list[tuple[float, str, tuple]] = field(default_factory=list)

    def clock(self, true_s: float) -> float:
        return 1000.0 + true_s * self.rate

    def leads(self, true_s: float) -> bool:
        return self.tenure is not None and self.clock(true_s) < leads_until_s(self.tenure)


class Row:
    """The row in the database; what reaches it happens in one instant. `coming`: what is on its way to it."""

    def __init__(self) -> None:
        self.leader = Leader(term=0, beat=0)
        self.coming: list[tuple[float, float, Head, str, int, Leader, float]] = []

    def claim(self, seen: Leader, name: str) -> int | None:
        if (seen.term, seen.beat) != (self.leader.term, self.leader.beat):
            return None
        self.leader = Leader(term=seen.term + 1, beat=seen.beat + 1, holder=name, lease_s=LEASE_S)
        return self.leader.term

    def renew(self, term: int, name: str) -> bool:
        if (self.leader.term, self.leader.holder) != (term, name):
            return False
        self.leader = Leader(term=term, beat=self.leader.beat + 1, holder=name, lease_s=LEASE_S)
        return True


def turn(head: Head, row: Row, true_s: float, delays: list[float]) -> None:
    """One tick of a head: hear what has come, then say what is due."""
    if true_s < head.asleep_until_s:
        return
    now_s = head.clock(true_s)
    heard = [message for message in head.on_its_way if message[0] <= true_s]
    head.on_its_way = [message for message in head.on_its_way if message[0] > true_s]
    for _, kind, what in sorted(heard, key=lambda message: message[0]):
        if kind == "look":
            head.watch = observe(head.watch, what[0], now_s)
        elif kind == "claimed" and what[0] is not None:
            head.tenure = Tenure(term=what[0], sent_s=what[1])
        elif kind == "renewed" and head.tenure is not None and what[0]:
            head.tenure = renewed(head.tenure, what[1])
    if head.tenure is not None and not head.leads(true_s):
        head.tenure, head.watch = None, None  # it begins anew
    if true_s < head.asks_at_s:
        return
    head.asks_at_s = true_s + (RENEW_EVERY_S if head.tenure is not None else POLL_EVERY_S)
    there, back = delays.pop(), delays.pop()
    if head.tenure is not None:
        send(head, row, true_s, there, back, "renewed", now_s)
    elif head.watch is not None and may_claim(head.watch, now_s):
        send(head, row, true_s, there, back, "claimed", now_s)
    else:
        send(head, row, true_s, there, back, "look", now_s)


def send(head: Head, row: Row, true_s: float, there: float, back: float, kind: str, now_s: float) -> None:
    """What is asked reaches the row after `there`, and its answer the head after `back` more."""
    term = head.tenure.term if head.tenure is not None else 0
    seen = head.watch.leader if head.watch is not None else Leader(term=0, beat=0)
    row.coming.append((true_s + there, true_s + there + back, head, kind, term, seen, now_s))


def deliver(row: Row, true_s: float) -> None:
    """Everything that has reached the row by now, in order."""
    ready = sorted((event for event in row.coming if event[0] <= true_s), key=lambda event: event[0])
    row.coming = [event for event in row.coming if event[0] > true_s]
    for event in ready:
        _, answer_s, head, kind, term, seen, asked_s = event
        if kind == "look":
            what: tuple = (row.leader,)
        elif kind == "claimed":
            what = (row.claim(seen, head.name), asked_s)
        else:
            what = (row.renew(term, head.name), asked_s)
        head.on_its_way.append((answer_s, kind, what))


@settings(max_examples=examples(150), deadline=None)
@given(
    rates=st.tuples(RATE, RATE, RATE),
    sleeps=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 25), st.floats(0, 12)), max_size=5),
    slow=st.lists(DELAY, min_size=30, max_size=200),
)
def test_two_heads_never_lead_at_once(rates, sleeps, slow):
    row = Row()
    heads = [Head(name=str(number), rate=rate) for number, rate in enumerate(rates)]
    delays = [0.005] * 4000
    for number, delay in enumerate(slow):
        delays[-1 - 7 * number % 3000] = delay
    terms: list[int] = []
    for tick in range(int(30 / TICK_S)):
        true_s = tick * TICK_S
        for who, at_s, for_s in sleeps:
            if at_s <= true_s < at_s + TICK_S:
                heads[who].asleep_until_s = max(heads[who].asleep_until_s, at_s + for_s)
        deliver(row, true_s)
        for head in heads:
            turn(head, row, true_s, delays)
        leading = [head for head in heads if head.leads(true_s)]
        assert len(leading) <= 1, [(head.name, head.tenure) for head in leading]
        terms += [head.tenure.term for head in leading if head.tenure is not None]
    assert terms == sorted(terms)


@pytest.mark.parametrize("leaders", [0.99, 1.0, 1.01])
@pytest.mark.parametrize("waiters", [0.99, 1.0, 1.01])
def test_leader_stops_before_another_may_claim_though_its_beat_was_heard_the_moment_it_was_sent(leaders, waiters):
    """The worst case that chance above seldom draws: no delay at all, and clocks that run apart."""
    tenure = Tenure(term=1, sent_s=1000.0)
    watch = observe(None, Leader(term=1, beat=1, holder="a", lease_s=LEASE_S), 1000.0)
    stops_s = (leads_until_s(tenure) - 1000.0) / leaders
    reply_s = 0.1
    assert not may_claim(watch, 1000.0 + (stops_s + reply_s) * waiters)
    assert may_claim(watch, 1000.0 + LEASE_S)


def test_answers_to_renewals_may_overtake_each_other():
    tenure = renewed(renewed(Tenure(term=1, sent_s=10.0), 12.0), 11.0)
    assert (tenure.term, tenure.sent_s) == (1, 12.0)


def test_a_head_that_is_not_disturbed_leads_all_the_time():
    row, head, delays = Row(), Head(name="a", rate=1.0), [0.005] * 4000
    led = []
    for tick in range(400):
        deliver(row, tick * TICK_S)
        turn(head, row, tick * TICK_S, delays)
        led.append(head.leads(tick * TICK_S))
    assert all(led[20:])
    assert row.leader.term == 1


def test_a_silent_leader_is_followed_after_its_own_longer_lease():
    seen = Leader(term=3, beat=9, holder="a", lease_s=10.0)
    watch = observe(None, seen, 100.0)
    assert not may_claim(watch, 109.9)
    assert may_claim(watch, 110.0)


def test_a_term_that_was_given_up_is_free_at_once():
    assert may_claim(observe(None, Leader(term=3, beat=9), 100.0), 100.0)


def test_a_sign_of_life_begins_the_wait_anew():
    first = observe(None, Leader(term=3, beat=9, holder="a", lease_s=3.0), 100.0)
    same = observe(first, Leader(term=3, beat=9, holder="a", lease_s=3.0), 102.0)
    assert same.silent_since_s == 100.0
    alive = observe(same, Leader(term=3, beat=10, holder="a", lease_s=3.0), 102.5)
    assert not may_claim(alive, 105.0)


def test_leases_of_a_leader_that_gave_up_its_term_go_on():
    assert previous_leases_s(Leader(term=3, beat=9, grants_s=30.0)) == 30.0
    assert previous_leases_s(Leader(term=3, beat=9, grants_s=9.0, long_leases_left_s=600.0)) == 600.0


def test_who_waits_looks_again_when_it_may_claim_and_not_a_moment_later():
    watch = observe(None, Leader(term=3, beat=9, holder="a", lease_s=3.0), 100.0)
    assert poll_in_s(watch, 101.0) == POLL_EVERY_S
    assert poll_in_s(watch, 102.9) == pytest.approx(0.1)
    assert 0.0 < poll_in_s(watch, 102.9999999) < 0.01
    assert poll_in_s(watch, 103.0) == POLL_EVERY_S  # the claim that was just tried did not go through
    assert poll_in_s(None, 0.0) == POLL_EVERY_S
