"""The command line against a real head with virtual nodes, as a user types it."""

import contextlib
import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from phalanx.node.processes.proctable import process_environment, read_table
from tests import canaries

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

RANKS = """
import os, sys, time
rank = os.environ["RANK"]
print("hello from", rank, "of", os.environ["WORLD_SIZE"], flush=True)
with open(os.path.join(os.environ["PHALANX_OUTPUT_DIR"], f"rank-{rank}.txt"), "w") as file:
    file.write(rank)
if "fail" in sys.argv and rank == "1":
    sys.exit(3)
if "die" in sys.argv and rank == "1":
    os.kill(os.getpid(), 9)
if "stay" in sys.argv:
    time.sleep(120)
"""


class Shell:
    """Types commands with a PHALANX_HOME of its own."""

    def __init__(self, folder):
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "ranks.py").write_text(RANKS)
        self.home = folder / "home"
        kept = canaries.environment()
        self.env = {**kept, "PHALANX_HOME": str(self.home)}

    def argv(self, *words):
        return [sys.executable, "-m", "phalanx.app.cli", *words]

    def __call__(self, *words, code=0, stdin=""):
        done = subprocess.run(
            self.argv(*words),
            cwd=self.work,
            env=self.env,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *words):
        return json.loads(self(*words, "--json").stdout)

    def job(self, job):
        """Job and attempts as `show --json` prints them, asked without a process of its own: cheap enough to repeat."""
        return msgspec.to_builtins(Client(home=str(self.home)).job(job))

    def until(self, job, *states, within_s=120.0):
        limit_s = time.monotonic() + within_s
        while (found := self.json("show", job)["job"])["state"] not in states:
            assert time.monotonic() < limit_s, f"job {job} never became {states}: {found}"
            time.sleep(0.1)
        return found

    def processes(self, word="", **variables):
        """Pids of this cluster's processes with these variables and this word in their command line, the oldest first."""
        home, found = os.fsencode(self.home), []
        for row in sorted(read_table().values(), key=lambda row: row.started_ticks):
            environment = process_environment(row.pid)
            ours = any(home in value for value in environment.values())
            if ours and all(environment.get(os.fsencode(name)) == value.encode() for name, value in variables.items()):
                with contextlib.suppress(OSError):
                    if not word or word.encode() in Path(f"/proc/{row.pid}/cmdline").read_bytes().split(b"\0"):
                        found.append(row.pid)
        return found


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("cli"))
    up = shell("up", "--virtual", "2x2", "--port", str(free_port()))
    assert up.stdout.splitlines()[-1].startswith("next: ")
    yield shell
    shell("down", "--cancel-jobs")


PYTHON = sys.executable


def test_up_again_is_harmless(phalanx):
    assert "is up already" in phalanx("up").stdout


def test_a_second_head_on_a_taken_port_says_so(phalanx, tmp_path):
    other = Shell(tmp_path)
    port = json.loads((phalanx.home / "cluster.json").read_text())["port"]
    refused = other("up", "--port", str(port), "--virtual", "1x1", code=64)
    assert str(port) in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_run_prints_every_rank_and_get_fetches_what_they_wrote(phalanx):
    done = phalanx("run", "--gpus", "2x2", "--", PYTHON, "ranks.py")
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] hello from {rank} of 4" for rank in range(4)]
    assert "2 nodes x 2 = 4 GPUs; 4 tasks: 2 nodes x 2, one per GPU" in done.stderr
    job = phalanx.json("ps", "-a")[-1]["id"]
    phalanx("get", job, "outputs")
    assert sorted(os.listdir(phalanx.work / "outputs")) == [f"rank-{rank}.txt" for rank in range(4)]
    assert phalanx("logs", job, "--rank", "2").stdout == "hello from 2 of 4\n"
    assert len(phalanx("logs", job, "--tail", "1").stdout.splitlines()) == 4
    shown = phalanx("show", job).stdout
    for part in ("attempts", "ranks", "history", "usage", "succeeded"):
        assert part in shown


