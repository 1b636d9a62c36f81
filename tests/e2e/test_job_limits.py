"""CPUs and memory of a job are limits that hold, in each of the three ways: real processes that want more.

Where this kernel has no cgroup controllers of version 2, the tests of that way run in user-mode Linux.
"""

import contextlib
import glob
import os
import signal
import sys
from dataclasses import replace

import pytest

from phalanx.core.fleet.node import LimitKind
from phalanx.core.state import reports
from phalanx.core.units import format_bytes
from phalanx.core.work.share import DeviceShare, ShareKind
from phalanx.node.processes import cgroups
from phalanx.node.processes.attempt_limits import JobLimits
from phalanx.node.processes.containment import ContainmentFactory
from tests import uml_here
from tests.e2e.process_rig import Rig, runs, until
from tests.e2e.test_supervisor_process import Head, Node, head, prepare, run, start_of  # noqa: F401  head is a fixture

pytestmark = pytest.mark.serial
MIB = 1 << 20
LIMIT_BYTES = 96 * MIB
HOG = f"held = bytearray({160 * MIB}); print('held', flush=True); import time; time.sleep(60)"
BURN = "import os\nos.fork()\nos.fork()\nwhile True: pass"


def _why_not(way: str) -> str:
    """Why a way does not work here; empty if it does."""
    try:
        ContainmentFactory(f"ask-{os.getpid()}", limits=way).close()
    except ValueError as error:
        return str(error)
    return ""


def _ways():
    return [
        pytest.param(way, marks=pytest.mark.skipif(bool(why := _why_not(way)), reason=why))
        for way in ("cgroup2", "cgroup1", "affinity")
    ]


WAYS = _ways()
CGROUP_WAYS = WAYS[:2]


@pytest.mark.skipif(not _why_not("cgroup2"), reason="this kernel has the controllers: the other tests ran that way")
@pytest.mark.skipif(bool(uml_here.why_not()), reason=uml_here.why_not())
def test_version_2_in_user_mode_linux(tmp_path):
    """The same tests, on a kernel that has the controllers of version 2."""
    code, text = uml_here.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "cgroup2", __file__], tmp_path
    )
    assert code == 0, text
    assert " passed" in text


def _settings(node_key: str) -> dict[str, str]:
    """The files of the groups of a node's only attempt, by name."""
    found = {}
    for folder in cgroups.find_node_cgroups(node_key):
        for attempt in glob.glob(f"{folder}/*.*.*/"):
            for name in ("cpu.max", "cpu.weight", "memory.max", "cpu.cfs_quota_us", "cpu.shares", "cpu.stat"):
                with contextlib.suppress(FileNotFoundError), open(f"{attempt}{name}") as file:
                    found[name] = file.read().strip()
    return found


def _throttled(node_key: str) -> int:
    return next(int(line.split()[1]) for line in _settings(node_key)["cpu.stat"].splitlines() if "nr_throttled" in line)


@pytest.mark.parametrize("way", CGROUP_WAYS)
def test_a_group_gets_no_more_cpu_time_than_asked_for(way):
    with Rig(limits=way) as rig:
        attempt = rig.open(limits=JobLimits(cpus=0.5))
        pid, _ = rig.run(attempt, (sys.executable, "-c", BURN))
        until(lambda: _throttled(rig.node_key) > 1, "the kernel to hold it back")
        assert runs(pid), "it is slowed down, not ended"
        attempt.close()


def test_tasks_are_bound_to_cpus_that_no_other_job_is_bound_to():
    everything = os.sched_getaffinity(0)
    if len(everything) < 2:
        pytest.skip("one CPU")
    show = (sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    with Rig(limits="affinity") as rig:
        attempts = [rig.open(f"j{number}", limits=JobLimits(cpus=1)) for number in (1, 2)]
        seen = [eval(rig.run(attempt, show)[1]()) for attempt in attempts]
        assert [len(cpus) for cpus in seen] == [1, 1]
        assert seen[0] != seen[1]
        attempts[0].close()
        again = rig.open("j3", limits=JobLimits(cpus=1))
        assert eval(rig.run(again, show)[1]()) == seen[0], "a job that ended gives its CPUs back"


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_asks_for_nothing_has_no_limit(way):
    with Rig(limits=way) as rig:
        attempt = rig.open()
        _, output = rig.run(attempt, (sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"))
        assert int(output()) == len(os.sched_getaffinity(0))
        found = _settings(rig.node_key)
        if way == "cgroup2":
            assert (found["cpu.max"], found["memory.max"]) == ("max 100000", "max")
        if way == "cgroup1":
            assert found["cpu.cfs_quota_us"] == "-1"
        assert attempt.memory_overuse() is None


@pytest.mark.parametrize("way", WAYS)
def test_a_job_over_its_memory_ends_with_the_figures(way, head, tmp_path):  # noqa: F811
    node = Node(head, tmp_path, PHALANX_LIMITS=way)
    try:
        order = prepare(tmp_path, sys.executable, "-c", HOG)
        role = replace(order.spec.role, memory_bytes=LIMIT_BYTES)
        run(head, replace(order, spec=replace(order.spec, role=role)))
        exit = head.heard(reports.TaskExited)[0].exit
        assert (exit.signal, exit.requested_by_phalanx) == (signal.SIGKILL, False)
        assert exit.evidence is not None
        use = exit.evidence.memory
        assert use is not None
        assert use.asked_bytes == LIMIT_BYTES
        assert use.used_bytes > LIMIT_BYTES - 4 * MIB
        assert str(use) == f"out of memory: used {format_bytes(use.used_bytes)} of the 96 MiB asked for"
        kind = {"cgroup2": LimitKind.CGROUP_V2, "cgroup1": LimitKind.CGROUP_V1, "affinity": LimitKind.WATCHDOG}[way]
        assert head.hellos[0].node.limits is kind
    finally:
        node.close()


@pytest.mark.parametrize("way", CGROUP_WAYS)
def test_a_share_of_a_virtual_device_is_a_share_of_a_cpu(way, head, tmp_path):  # noqa: F811
    node = Node(head, tmp_path, PHALANX_LIMITS=way)
    try:
        order = prepare(tmp_path, "sleep", "60")
        share = DeviceShare(milli=250, memory_bytes=1 << 30, kind=ShareKind.MPS, group="mps:p")
        grants = tuple(replace(grant, share=share) for grant in order.allocation.grants)
        order = replace(order, allocation=replace(order.allocation, grants=grants))
        head.say(order)
        head.say(start_of(order, head))
        head.heard(reports.MemberStarted)
        found = _settings(node.key)
        if way == "cgroup2":
            weight = round(10_000 * 0.25 / len(os.sched_getaffinity(0)))
            assert (found["cpu.max"], found["cpu.weight"]) == ("25000 100000", str(weight))
        else:
            assert (found["cpu.cfs_quota_us"], found["cpu.shares"]) == ("25000", "256")
    finally:
        node.close()
    until(lambda: not cgroups.find_node_cgroups(node.key), "the groups of the killed node to go")
