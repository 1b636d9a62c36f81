"""Real processes under both containments: starting, ending, freezing, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.node.processes import cgroups
from phalanx.node.processes.attempt_processes import TaskNotStarted
from phalanx.node.processes.containment import ContainmentKind
from phalanx.node.processes.proctable import (
    descendants,
    identity,
    read_row,
    read_table,
)
from phalanx.node.processes.sweeps import sweep_node
from tests.e2e.process_rig import MODES, Rig, number_in, runs, until

pytestmark = pytest.mark.serial

# Forks twice, leaves its session, closes every descriptor, clears its environment by exec, and counts in a file.
DAEMON = """
import os, sys
path = sys.argv[1]
if os.fork(): os.wait(); sys.exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.closerange(0, 64)
os.execve(sys.executable, [sys.executable, "-S", "-E", "-c", '''
import os, sys, time
open(sys.argv[1] + ".pid", "w").write(str(os.getpid()))
count = 0
while True:
    count += 1
    open(sys.argv[1] + ".new", "w").write(str(count)); os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(0.005)
''', path], {})
"""


def start_daemon(rig, attempt, tmp_path):
    """A rank that leaves a daemon behind and goes on; returns the daemon's pid and the file it counts in."""
    counter = tmp_path / "count"
    rig.run(attempt, f"{sys.executable} -S -E -c '{DAEMON_QUOTED}' {counter}; exec sleep 1000", task="rank-daemon")
    until(lambda: number_in(f"{counter}.pid") and number_in(counter), "the daemon")
    return number_in(f"{counter}.pid"), counter


DAEMON_QUOTED = DAEMON.replace("'", "'\\''")


@pytest.fixture(params=MODES)
def rig(request):
    with Rig(request.param) as made:
        yield made


def test_a_task_gets_its_environment_directory_and_pipe_and_its_end_is_reported(rig, tmp_path):
    attempt = rig.open()
    pid, output = rig.run(
        attempt, "echo $WORD in $(pwd); echo error >&2; exit 3", cwd=str(tmp_path), env={"WORD": "here"}
    )
    end = rig.exit()
    assert (end.task_id, end.pid, end.code, end.signal, end.lost) == ("rank-0", pid, 3, None, False)
    assert output() == f"here in {tmp_path}\nerror\n"
    assert rig.emptied() == attempt.key
    assert attempt.empty()
    assert attempt.running() == {}


def test_the_output_of_a_task_ends_although_a_daemon_of_it_that_writes_elsewhere_lives_on(rig):
    """Found by review: ranks held a second descriptor of their output, which their daemons kept open."""
    _, output = rig.run(rig.open(), ("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"))
    daemon = int(output())
    assert os.path.exists(f"/proc/{daemon}")


def test_a_task_starts_with_clean_hands(rig):
    script = """
import json, os, signal, sys
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
status = open("/proc/self/status").read()
ignored = int(status.split("SigIgn:")[1].split()[0], 16) & ~(3 << 31)  # 32 and 33 are the C library's own: nobody may reset them
print(json.dumps({"fds": sorted(int(f) for f in os.listdir("/proc/self/fd")), "blocked": len(blocked), "ignored": ignored,
    "leader": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"), "umask": os.umask(0), "nice": os.nice(0)}))
"""
    _, output = rig.run(rig.open(), (sys.executable, "-S", "-E", "-c", script))
    state = json.loads(output())
    python_ignores = (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)
    assert state == {
        "fds": [0, 1, 2, 3],  # 3 is the listing's own
        "blocked": 0,
        "ignored": python_ignores,
        "leader": True,
        "stdin": "/dev/null",
        "umask": 0o022,
        "nice": os.nice(0),
    }


