"""The packages that a job names, installed on the node that runs it: a real head, real pip, and no index."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import free_port
from phalanx.core.ids import NodeId
from phalanx.engines.local import records
from phalanx.node.files.folder_cache import FolderCache
from phalanx.node.processes.proctable import read_table
from tests import canaries
from tests.wheels import wheel

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PATIENCE_S = 120.0  # a hang guard
SHOW = "import os, sys, {0}; print({0}.VERSION, sys.prefix == os.environ['VIRTUAL_ENV'])\n"
# A build backend that lies in the package itself: it waits for a gate, so that a test can look at an install that is under way.
SLOW = """
import os, sys, time
sys.path.insert(0, os.environ["PX_TESTS"])
from pathlib import Path
from tests.wheels import wheel

def build_wheel(folder, config_settings=None, metadata_directory=None):
    Path(os.environ["PX_GATE"] + ".pid").write_text(str(os.getpid()))
    while not os.path.exists(os.environ["PX_GATE"]):
        time.sleep(0.05)
    return wheel(Path(folder), "pxslow", version="1.0")
"""


class Shell:
    """Types commands from a folder of its own, against one head with one node."""

    def __init__(self, folder):
        self.folder = folder
        self.home = folder / "home"
        kept = canaries.environment()
        path = f"{os.path.dirname(sys.executable)}:{kept['PATH']}"
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.env = {**kept, "PATH": path, "PHALANX_HOME": str(self.home), "PX_TESTS": root}

    def __call__(self, *words, cwd, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "phalanx.app.cli", *words],
            cwd=cwd,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def workdir(self, name, requirements=None, **files):
        folder = self.folder / name
        folder.mkdir()
        if requirements is not None:
            (folder / "requirements.txt").write_text(requirements)
        for file, text in files.items():
            (folder / file.replace("_", ".")).write_text(text)
        return folder

    def slow_workdir(self, name):
        """A folder whose requirements are built from source, and only while the gate is open."""
        folder = self.workdir(name, "--no-index\n./slow\n", main_py=SHOW.format("pxslow"))
        (folder / "slow").mkdir()
        (folder / "slow" / "backend.py").write_text(
            SLOW + f"# {name}: contents of its own, hence an environment of its own\n"
        )
        (folder / "slow" / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "pxslow"\nversion = "1.0"\n'
        )
        return folder

    def said(self, job, cwd):
        """What the supervisor had to say of the job."""
        return self("logs", job, "--rank", "supervisor", cwd=cwd).stdout

    def last(self, cwd):
        return json.loads(self("ps", "-a", "--json", cwd=cwd).stdout)[-1]["id"]

    def job(self, job, cwd):
        return json.loads(self("show", job, "--json", cwd=cwd).stdout)["job"]


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("requirements"))
    shell("up", "--virtual", "1x4", "--port", str(free_port()), cwd=shell.folder)
    yield shell
    shell("down", "--cancel-jobs", cwd=shell.folder)


def until(condition, what):
    limit = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < limit, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.05)
    return found


def runs(pid):
    row = read_table().get(pid)
    return row is not None and not row.dead


def pid_behind(gate):
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((gate.parent / (gate.name + ".pid")).read_text())
    return 0


def test_packages_of_a_copy_are_installed_once_and_the_next_job_finds_them(phalanx):
    work = phalanx.workdir("first", "--no-index\n./pxone-1.0-py3-none-any.whl\n", main_py=SHOW.format("pxone"))
    wheel(work, "pxone", command="pxone-say")
    done = phalanx("run", "--copy", "--", "python", "main.py", cwd=work)
    assert done.stdout == "1.0 True\n"
    assert "requirements.txt: its packages are installed once on each node" in done.stderr
    assert "installing with " in phalanx.said(phalanx.last(work), work)
    assert phalanx("run", "--copy", "--", "pxone-say", cwd=work).stdout == "command of pxone\n"
    assert "already installed on this node" in phalanx.said(phalanx.last(work), work)
    assert phalanx("run", "--copy", "--requirements", "none", "--", "python", "-c", "import pxone", cwd=work, code=1)


def test_setup_warm_ranks_and_the_nodes_torch_see_the_same_environment(phalanx):
    work = phalanx.workdir("warm", "--no-index\n./pxwarm-1.0-py3-none-any.whl\n")
    (work / "main.py").write_text(
        "import torch, pxwarm, sys; print(pxwarm.VERSION, 'torch' in sys.modules, sys.argv[1])"
    )
    wheel(work, "pxwarm")
    words = ("run", "--copy", "--warm", "--setup", "python -c 'import pxwarm'", "--", "python", "main.py", "x")
    assert phalanx(*words, cwd=work).stdout == "1.0 True x\n"
    job = phalanx.last(work)
    assert "cold" not in phalanx.said(job, work)


def test_shared_folder_installs_what_it_is_asked_to(phalanx):
    work = phalanx.workdir("shared", main_py=SHOW.format("pxshared"))
    wheel(work, "pxshared", version="2.0")
    (work / "pyproject.toml").write_text(
        f"[project]\nname = 'x'\nversion = '1'\ndependencies = ['pxshared @ file://{work}/pxshared-2.0-py3-none-any.whl']\n"
    )
    words = (
        "run",
        "--requirements",
        "pyproject.toml",
        "--env",
        "PIP_NO_INDEX=1",
        "--env",
        "UV_NO_INDEX=1",
        "--",
        "python",
        "main.py",
    )
    assert phalanx(*words, cwd=work).stdout == "2.0 True\n"
    assert "no such file" in phalanx("run", "--requirements", "more.txt", "--", "true", cwd=work, code=78).stderr


def test_failed_install_ends_the_job_with_the_installers_words(phalanx):
    work = phalanx.workdir("wrong", "--no-index\npx-nowhere==7\n")
    done = phalanx("run", "--copy", "--", "python", "-c", "print('ran')", cwd=work, code=1)
    assert "ran" not in done.stdout
    assert "requirements.txt could not be installed" in done.stderr
    assert "px-nowhere" in done.stderr
    job = phalanx.last(work)
    assert phalanx.job(job, work)["attempts"] == 1
    assert "px-nowhere" in phalanx.said(job, work)


def test_two_jobs_at_once_install_once(phalanx):
    work, gate = phalanx.slow_workdir("twice"), phalanx.folder / "twice.gate"
    words = ("submit", "--quiet", "--copy", "--gpus", "1", "--env", f"PX_GATE={gate}", "--", "python", "main.py")
    jobs = [phalanx(*words, cwd=work).stdout.strip() for _ in range(2)]
    until(lambda: pid_behind(gate), "an install begins")
    until(lambda: any("waiting for it" in phalanx.said(job, work) for job in jobs), "the other one waits")
    gate.touch()
    for job in jobs:
        phalanx("attach", job, cwd=work)
    said = "".join(phalanx.said(job, work) for job in jobs)
    assert said.count("installing with") == 1


def test_cancel_stops_an_install(phalanx):
    work, gate = phalanx.slow_workdir("cancelled"), phalanx.folder / "cancelled.gate"
    words = ("submit", "--quiet", "--copy", "--env", f"PX_GATE={gate}", "--", "python", "main.py")
    job = phalanx(*words, cwd=work).stdout.strip()
    pid = until(lambda: pid_behind(gate), "the install begins")
    phalanx("cancel", job, cwd=work)
    until(lambda: phalanx.job(job, work)["state"] == "cancelled", "it is cancelled")
    until(lambda: not runs(pid), "the installer is gone")


@pytest.mark.prove
def test_supervisor_killed_in_mid_install_leaves_nothing_that_is_used(phalanx):
    work, gate = phalanx.slow_workdir("killed"), phalanx.folder / "killed.gate"
    folder = str(phalanx.home / "nodes" / "n0")
    venvs = FolderCache(folder)
    os.makedirs(os.path.join(venvs.folder, "locks"), exist_ok=True)  # as the first install does
    before = set(os.listdir(venvs.folder))
    words = ("submit", "--quiet", "--copy", "--env", f"PX_GATE={gate}", "--", "python", "main.py")
    job = phalanx(*words, cwd=work).stdout.strip()
    pid = until(lambda: pid_behind(gate), "the install begins")
    living = records.read(folder)
    assert living is not None
    assert living.id == NodeId("n0")
    os.kill(living.identity.pid, signal.SIGKILL)
    until(lambda: not runs(pid), "its installer dies with it")
    (half,) = set(os.listdir(venvs.folder)) - before
    assert not venvs.complete(half)
    gate.touch()
    assert phalanx("attach", job, cwd=work).stdout.endswith("1.0 True\n")
    assert venvs.complete(half)