@pytest.mark.parametrize(("how", "code"), [("fail", 3), ("die", 137)])
def test_run_gives_the_code_of_the_task_that_failed_by_itself(phalanx, how, code):
    phalanx("run", "--gpus", "2", "--retry", "0", "--", PYTHON, "ranks.py", how, code=code)


def test_what_can_never_fit_is_refused_and_leaves_nothing(phalanx):
    before = len(phalanx.json("ps", "-a"))
    assert "never fit" in phalanx("submit", "--nodes", "99", "--gpus-per-node", "1", "--", "true", code=64).stderr
    assert len(phalanx.json("ps", "-a")) == before


def test_a_copy_travels_and_the_job_runs_in_it(phalanx):
    (phalanx.work / ".gitignore").write_text("outputs/\nsecret.txt\n")
    (phalanx.work / "secret.txt").write_text("x")
    out = phalanx("run", "--copy", "--", PYTHON, "-c", "import os; print(os.getcwd(), sorted(os.listdir()))").stdout
    assert "ranks.py" in out
    assert "secret.txt" not in out
    assert not out.startswith(str(phalanx.work))


def test_held_released_updated_cancelled(phalanx):
    job = phalanx("submit", "--hold", "--quiet", "--gpus", "1", "--", "sleep", "120").stdout.strip()
    assert phalanx.until(job, "pending")["held"] is True
    phalanx("update", job, "--name", "renamed", "--priority", "7")
    assert phalanx.json("show", job)["job"]["priority"] == 7
    phalanx("release", "renamed")
    phalanx.until(job, "running")
    assert "1 job is running" in phalanx("down", code=75).stderr
    phalanx("cancel", job)
    assert phalanx.until(job, "cancelled")["exit_code"] is not None
    phalanx("cancel", job)


def test_exec_runs_beside_the_ranks(phalanx):
    job = phalanx(
        "submit", "--quiet", "--gpus", "2", "--env", "COLOUR=green", "--", PYTHON, "ranks.py", "stay"
    ).stdout.strip()
    phalanx.until(job, "running")
    try:
        assert (
            phalanx("exec", job, "--", "sh", "-c", "echo $COLOUR $PHALANX_JOB_ID; exit 5", code=5).stdout
            == f"green {job}\n"
        )
        assert phalanx("exec", job, "--", "cat", stdin="through\n").stdout == "through\n"
        much = "x" * 3_000_000  # three windows
        assert phalanx("exec", job, "--", "cat", stdin=much).stdout == much
        refused = phalanx("exec", "--node-rank", "7", job, "--", "true", code=64)
        assert f"job {job} has 1 nodes" in refused.stderr
    finally:
        phalanx("cancel", job)


def test_drained_nodes_take_nothing_until_undrained(phalanx):
    phalanx("nodes", "drain", "n[0-1]", "--why", "test")
    job = phalanx("submit", "--quiet", "--gpus", "1", "--", "true").stdout.strip()
    assert {node["cordon"]["why"] for node in phalanx.json("nodes")} == {"test"}
    phalanx("submit", "--wait", "--timeout", "0.5s", "--gpus", "1", "--", "true", code=124)
    phalanx("nodes", "undrain", "n[0-1]")
    phalanx.until(job, "succeeded")


def test_reserved_nodes_take_nobody_else_until_given_back(phalanx):
    phalanx("users", "add", "grace")
    made = phalanx("nodes", "reserve", "n[0-1]", "--for", "4h", "--user", "grace", "--why", "exam", "--name", "exam")
    assert "n[0-1] (2 nodes) reserved for grace from" in made.stdout
    refused = phalanx(
        "nodes", "reserve", "n1", "--start", "+1h", "--for", "1h", "--maintenance", "--why", "fans", code=64
    )
    assert "n1 is already reserved at that time: exam, n[0-1] for grace" in refused.stderr
    job = phalanx("submit", "--quiet", "--gpus", "1", "--", "true").stdout.strip()
    phalanx("submit", "--wait", "--timeout", "0.5s", "--gpus", "1", "--", "true", code=124)
    assert phalanx.json("show", job)["job"]["reason"] == "reservation"
    assert "reserved until" in phalanx("nodes").stdout
    assert [one["id"] for one in phalanx.json("nodes", "reservations")] == ["exam"]
    phalanx("nodes", "unreserve", "exam")
    phalanx.until(job, "succeeded")