def test_core_limit_is_left_alone(rig):
    _, output = rig.run(rig.open(), "ulimit -c")
    soft = resource.getrlimit(resource.RLIMIT_CORE)[0]
    assert output().strip() == ("unlimited" if soft == resource.RLIM_INFINITY else str(soft // 1024))


def test_a_task_runs_in_its_cgroup_from_its_first_instruction(rig):
    if rig.host.kind is not ContainmentKind.CGROUP:
        pytest.skip("containment by session has no cgroup")
    attempt = rig.open()
    _, output = rig.run(attempt, ("cat", "/proc/self/cgroup"))
    assert f"/phalanx-{rig.node_key}/j1.1.0\n" in output()


def test_300_tasks_are_started_and_each_end_is_reported_once(rig):
    attempt = rig.open()
    for number in range(300):
        rig.run(attempt, ("true",), task=f"rank-{number}")
    ends = [rig.exit() for _ in range(300)]
    assert {end.task_id for end in ends} == {f"rank-{number}" for number in range(300)}
    assert {end.code for end in ends} == {0}


def test_a_signal_is_told_from_a_code(rig):
    attempt = rig.open()
    rig.run(attempt, "kill -KILL $$")
    end = rig.exit()
    assert (end.code, end.signal) == (None, signal.SIGKILL)


def test_cpu_and_memory_of_a_task_are_reported(rig):
    attempt = rig.open()
    rig.run(attempt, (sys.executable, "-S", "-E", "-c", "x = bytearray(50_000_000); sum(range(4_000_000))"))
    end = rig.exit()
    assert end.cpu_s > 0.01
    assert end.max_rss_bytes > 50_000_000
    assert attempt.containment.cpu_seconds() > 0.01


def test_the_memory_of_all_tasks_is_measured_while_they_run(rig):
    attempt = rig.open()
    script = "x = bytearray(b'1') * 50_000_000; import signal; signal.pause()"
    for number in range(2):
        rig.run(attempt, (sys.executable, "-S", "-E", "-c", script), task=f"rank-{number}")
    until(lambda: attempt.containment.memory_bytes() > 100_000_000)


@pytest.mark.parametrize(
    ("command", "cwd", "stage", "code"),
    [
        (("no-such-program",), "/", "exec", 127),
        (("/etc/passwd",), "/", "exec", 126),
        (("true",), "/no/such/folder", "cwd", 126),
        (("tr\0ue",), "/", "exec", 126),
    ],
)
def test_what_cannot_start_is_refused_with_its_reason(rig, command, cwd, stage, code):
    attempt = rig.open()
    with pytest.raises(TaskNotStarted) as refusal:
        rig.run(attempt, command, cwd=cwd)
    assert (refusal.value.stage, refusal.value.exit_code, refusal.value.user_error) == (stage, code, True)
    assert "j1" in str(refusal.value)
    rig.run(attempt, ("true",), task="rank-1")  # the keeper goes on
    assert rig.exit().task_id == "rank-1"


def test_an_environment_larger_than_a_packet_arrives(rig):
    attempt = rig.open()
    rig.run(
        attempt,
        "test ${#A} -eq 100000 -a ${#B} -eq 50000",
        env={"A": "a" * 100_000, "B": "ü" * 50_000, "LC_ALL": "C.UTF-8"},
    )
    assert rig.exit().code == 0


def test_kill_catches_a_daemon_that_left_session_and_environment(rig, tmp_path):
    attempt = rig.open()
    daemon, _ = start_daemon(rig, attempt, tmp_path)
    assert daemon in attempt.members()
    assert attempt.kill() == []
    assert not runs(daemon)
    assert attempt.empty()
    assert rig.exit().signal == signal.SIGKILL
    assert rig.emptied() == attempt.key


def test_a_daemon_keeps_its_generation_from_being_over(rig, tmp_path):
    attempt = rig.open()
    daemon, _ = start_daemon(rig, attempt, tmp_path)
    rank = attempt.running()["rank-daemon"]
    os.kill(rank, signal.SIGKILL)
    assert rig.exit().pid == rank
    assert rig.empties.empty()
    assert not attempt.empty()
    os.kill(daemon, signal.SIGKILL)
    assert rig.emptied() == attempt.key


def test_freeze_stops_every_counter_and_thaw_lets_it_go_on(rig, tmp_path):
    attempt = rig.open()
    _, counter = start_daemon(rig, attempt, tmp_path)
    for _ in range(3):
        assert attempt.freeze()
        assert attempt.frozen()
        before = number_in(counter)
        time.sleep(0.1)  # twenty of its turns
        assert number_in(counter) == before
        attempt.thaw()
        assert not attempt.frozen()
        until(lambda: number_in(counter) > before, "the counter to go on")


def test_thaw_leaves_stopped_what_the_job_had_stopped(rig):
    attempt = rig.open()
    pid, _ = rig.run(attempt, "kill -STOP $$; sleep 1000")
    until(lambda: state(pid) == "T", "the task to stop itself")
    assert attempt.freeze()
    attempt.thaw()
    if rig.host.kind is ContainmentKind.SESSION:
        assert state(pid) == "T"
    attempt.signal(signal.SIGCONT)
    until(lambda: state(pid) == "S", "the task to go on")


def test_a_frozen_attempt_can_be_killed(rig, tmp_path):
    attempt = rig.open()
    daemon, _ = start_daemon(rig, attempt, tmp_path)
    assert attempt.freeze()
    assert attempt.kill() == []
    assert not runs(daemon)


def test_freeze_converges_on_a_rank_that_forks_without_pause(rig):
    attempt = rig.open()
    rig.run(attempt, "while :; do (exec true); done")
    for _ in range(5):
        assert attempt.freeze()
        assert attempt.frozen()
        attempt.thaw()
    assert attempt.kill() == []


def test_sigterm_reaches_every_member(rig):
    attempt = rig.open()
    rig.run(attempt, "trap 'echo asked; exit 5' TERM; sleep 1000 & sleep 1000 & wait")
    until(
        lambda: names(attempt).count("sleep") == 2, "the children, after the trap"
    )  # before exec a child may catch it
    assert attempt.signal(signal.SIGTERM) == 3
    assert rig.exit().code == 5
    assert rig.emptied() == attempt.key


def test_a_stopped_task_that_is_asked_to_end_handles_it_at_once(rig):
    attempt = rig.open()
    pid, output = rig.run(attempt, "trap 'echo saved; exit 7' TERM; kill -STOP $$; exec sleep 1000")
    until(lambda: state(pid) == "T", "the task stopped by itself")
    attempt.terminate()
    assert rig.exit().code == 7
    assert output() == "saved\n"


def test_a_frozen_task_that_is_asked_to_end_stays_frozen_until_it_is_thawed(rig):
    attempt = rig.open()
    pid, output = rig.run(attempt, "trap 'echo saved; exit 7' TERM; kill -STOP $$; exec sleep 1000")
    until(lambda: state(pid) == "T", "the task stopped by itself")
    rig.run(attempt, "trap 'exit 8' TERM; sleep 1000 & wait", task="rank-1")
    until(lambda: names(attempt).count("sleep") == 1, "the child of the second task, after its trap")
    assert attempt.freeze()
    attempt.terminate()
    assert attempt.frozen()
    assert rig.exits.empty()
    attempt.thaw()
    assert {rig.exit().code, rig.exit().code} == {7, 8}
    assert output() == "saved\n"


def test_attempts_side_by_side_do_not_touch_each_other(rig, tmp_path):
    first, second = rig.open("j1"), rig.open("j2")
    rig.run(first, ("sleep", "1000"))
    daemon, _ = start_daemon(rig, second, tmp_path)
    assert first.kill() == []
    assert runs(daemon)
    assert daemon in second.members()


def test_a_keeper_whose_attempt_is_over_keeps_the_next_one(rig, tmp_path):
    pids = set()
    for number in range(3):
        attempt = rig.open(f"j{number}")
        daemon, _ = start_daemon(rig, attempt, tmp_path)
        pids.add(attempt.containment._keeper.pid)
        assert attempt.close() == []
        assert not runs(daemon)
        os.remove(tmp_path / "count")
        os.remove(tmp_path / "count.pid")
    assert len(pids) == 1


def test_nothing_starts_in_an_attempt_that_was_killed(rig):
    attempt = rig.open()
    attempt.kill()
    with pytest.raises(TaskNotStarted, match="closed"):
        rig.run(attempt, ("true",))


def test_close_removes_cgroups_made_inside(rig):
    if rig.host.kind is not ContainmentKind.CGROUP:
        pytest.skip("containment by session has no cgroup")
    attempt = rig.open()
    own = f"{cgroups.find_node_cgroups(rig.node_key)[0]}/j1.1.0"
    rig.run(attempt, f"mkdir -p {own}/a/b && echo $$ > {own}/a/b/cgroup.procs && exec sleep 1000")
    until(lambda: os.path.isdir(f"{own}/a/b"), "the nested cgroup")
    assert attempt.close() == []
    assert not os.path.exists(own)


def test_a_root_task_that_leaves_its_cgroup_is_frozen_and_killed_all_the_same(rig):
    if rig.host.kind is not ContainmentKind.CGROUP:
        pytest.skip("containment by session has no cgroup")
    attempt = rig.open()
    outside = os.path.dirname(cgroups.find_node_cgroups(rig.node_key)[0])
    pid, _ = rig.run(attempt, f"echo $$ > {outside}/cgroup.procs && exec sleep 1000")
    until(lambda: not cgroups.Cgroup(f"{outside}/phalanx-{rig.node_key}/j1.1.0").populated(), "the escape")
    assert attempt.freeze()
    assert state(pid) == "T"
    assert attempt.kill() == []
    assert not runs(pid)


def test_a_killed_keeper_loses_its_tasks_and_nothing_else(rig, tmp_path):
    attempt, other = rig.open("j1"), rig.open("j2")
    daemon, _ = start_daemon(rig, attempt, tmp_path)
    rig.run(other, ("sleep", "1000"))
    assert attempt.members()  # seen once: what is then lost can be told from a stranger
    os.kill(attempt.containment._keeper.pid, signal.SIGKILL)
    end = rig.exit()
    assert (end.task_id, end.lost, end.code, end.signal) == ("rank-daemon", True, None, None)
    assert rig.emptied() == attempt.key
    assert not runs(daemon)
    assert other.running() != {}


def test_a_killed_spawner_is_replaced_and_its_tasks_run_on(rig):
    attempt = rig.open("j1")
    rig.run(attempt, "sleep 0.2; exit 4")
    os.kill(rig.host._spawner.pid, signal.SIGKILL)
    rig.host._spawner._process.wait()
    second = rig.open("j2")
    rig.run(second, ("true",), task="rank-9")
    ends = {end.task_id: end.code for end in (rig.exit(), rig.exit())}
    assert ends == {"rank-0": 4, "rank-9": 0}


def names(attempt):
    """The program names of the members."""
    found = []
    for pid in attempt.members():
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def state(pid):
    row = read_row(pid)
    return None if row is None else row.state


SUPERVISOR = """
import os, sys, time
from tests.e2e.process_rig import Rig
from tests.e2e.test_processes import start_daemon
import pathlib
rig = Rig(sys.argv[1])
rig.host
attempt = rig.open()
daemon, _ = start_daemon(rig, attempt, pathlib.Path(sys.argv[2]))
print(rig.node_key, daemon, flush=True)
time.sleep(1000)
"""


def said(process):
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sweep", [False, True], ids=["alone", "swept"])
def test_a_killed_supervisor_leaves_nothing(mode, sweep, tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, mode, str(tmp_path)], stdout=subprocess.PIPE, env=env, text=True
    ) as supervisor:
        node_key, daemon = said(supervisor).split()
        table = read_table()
        everyone = {pid: table[pid].identity for pid in descendants(table, [supervisor.pid])}
        assert int(daemon) in everyone
        root = identity(supervisor.pid)
        supervisor.kill()
        if sweep:
            assert sweep_node(node_key, root=root).clean
    until(lambda: not any(identity(pid) == who for pid, who in everyone.items()), "the node's processes to end")
    until(lambda: cgroups.find_node_cgroups(node_key) == [], "its cgroups to go")


@pytest.mark.parametrize("mode", MODES)
def test_a_sweep_kills_a_node_that_is_alive(mode, tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, mode, str(tmp_path)], stdout=subprocess.PIPE, env=env, text=True
    ) as supervisor:
        node_key, _ = said(supervisor).split()
        table = read_table()
        everyone = {pid: table[pid].identity for pid in descendants(table, [supervisor.pid])}
        swept = sweep_node(node_key, root=identity(supervisor.pid))
        assert swept.clean
        assert swept.killed >= 1
        assert not any(identity(pid) == who for pid, who in everyone.items())
        assert cgroups.find_node_cgroups(node_key) == []


def test_a_sweep_of_an_unknown_node_touches_nothing():
    swept = sweep_node("no-such-node")
    assert (swept.killed, swept.leftover, swept.cgroups_removed) == (0, (), 0)


def test_an_exit_that_nobody_can_take_in_makes_the_host_deaf_to_no_other(caplog):
    """Found by reading: the fault ended the one thread that hears of all ends, silently."""
    with Rig() as rig:
        heard = rig.host._on_exit

        def take(exit):
            if exit.task_id == "bad":
                raise RuntimeError("can't start new thread")
            heard(exit)

        rig.host._on_exit = take
        attempt = rig.open()
        rig.run(attempt, "true", task="bad")
        rig.run(attempt, "exit 3", task="good")
        assert (rig.exit().task_id, rig.emptied()) == ("good", attempt.key)
        assert "was not handled" in caplog.text
        attempt.close()
