"""The processes below others: exactly what the whole table says, without reading it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from phalanx.node.processes import proctable

_TREE = """
import subprocess, sys
one = subprocess.Popen(["sleep", "60"])
two = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
print(one.pid, two.pid, int(two.stdout.readline()), flush=True)
sys.stdin.read()
one.kill()
two.kill()
"""


def test_finds_children_of_every_thread_and_their_children() -> None:
    with subprocess.Popen([sys.executable, "-c", _TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        one, two, grandchild = (int(word) for word in parent.stdout.readline().split())
        try:
            below = proctable.read_below([parent.pid])
            assert set(below) == proctable.descendants(proctable.read_table(), [parent.pid]) == {one, two, grandchild}
        finally:
            os.kill(grandchild, signal.SIGKILL)  # it outlives its parent


def test_child_of_a_thread_that_is_not_the_first_is_found() -> None:
    started: list[subprocess.Popen[bytes]] = []
    over = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        over.wait(30)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        while not started:
            thread.join(0.01)
        assert started[0].pid in proctable.read_below([os.getpid()])
    finally:
        over.set()
        thread.join()
        started[0].kill()
        started[0].wait()


def test_process_that_has_ended_has_no_children() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert proctable.read_below([ended.pid]) == {}


def test_kernel_without_lists_of_children_has_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proctable, "_children", lambda _pid: None)
    assert os.getpid() in proctable.read_below([1])