def test_tree_of_the_network_is_set_shown_and_kept_to(phalanx):
    tree = phalanx.work / "tree.yaml"
    tree.write_text("leaf l0: {rack r0: n0, rack r1: n1}\n")
    assert "2 nodes labelled" in phalanx("topology", "set", str(tree)).stdout
    domains = {"/".join(one["path"]): one["nodes"] for one in phalanx.json("topology")["domains"]}
    assert domains == {"l0": ["n0", "n1"], "l0/r0": ["n0"], "l0/r1": ["n1"]}
    assert "  rack r1" in phalanx("topology").stdout
    job = phalanx("submit", "--quiet", "--gpus", "2", "--within", "rack", "--", "true").stdout.strip()
    phalanx.until(job, "succeeded")
    refused = phalanx("submit", "--nodes", "2", "--gpus-per-node", "1", "--within", "rack", "--", "true", code=64)
    assert "no rack has 2 such nodes" in refused.stderr
    assert "did you mean rack?" in phalanx("submit", "--within", "rak", "--", "true", code=64).stderr
    assert "no effect" in phalanx("submit", "--prefer", "spine", "--gpus", "1", "--", "true").stdout
    assert "elastic: from 1 up to 2 nodes" in phalanx("submit", "--gpus", "1..2x1", "--", "true").stdout
    tree.write_text("rack r9: n[0-9]\n")
    assert "not labelled, because they have not joined: n[2-9]" in phalanx("topology", "set", str(tree)).stderr
    assert "node n0: no labels" in phalanx("nodes", "label", "n0", "rack=").stdout
    phalanx("nodes", "label", "n[0-1]", "rack=", "leaf=")
    assert phalanx.json("topology") == {"levels": [], "domains": []}


