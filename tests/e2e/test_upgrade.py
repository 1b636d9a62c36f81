"""An upgrade from earlier commits, and the way back: a head with nodes of its own, a joined node, a running and a waiting job. Real processes."""

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

ROOT = Path(__file__).parents[2]
TICKS = """
import os, sys, time
open(os.path.join(sys.argv[2], str(os.getpid())), "x").close()
count = 0
while not os.path.exists(sys.argv[1]):
    print("tick", count, flush=True)
    count += 1
    time.sleep(0.05)
print("ticks in all:", count, flush=True)
"""
pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.prove, pytest.mark.timeout(300)]


def git(*words):
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


class Release(Shell):
    """Commands of the release that is installed now, in a virtual environment of its own."""

    python = sys.executable

    def argv(self, *words):
        return [self.python, "-P", "-m", "phalanx.app.cli", *words]


@pytest.fixture(params=[1, 30], ids=["the commit before", "30 commits before"])
def old(request, tmp_path):
    """The Python of a virtual environment with the package of an earlier commit."""
    if git("rev-parse", "--show-prefix") != b"\n":
        pytest.skip("this is no checkout of Phalanx's own git repository: no earlier commit to upgrade from")
    packed = git("archive", f"HEAD~{request.param}", "src")
    if packed is None:
        pytest.skip(f"HEAD~{request.param} is not in this clone (git fetch --unshallow brings it)")
    folder = tmp_path / "old"
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (site / "release.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")
    python = str(folder / "venv" / "bin" / "python")
    where = subprocess.run(
        [python, "-I", "-c", "import phalanx; print(phalanx.__file__)"], capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(folder / "src"))
    return python


@pytest.fixture
def cluster(old, tmp_path):
    """A head of the old release with two nodes of its own, and a node that joined it: each with a folder of its own."""
    shells = []
    for name in ("head", "member"):
        (tmp_path / name).mkdir()
        shells.append(Release(tmp_path / name))
        shells[-1].python = old
    head, member = shells
    up = head(
        "up", "--lease", "3", "--virtual", "2x2", "--port", str(free_port()), "--listen", f"127.0.0.2:{free_port()}"
    )
    words = up.stdout.partition("phalanx join ")[2].splitlines()[0].split()
    line = ("join", *words, "--virtual", "2", "--name", "m1")
    member(*line)
    yield head, member, line
    for shell in (member, head):
        shell.python = sys.executable
        shell("down", "--cancel-jobs")


def ranks(folder):
    """The processes of the job that ticks: each that ever began must still live."""
    found = {int(path.name) for path in folder.iterdir()}
    for pid in found:
        os.kill(pid, 0)
    return found


def started_by(shell, python):
    """How many of its processes run from that environment."""
    return len([pid for pid in shell.processes(python) if pid != os.getpid()])


def until(condition, within_s=120.0):
    limit_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < limit_s
        time.sleep(0.1)
    return found


def test_an_upgrade_keeps_jobs_and_their_lines_and_a_backup_leads_back(old, cluster, tmp_path):
    head, member, line = cluster
    end, pids = tmp_path / "end", tmp_path / "pids"
    pids.mkdir()
    backup = tmp_path / "backup"
    head("backup", str(backup))
    (head.work / "ticks.py").write_text(TICKS)
    ticks = (sys.executable, str(head.work / "ticks.py"), str(end), str(pids))
    running = head("submit", "--quiet", "--gpus", "6", "--gpus-per-node", "2", "--", *ticks).stdout.strip()
    waiting = head("submit", "--quiet", "--gpus", "2", "--", "echo", "waited").stdout.strip()
    head.until(running, "running")
    assert head.json("show", waiting)["job"]["state"] == "pending"
    before = until(lambda: len(found := ranks(pids)) == 6 and found)
    shown = head.json("show", running)

    head("down", "--keep-jobs")
    assert ranks(pids) == before
    head.python = sys.executable
    head("up")
    assert ranks(pids) == before, "the same processes"
    assert started_by(head, old), "supervisors of nodes with jobs stay"
    after = until(lambda: (found := head.json("show", running))["job"]["state"] == "running" and found)
    assert [one["epoch"] for one in after["attempts"]] == [one["epoch"] for one in shown["attempts"]] == [1]
    assert head.json("show", waiting)["job"]["state"] == "pending"
    assert {node["id"]: node["state"] for node in head.json("nodes")} == {"n0": "up", "n1": "up", "m1": "up"}

    end.touch()
    head.until(running, "succeeded")
    head.until(waiting, "succeeded")
    for rank in range(6):
        said = [one.partition("tick")[2] for one in head("logs", running, "--rank", str(rank)).stdout.splitlines()]
        count = int(said.pop().rpartition(":")[2])
        assert [int(one) for one in said] == list(range(count)), f"rank {rank} lost lines or repeats them"

    member("down")
    member.python = sys.executable
    member(*line)
    until(lambda: {node["id"]: node["state"] for node in head.json("nodes")}["m1"] == "up")
    head("down")
    head("up")
    assert not started_by(head, old)
    assert not started_by(member, old)
    new = head("submit", "--quiet", "--gpus", "6", "--gpus-per-node", "2", "--", "echo", "new").stdout.strip()
    head.until(new, "succeeded")

    # The way back. An older release refuses the database if this one has migrations that it does not know.
    head("down")
    member("down")
    head.python = member.python = old
    head("restore", str(backup), "--replace")
    head("up")
    assert head.json("ps", "--all") == [], "as at the time of the backup"
    head("nodes", "drain", "m1")  # to this head it is still up
    member(*line[:-1], "m2")
    last = head("submit", "--quiet", "--gpus", "2", "--", "echo", "back").stdout.strip()
    head.until(last, "succeeded")
