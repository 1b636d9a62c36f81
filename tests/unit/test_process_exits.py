"""`ProcessExits` returns when a process ends, when it is woken, and when something is due."""

import os
import subprocess
import threading

import pytest

from phalanx.engines.local.process_exits import ProcessExits
from phalanx.engines.observations import Observations
from phalanx.node.processes.proctable import ProcessIdentity, identity


@pytest.fixture
def exits():
    made = ProcessExits()
    yield made
    made.close()


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def waiting(exits, processes):
    """A thread that waits without a time limit; it runs by the time this returns or soon after."""
    thread = threading.Thread(target=exits.wait, args=(processes, None), daemon=True)
    thread.start()
    return thread


def test_the_end_of_a_process_ends_the_wait(exits, child):
    thread = waiting(exits, [identity(child.pid)])
    thread.join(0.1)
    assert thread.is_alive()
    child.kill()
    thread.join(30)
    assert not thread.is_alive()
    child.wait()


def test_a_wake_before_the_wait_is_not_lost(exits, child):
    exits.wake()
    thread = waiting(exits, [identity(child.pid)])
    thread.join(30)
    assert not thread.is_alive()
    again = waiting(exits, [identity(child.pid)])
    again.join(0.1)
    assert again.is_alive()  # one wake ends one wait
    exits.wake()
    again.join(30)
    assert not again.is_alive()


def test_a_process_with_a_reused_pid_has_ended(exits, child):
    real = identity(child.pid)
    assert real is not None
    exits.wait([ProcessIdentity(pid=real.pid, started_ticks=real.started_ticks - 1)], None)


def test_descriptors_of_ended_and_forgotten_processes_are_closed(exits, child):
    before = len(os.listdir("/proc/self/fd"))
    exits.wait([identity(child.pid)], 0.0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    exits.wait([], 0.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_wake_after_the_close_does_nothing():
    closed = ProcessExits()
    closed.close()
    closed.wake()


def test_each_observation_wakes_the_head_and_is_taken_once():
    seen: Observations[str] = Observations()
    woken = []
    seen.listen(lambda: woken.append(len(woken)))
    seen.append("a")
    seen.extend([])
    seen.extend(["b", "c"])
    assert woken == [0, 1]
    assert seen.take() == ["a", "b", "c"]
    assert seen.take() == []