def test_wrong_token_is_77(phalanx):
    other = {**phalanx.env, "PHALANX_TOKEN": "wrong"}
    done = subprocess.run(phalanx.argv("ps"), env=other, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 77


def test_doctor_finds_the_head(phalanx):
    found = {finding["what"]: finding["level"] for finding in json.loads(phalanx("doctor", "--json").stdout)}
    assert found["head"] == found["token"] == found["nodes"] == "ok"


class Terminal:
    """A command on a pseudo-terminal, so that Ctrl-C is what a user presses."""

    def __init__(self, shell, *words):
        ours, theirs = pty.openpty()
        # setsid --ctty makes the pseudo-terminal the command's own, so that \x03 becomes SIGINT
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *shell.argv(*words)],
            cwd=shell.work,
            env={**shell.env, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.fd, self.seen = ours, ""

    def until(self, text):
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.5)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
        return self

    def resize(self, rows, cols):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        return self

    def press(self, keys):
        os.write(self.fd, keys.encode())
        return self

    def code(self):
        try:
            end = time.monotonic() + 60
            while self.process.poll() is None and time.monotonic() < end:
                self.drain()  # a screen that nobody reads blocks its program before it can read a key
            return self.process.wait(1)
        finally:
            os.close(self.fd)

    def drain(self):
        if select.select([self.fd], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # the other end is closed
                os.read(self.fd, 65536)


def test_first_ctrl_c_detaches_and_the_job_goes_on(phalanx):
    run = Terminal(phalanx, "run", "--gpus", "2", "--", PYTHON, "ranks.py", "stay")
    assert run.until("hello from 1").press("\x03").until("detached").code() == 130
    job = run.seen.split("phalanx attach ")[1].split()[0]
    assert phalanx.json("show", job)["job"]["state"] == "running"
    again = Terminal(phalanx, "attach", job)
    again.until("hello from 0").press("\x03").until("detached").press("\x03")
    assert again.until("cancelled job").code() == 130
    phalanx.until(job, "cancelled")


@pytest.fixture
def stays(phalanx):
    """A job that runs."""
    job = phalanx("submit", "--quiet", "--gpus", "1", "--", "sleep", "600").stdout.strip()
    phalanx.until(job, "running")
    yield job
    phalanx("cancel", job)


def test_exec_on_a_terminal_takes_keys_and_new_sizes(phalanx, stays):
    shell = Terminal(phalanx, "exec", stays, "--", "bash", "--norc")
    shell.until("$ " if os.getuid() else "# ").resize(33, 91).press("tty\r").until("/dev/pts/")
    shell.press("until [ \"$(stty size)\" = '33 91' ]; do sleep 0.05; done; echo si''zed\r").until("sized")
    # The program says when it runs: before that, Ctrl-C would reach the shell that starts it.
    shell.press("sh -c 'echo sle''eps; exec sleep 600'\r").until("sleeps\r\n")
    shell.press("\x03").press("echo co''de $?\r").until("code 130")
    assert shell.press("exit 7\r").code() == 7


def test_ctrl_c_without_a_terminal_reaches_the_command_and_a_second_one_leaves_it(phalanx, stays):
    trap = "trap 'echo told; exit 9' INT; echo ready; while :; do sleep 0.1; done"  # `wait` of dash may miss a signal
    told = Terminal(phalanx, "exec", "--no-tty", stays, "--", "sh", "-c", trap)
    assert told.until("ready").press("\x03").until("told").code() == 9
    stubborn = Terminal(phalanx, "exec", "--no-tty", stays, "--", "sh", "-c", "trap '' INT; echo $$; exec sleep 600")
    pid = stubborn.until("\n").seen.strip()
    stubborn.press("\x03")
    time.sleep(0.5)
    assert stubborn.process.poll() is None
    assert stubborn.press("\x03").code() == 130
    while os.path.exists(f"/proc/{pid}"):  # it was hung up on
        time.sleep(0.05)


def test_reader_that_lags_loses_nothing(phalanx, stays):
    words = shlex.join(phalanx.argv("exec", stays, "--", "sh", "-c", "head -c 5000000 /dev/zero; exit 4"))
    line = (
        f"{words} </dev/null | (sleep 2; wc -c); echo ${{PIPESTATUS[0]}}"  # meanwhile the pipe and the window are full
    )
    done = subprocess.run(["bash", "-c", line], cwd=phalanx.work, env=phalanx.env, stdout=subprocess.PIPE, check=True)
    assert done.stdout.split() == [b"5000000", b"4"]


def test_the_live_screen_draws_and_quits(phalanx):
    top = Terminal(phalanx, "top")
    assert top.until("n1").press("q").code() == 0


def test_a_head_killed_is_told_at_once_and_up_brings_it_back(phalanx):
    job = phalanx("submit", "--quiet", "--gpus", "2", "--", PYTHON, "ranks.py", "stay").stdout.strip()
    phalanx.until(job, "running")
    session = Terminal(phalanx, "exec", job, "--", "sh", "-c", "echo $$; exec sleep 600")
    pid = session.until("\n").seen.strip()
    record = json.loads((phalanx.home / "head.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    while os.path.exists(f"/proc/{record['pid']}"):
        time.sleep(0.02)
    dead = phalanx("ps", code=69)
    assert "phalanx up" in dead.stderr
    assert session.until("broke; the command receives SIGHUP").code() == 69
    assert "is up" in phalanx("up").stdout
    assert phalanx.until(job, "running")["epoch"] == 1
    while os.path.exists(f"/proc/{pid}"):  # the supervisor hears that its session is over
        time.sleep(0.05)
    phalanx("cancel", job)
