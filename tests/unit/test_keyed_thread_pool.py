"""Hands where the system gives no thread more."""

# mypy: disable-error-code="arg-type"

import threading
from types import SimpleNamespace

import pytest

from phalanx.node.diagnosis.rank_monitor import RankMonitor
from phalanx.node.logic.events import MemberKey, TaskEnded
from phalanx.node.processes.thread_pool import KeyedThreadPool

PATIENCE_S = 100.0


@pytest.fixture
def no_thread(monkeypatch):
    """From when it is called until it is called again, no thread can be started."""
    start, state = threading.Thread.start, SimpleNamespace(refused=False)

    def maybe(thread):
        if state.refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", maybe)

    def switch():
        state.refused = not state.refused

    return switch


def test_work_is_done_by_the_hands_there_are(no_thread):
    """Found by reading: who submitted it got the fault, and the place of a hand that never began was gone."""
    hands, gate, done = KeyedThreadPool("t", 2), threading.Event(), threading.Event()
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(PATIENCE_S)

    hands.submit("a", wait)
    assert begun.wait(PATIENCE_S)
    no_thread()
    hands.submit("b", done.set)
    no_thread()
    side = threading.Event()
    hands.submit("c", side.set)  # the second hand's place is still there, and it finds what waited
    assert side.wait(PATIENCE_S)
    assert done.wait(PATIENCE_S)
    gate.set()
    hands.close(PATIENCE_S)


def test_without_any_hand_the_work_is_refused_and_its_lane_is_free(no_thread):
    hands, done = KeyedThreadPool("t", 1), []
    no_thread()
    with pytest.raises(RuntimeError, match="new thread"):
        hands.submit("a", lambda: done.append("refused"))
    no_thread()
    last = threading.Event()
    hands.submit("a", last.set)
    assert last.wait(PATIENCE_S)
    assert done == []
    hands.close(PATIENCE_S)


def test_the_end_of_a_task_is_told_also_where_nobody_can_look_why(no_thread):
    """Found by reading: the fault ended the thread that hears of all ends, and the supervisor was deaf."""
    told: list[object] = []
    watch = RankMonitor((), told.append)
    no_thread()
    end = TaskEnded(key=MemberKey("1", 1, 0), rank=0, code=1, signal=None, ended_ns=1, at_s=0.0)
    watch.on_task_end(SimpleNamespace(asked_to_end=False, memory_overuse=None), end, None, None)
    assert told == [end]
    no_thread()
    watch.close(PATIENCE_S)
