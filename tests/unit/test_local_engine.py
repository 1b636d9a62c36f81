"""The local engine where a disk or the kernel refuses a start: one supervisor of a node runs, and every node is tried again."""

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId
from phalanx.engines.local import engine as local
from phalanx.engines.local import records
from phalanx.engines.local.records import StartedNode
from phalanx.failpoints import FailureMode, armed
from phalanx.node.processes.proctable import ProcessIdentity, alive, identity
from phalanx.ports.engine import LocalNode

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
N0, N1 = NodeId("n0"), NodeId("n1")
RECORD_OF_PROCESS = 2  # the second of a start: the first says under which key it will run


class Machine:
    """Sleepers in place of supervisors; each start is refused as told, or noted with its time."""

    def __init__(self, home, *, revive_after_s):
        self.home, self.started, self.asked_s, self.refuse = str(home), [], [], 0
        self.engine = local.LocalEngine(
            home=self.home,
            environment=dict,
            token_of=lambda _: "t",
            revive_after_s=revive_after_s,
            own_nodes=[LocalNode(id=node, virtual_devices=1) for node in (N0, N1)],
        )
        self.engine.adopt()

    def popen(self, _argv, **options):
        self.asked_s.append(time.monotonic())
        if self.refuse:
            self.refuse -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        process = subprocess.Popen(SLEEP, **options)
        self.started.append((process, identity(process.pid)))
        return process

    def running(self):
        """Positions of the sleepers that run, in the order of their starts."""
        return [number for number, (_, who) in enumerate(self.started) if alive(who)]

    def until(self, true, limit_s=20.0):
        """Wait for it."""
        end_s = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end_s, "it did not come"
            time.sleep(0.01)

    def close(self):
        """Nothing is left."""
        self.engine.close(keep_nodes=True)
        for process, _ in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Nodes that stay down once they died, unless a test opens another."""
    made = []

    def make(revive_after_s=None):
        made.append(Machine(tmp_path, revive_after_s=revive_after_s))
        monkeypatch.setattr(local, "subprocess", _Subprocess(made[-1].popen))
        return made[-1]

    yield make
    for one in made:
        one.close()


class _Subprocess:
    def __init__(self, popen):
        self.Popen, self.DEVNULL, self.TimeoutExpired = popen, subprocess.DEVNULL, subprocess.TimeoutExpired


@pytest.mark.parametrize("failure", [FailureMode.FULL, FailureMode.ERROR])
def test_a_supervisor_whose_record_is_refused_does_not_run_on(machine, failure):
    home = machine()
    with armed("private.file.create", failure, RECORD_OF_PROCESS), pytest.raises(OSError, match="failpoint"):
        home.engine.start(N0)
    assert len(home.started) == 1
    assert home.running() == [], "nobody watches it"
    assert home.engine.running_nodes() == []
    home.engine.start(N0)
    assert home.running() == [1]
    assert home.engine.running_nodes() == [N0]


def test_its_nodes_are_expected_before_they_run(machine):
    assert machine().engine.expected_nodes() == [N0, N1]


def test_what_runs_under_the_key_of_a_start_before_is_swept_before_the_key_is_forgotten(machine):
    home = machine()
    left = StartedNode(id=N0, node_key="n0-left", identity=ProcessIdentity(pid=0, started_ticks=0), virtual_devices=1)
    os.makedirs(os.path.join(home.home, "nodes", N0))
    records.write(os.path.join(home.home, "nodes", N0), left)
    home.popen(SLEEP, env={**os.environ, "PHALANX_NODE_KEY": left.node_key}, start_new_session=True)
    home.engine.start(N0)
    assert home.running() == [1]


def test_a_node_that_cannot_be_started_neither_keeps_the_others_down_nor_their_deaths_unseen(machine):
    home = machine(revive_after_s=0.3)
    with armed("local.spawn.output", FailureMode.FULL):
        home.engine.open()
    assert home.engine.running_nodes() == [N1]
    home.until(lambda: home.engine.running_nodes() == [N0, N1])  # tried again
    process, _ = home.started[0]
    process.kill()
    seen: list[Any] = []

    def is_told() -> bool:
        seen.extend(home.engine.observe())
        return bool(seen)

    home.until(is_told)
    assert [death.node_id for death in seen] == [N1]


def test_a_start_that_fails_is_tried_again_after_a_pause_that_grows(machine):
    home = machine(revive_after_s=0.1)
    home.refuse = 3  # the first of n0, of n1, and n0's second
    home.engine.open()
    assert home.engine.running_nodes() == []
    home.until(lambda: home.engine.running_nodes() == [N0, N1])
    begun_s, last_s = home.asked_s[0], home.asked_s[-1]
    assert len(home.asked_s) == 5
    assert last_s - begun_s > 0.1 * 2 + 0.1 * 4 - 0.01


def known(name, *, state=NodeState.UP, engine="local"):
    return Node(id=NodeId(name), engine=engine, devices=(), cpus=1, memory_bytes=0, state=state)


@pytest.mark.parametrize("sole_head", [True, False])
def test_a_starting_head_is_told_which_nodes_do_not_run_and_which_it_no_longer_has(machine, sole_head):
    engine = machine().engine
    engine.sole_head = sole_head
    engine.start(N0)
    nodes = [known("n0"), known("n1"), known("n7"), known("n8", state=NodeState.DOWN), known("h1", engine="joined")]
    for _ in range(2):  # as a standby, and again when it leads
        found = engine.discover(nodes, [])
        assert [death.node_id for death in found.deaths] == (["n1", "n7"] if sole_head else ["n1"])
        assert found.retired == (["n7", "n8"] if sole_head else [])
    assert engine.running_nodes() == [N0]


def test_a_node_that_its_head_stopped_did_not_fail_and_one_that_died_without_a_head_did(machine):
    before = machine()
    for node in (N0, N1):
        before.engine.start(node)
    before.engine.stop(N0)
    process, _ = before.started[1]
    process.kill()
    process.wait()
    found = machine().engine.discover([known("n0"), known("n1"), known("n7")], [])
    assert {death.node_id: death.planned for death in found.deaths} == {N0: True, N1: False, "n7": True}
    assert [death.why for death in found.deaths[:2]] == [
        "it was stopped with the head",
        "it did not run when the head started",
    ]
