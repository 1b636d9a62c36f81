"""The line of requests that wait for a replica: fair between projects, by age and priority within one."""

# mypy: disable-error-code="var-annotated, assignment"

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.ids import ProjectId, QueueId, ServiceId, UserId
from phalanx.core.work.services.service import ServiceState
from phalanx.gateway.fair_queue import PRIORITY_MAX, FairQueue, QueueTerms, WaitingRoomFull
from phalanx.gateway.routing import RoutedReplica
from phalanx.gateway.services import RoutedService
from phalanx.wire.api.services import ServiceView

LONE = QueueTerms(project="nlp")


def called_order(queue, waiting):
    """The names of those that wait, in the order in which they are called."""
    found = []
    while len(queue):
        queue.call(1)
        (name,) = [name for name, one in waiting.items() if one.called.is_set() and name not in found]
        found.append(name)
    return found


def test_one_project_is_called_in_order_and_a_request_called_too_early_keeps_its_place():
    queue = FairQueue(3)
    first, second, third = (queue.enter(LONE, float(number)) for number in range(3))
    with pytest.raises(WaitingRoomFull):
        queue.enter(LONE, 3.0)
    assert [queue.before(one) for one in (first, second, third)] == [0, 1, 2]
    queue.call(1)
    assert first.called.is_set()
    assert not second.called.is_set()
    again = queue.enter(LONE, 4.0, first=True)
    assert queue.before(again) == 0
    queue.leave(first)
    queue.leave(second)
    queue.leave(second)
    assert len(queue) == 2
    queue.call(1)
    assert again.called.is_set()
    queue.call(5)
    assert third.called.is_set()
    assert len(queue) == 0


def test_a_flood_of_one_project_delays_the_single_request_of_another_by_one_turn():
    queue = FairQueue(10_000)
    waiting = {f"flood {number}": queue.enter(QueueTerms("flood", tokens=100), number / 1000) for number in range(200)}
    queue.call(3)
    waiting["single"] = queue.enter(QueueTerms("quiet", tokens=100), 2.0)
    assert queue.before(waiting["single"]) <= 2
    order = called_order(queue, {name: one for name, one in waiting.items() if not one.called.is_set()})
    assert order.index("single") <= 1


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.floats(0.25, 4.0), st.integers(1, 500)), min_size=2, max_size=4
    )
)
def test_tokens_are_divided_by_weights_whatever_the_size_of_requests(projects):
    """Of two projects that wait, one is ahead of the other by at most a request of each (Goyal et al., theorem 1)."""
    queue, got = FairQueue(10**6), Counter()
    waiting = [queue.enter(QueueTerms(name, *terms), 0.0) for name, terms in projects.items() for _ in range(60)]
    for _ in range(60):
        queue.call(1)
        (one,) = [one for one in waiting if one.called.is_set()]
        waiting.remove(one)
        got[one.terms.project] += one.terms.tokens / one.terms.weight
        if len({one.terms.project for one in waiting}) < len(projects):
            break
        for name, (weight, tokens) in projects.items():
            for other, (weight_2, tokens_2) in projects.items():
                assert got[name] - got[other] <= tokens / weight + tokens_2 / weight_2 + 1e-6


def test_an_idle_project_saves_nothing_up():
    queue = FairQueue(100)
    for number in range(50):
        queue.enter(QueueTerms("busy", tokens=10), float(number))
    queue.call(40)
    late = [queue.enter(QueueTerms("late", tokens=10), 50.0) for _ in range(10)]
    queue.call(10)
    assert sum(one.called.is_set() for one in late) in (5, 6), "half of the turns from now on, and not all of them"


def test_priorities_order_the_requests_of_one_project_and_starve_none():
    queue = FairQueue(1000)
    waiting = {"low": queue.enter(QueueTerms("nlp", priority=10**9), 0.0), "plain": queue.enter(LONE, 1.0)}
    waiting["urgent"] = queue.enter(QueueTerms("nlp", priority=-(10**9)), 30.0)
    late = 2.0 * PRIORITY_MAX + 1.0
    waiting["late and urgent"] = queue.enter(QueueTerms("nlp", priority=-1000), late)
    assert called_order(queue, waiting) == ["urgent", "plain", "low", "late and urgent"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "first", "leave", "call"]), st.integers(0, 30)), max_size=200))
def test_none_is_lost_or_called_twice(steps):
    queue, waiting = FairQueue(25), []
    for now_s, (step, number) in enumerate(steps):
        if step in ("enter", "first"):
            terms = QueueTerms("abc"[number % 3], weight=1.0 + number % 2, tokens=number)
            if len(waiting) >= 25 and step == "enter":
                with pytest.raises(WaitingRoomFull):
                    queue.enter(terms, float(now_s))
            else:
                waiting.append(queue.enter(terms, float(now_s), first=step == "first"))
        elif step == "leave" and waiting:
            queue.leave(waiting.pop(number % len(waiting)))
        elif step == "call":
            queue.call(number % 3)
            called = [one for one in waiting if one.called.is_set()]
            assert len(called) == min(number % 3, len(waiting))
            waiting = [one for one in waiting if not one.called.is_set()]
        assert len(queue) == len(waiting)
        assert all(0 <= queue.before(one) < max(1, len(waiting)) for one in waiting)
    queue.call(100)
    assert all(one.called.is_set() for one in waiting)


def test_requests_that_left_take_no_memory():
    queue = FairQueue(10)
    for number in range(5000):
        queue.leave(queue.enter(QueueTerms(f"p{number % 7}"), float(number)))
    assert sum(len(line.heap) for line in queue._lines.values()) <= 300


def test_places_that_are_freed_at_once_call_one_request_each():
    """A called request counts at its replica only once its task runs; until then the place is taken all the same."""
    view = ServiceView(
        name=ServiceId("chat"),
        state=ServiceState.READY,
        user=UserId("ann"),
        project=ProjectId("nlp"),
        queue=QueueId("q"),
        created_s=1.0,
        revision=1,
        served_revision=1,
        replicas="1",
        desired=1,
        ready=1,
    )
    service = RoutedService(view, replica_limit=8, waiting_max=100)
    service.replicas["1"] = RoutedReplica(slot=0, job_id="1", url="http://one", limit=8)
    requests = [service.choose(b"", 10) for _ in range(8)]
    waiting = [service.waiting.enter(LONE, float(number)) for number in range(20)]
    for found in requests:
        assert found is not None
        service.done(*found)
    assert [one.called.is_set() for one in waiting] == [True] * 8 + [False] * 12
    assert service.waiting.coming == 8
    for one in waiting[:3]:
        service.waiting.leave(one)  # two come to their replica, one has given up
    assert service.choose(b"", 10) is not None
    assert service.choose(b"", 10) is not None
    service.call_waiting()
    assert [one.called.is_set() for one in waiting] == [True] * 9 + [False] * 11
