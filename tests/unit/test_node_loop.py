"""The supervisor's loop performs what its logic decided: an order that fails is answered too, and none waits for another member's."""

# mypy: disable-error-code="arg-type,dict-item,method-assign,assignment"

import errno
import os
import queue
import threading

import pytest

from phalanx.core.fleet.node import Node, NodeState
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess
from phalanx.node.logic import actions as act
from phalanx.node.logic import events as hap
from phalanx.node.logic.events import MemberKey
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.probes import sampling
from phalanx.node.probes.devices import node_facts
from phalanx.node.probes.sampling import Sampler
from phalanx.node.probes.virtual_devices import VirtualProbe
from phalanx.node.shell.node_settings import NodeSettings
from phalanx.node.shell.process_control import KILL_THREADS
from phalanx.node.shell.supervisor_loop import SupervisorLoop
from tests.unit.test_unshared_folders import make_prepare, member

PATIENCE_S = 100.0
ACCESS = HeadAccess(address=HeadAddress("http://127.0.0.1:1", None), token="t", ca_file=None)


class Processes:
    """Of one member. `stuck`: a kill waits until this is set."""

    cgroup = None

    def __init__(self, *, fault: Exception | None = None, stuck: threading.Event | None = None) -> None:
        self.fault, self.stuck = fault, stuck
        self.killing = threading.Event()

    def kill(self):
        self.killing.set()
        if self.fault is not None:
            raise self.fault
        if self.stuck is not None:
            self.stuck.wait(PATIENCE_S)
        return []

    def freeze(self):
        if self.fault is not None:
            raise self.fault
        return True


@pytest.fixture
def loop(tmp_path):
    node = Node(
        id="n0",
        engine="local",
        devices=(),
        cpus=1,
        memory_bytes=1,
        state=NodeState.UP,
        supervisor_id="s",
        address="127.0.0.1",
    )
    settings = NodeSettings(node=node, supervisor_id="s", node_key="k", folder=str(tmp_path), access=ACCESS, base={})
    made = SupervisorLoop(settings, VirtualProbe("k", 0, 0))
    yield made
    for hands in (made._work, made._fence):
        hands.close(PATIENCE_S)


def put(loop, tmp_path, processes, number=0) -> MemberKey:
    """A member with these processes."""
    present: MemberRuntime = member(make_prepare(), 0, tmp_path)
    present.key = MemberKey(f"job-{number}", 1, 0)
    present.processes = processes
    loop._presents.add(present)
    return present.key


def told(loop, kind):
    """The next happening of this kind."""
    while True:
        found = loop._inbox.get(timeout=PATIENCE_S)
        if isinstance(found, kind):
            return found


def full():
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_freeze_that_fails_is_told_as_none(loop, tmp_path):
    """Found by reading: it was only logged, and the ranks ran on without a lease."""
    key = put(loop, tmp_path, Processes(fault=full()))
    loop._perform(act.FreezeMember(key=key))
    assert told(loop, hap.FreezeFinished) == hap.FreezeFinished(key=key, frozen=False)


def test_a_kill_that_fails_is_told_with_its_fault(loop, tmp_path):
    """Found by reading: it was only logged, and the head waited for the member's end for ever."""
    key = put(loop, tmp_path, Processes(fault=full()))
    loop._perform(act.KillMember(key=key))
    found = told(loop, hap.MemberKilled)
    assert (found.key, found.leftover) == (key, ())
    assert "Too many open files" in found.fault


def test_a_freeze_waits_for_no_member_whose_processes_will_not_die(loop, tmp_path):
    """Found by reading: with as many of them as there were hands, a freeze came after the lease's margin."""
    gate = threading.Event()
    dying = [Processes(stuck=gate) for _ in range(KILL_THREADS)]
    for number, processes in enumerate(dying):
        loop._perform(act.KillMember(key=put(loop, tmp_path, processes, number + 1)))
    assert all(processes.killing.wait(PATIENCE_S) for processes in dying)
    key = put(loop, tmp_path, Processes())
    loop._perform(act.FreezeMember(key=key))
    try:
        assert loop._inbox.get(timeout=PATIENCE_S / 3) == hap.FreezeFinished(key=key, frozen=True)
    except queue.Empty:
        pytest.fail("the freeze waits behind the kills")
    finally:
        gate.set()


@pytest.mark.parametrize("where", ["facts", "devices"])
def test_want_of_descriptors_costs_one_sample(tmp_path, monkeypatch, where):
    """Found by reading: it ended the supervisor, and with it every job of the node."""
    ended, tries, sent = threading.Event(), [], threading.Event()
    real = VirtualProbe("k", 1, 1)

    def once(then):
        def call(*given):
            tries.append(where)
            if len(tries) == 1:
                raise full()
            return then(*given)

        return call

    if where == "facts":
        monkeypatch.setattr(sampling, "node_facts", once(node_facts))
    else:
        monkeypatch.setattr(real, "sample", once(real.sample))
    monkeypatch.setattr(sampling, "BUSY_S", 0.01)
    sampler = Sampler(
        ACCESS,
        real,
        node_id="n0",
        supervisor_id="s",
        folder=str(tmp_path),
        job_by_device=lambda: {0: "1"},
        tenants_by_device=dict,
        ended=ended,
    )
    sampler._connection.call = lambda *_, **__: sent.set()
    faults = []

    def run():
        try:
            sampler.run()
        except OSError as error:
            faults.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert sent.wait(PATIENCE_S), faults
    ended.set()
    thread.join(PATIENCE_S)
    assert faults == []
