"""The decisions of containment that need no process: keys, roles, where cgroups are, who descends from whom."""

import os

import pytest

from phalanx.node.processes.cgroup_mounts import CgroupMount, find_v1, find_v2, own_folder
from phalanx.node.processes.containment import AttemptKey, ContainmentFactory
from phalanx.node.processes.proctable import (
    ProcessIdentity,
    ProcessRow,
    alive,
    descendants,
    identity,
    read_row,
    send_signal,
)
from phalanx.node.processes.sweeps import node_role

HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw
"""


def key(**changes):
    return AttemptKey(**{"job_id": "j1", "epoch": 2, "generation": 3, "node_key": "n0-ab.c", **changes})


def test_a_marker_reads_back_as_its_key():
    assert key().marker == "j1.2.3.n0-ab.c"
    assert AttemptKey.parse("j1.2.3.n0-ab.c") == key()


@pytest.mark.parametrize("changes", [{"job_id": "j.1"}, {"job_id": ""}, {"node_key": "a/b"}, {"node_key": "a b"}])
def test_a_key_that_could_be_mistaken_is_refused(changes):
    with pytest.raises(ValueError, match="only"):
        key(**changes)


@pytest.mark.parametrize("marker", ["", "j1", "j1.2.3", "j1.x.3.n", "j1.2..n"])
def test_what_is_no_marker_is_refused(marker):
    with pytest.raises(ValueError):
        AttemptKey.parse(marker)


def test_the_cgroup2_mount_is_found_in_a_hybrid_hierarchy():
    assert find_v2(HYBRID) == CgroupMount(folder="/sys/fs/cgroup/unified", root="/")


def test_the_hierarchies_of_version_1_are_found_by_their_controller():
    mounts = (
        "32 31 0:29 / /cg/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 / /cg/memory ro - cgroup cgroup rw,memory\n34 31 0:31 / /m rw - cgroup cgroup rw,memory\n"
    )
    cpu, memory = find_v1(mounts, "cpu"), find_v1(mounts, "memory")
    assert cpu == CgroupMount(folder="/cg/cpu,cpuacct", root="/", controllers=("cpu",))
    assert memory == CgroupMount(folder="/m", root="/", controllers=("memory",))
    membership = "5:memory:/user/1\n4:cpu,cpuacct:/user/2\n3:cpuset:/user/3\n0::/user/4\n"
    assert own_folder(cpu, membership) == "/cg/cpu,cpuacct/user/2"
    assert own_folder(memory, membership) == "/m/user/1"
    assert find_v1(HYBRID, "memory") is None


def test_a_read_only_mount_is_none():
    assert find_v2("41 31 0:38 / /sys/fs/cgroup ro,relatime - cgroup2 cgroup2 rw\n") is None


def test_a_mount_with_a_space_in_its_path_is_found():
    found = find_v2("41 31 0:38 /a\\040b /mnt/c\\040d rw - cgroup2 cgroup2 rw\n")
    assert found == CgroupMount(folder="/mnt/c d", root="/a b")


@pytest.mark.parametrize(
    ("root", "membership", "folder"),
    [
        ("/", "9:cpu:/\n0::/\n", "/cg"),
        ("/", "0::/user.slice/x.scope\n", "/cg/user.slice/x.scope"),
        ("/docker/1", "0::/docker/1/inner\n", "/cg/inner"),
        ("/docker/1", "0::/docker/12\n", None),
        ("/", "0::/../other\n", None),
        ("/", "9:cpu:/\n", None),
    ],
)
def test_the_own_cgroup_is_found_below_the_mount(root, membership, folder):
    assert own_folder(CgroupMount(folder="/cg", root=root), membership) == folder


@pytest.mark.parametrize(
    ("block", "role"),
    [
        ({}, None),
        ({b"PHALANX_NODE_KEY": b"n1"}, "supervisor"),
        ({b"PHALANX_NODE_KEY": b"n2"}, None),
        ({b"PHALANX_NODE_KEY": b"n1", b"PHALANX_SPAWNER": b"1"}, "spawner"),
        ({b"PHALANX_NODE_KEY": b"n1", b"PHALANX_SPAWNER": b"1", b"PHALANX_TASK_KEY": b"   "}, "spawner"),
        ({b"PHALANX_NODE_KEY": b"n1", b"PHALANX_SPAWNER": b"1", b"PHALANX_TASK_KEY": b"j.1.0.n1   "}, "task"),
        ({b"PHALANX_TASK_KEY": b"j.1.0.n1"}, "task"),
        ({b"PHALANX_TASK_KEY": b"j.1.0.x.n1"}, None),
        ({b"PHALANX_NODE_KEY": b"n1", b"PHALANX_TASK_KEY": b"j.1.0.n2"}, None),
    ],
)
def test_the_environment_tells_what_a_process_is_to_the_node(block, role):
    assert node_role(block, "n1") == role


def test_descendants_are_all_below_and_not_the_root():
    rows = {
        pid: ProcessRow(pid, "S", parent, 0, 0, 0, 0, 0) for pid, parent in [(1, 0), (2, 1), (3, 2), (4, 2), (5, 1)]
    }
    assert descendants(rows, [2]) == {3, 4}
    assert descendants(rows, [3]) == set()


def test_a_signal_never_hits_the_next_owner_of_a_pid():
    me = identity(os.getpid())
    assert me is not None
    assert alive(me)
    assert send_signal(me, 0)
    stale = ProcessIdentity(me.pid, me.started_ticks - 1)
    assert not alive(stale)
    assert not send_signal(stale, 9)


def test_a_name_with_spaces_and_parentheses_is_read_over(tmp_path):
    row = read_row(os.getpid())
    assert row is not None
    assert row.parent == os.getppid()
    assert row.session == os.getsid(0)
    assert row.resident_bytes > 1_000_000


@pytest.mark.parametrize("mode", ["group", "CGROUP"])
def test_an_unknown_containment_is_refused(mode):
    with pytest.raises(ValueError, match="auto, cgroup or session"):
        ContainmentFactory("n1", mode=mode)
