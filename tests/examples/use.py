"""One use of a cluster that the examples show: what it needs, and how it is run, killed once and checked; the cluster for it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import BenchmarkCluster, free_port
from tests.e2e.test_cli_head import Shell
from tests.examples.environments import FOLDER, environment_of, last_lines

_PROGRAM_S: Final = 400.0
_APT_S: Final = 900.0


class UseFailed(AssertionError):
    """A use did not do what it should; the text says what it did."""


class ProgramMissing(Exception):
    """A program that the use needs is not here and cannot be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use.

    Attributes:
        name: its folder under `examples/`.
        run: runs it on a cluster, kills something in the middle, checks the result, and returns what was seen, in one line.
        debian: programs that it needs, and the Debian package of each.
        packaged: it has a `requirements.txt`.
    """

    name: str
    run: Callable[[UseCluster], str]
    debian: dict[str, str] = field(default_factory=dict)
    packaged: bool = False

    def prepare(self) -> None:
        """Install what is missing.

        Raises:
            ProgramMissing: only root on Debian could install a program.
            EnvironmentMissing: pip cannot install its packages.
        """
        missing = sorted({package for program, package in self.debian.items() if shutil.which(program) is None})
        if missing:
            if os.geteuid() != 0 or shutil.which("apt-get") is None:
                raise ProgramMissing(f"needs {', '.join(missing)}, which only root on Debian could install here")
            print(f"{self.name}: installing {' '.join(missing)}", flush=True)
            apt = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600")
            _call(*apt, "update")
            done = _call(*apt, "install", "-y", "--no-install-recommends", *missing)
            if done.returncode != 0:
                raise ProgramMissing(f"apt-get cannot install {' '.join(missing)}: {last_lines(done.stderr, 2)}")
        if self.packaged:
            environment_of(self.name, with_phalanx=True)


class UseCluster:
    """A real head with two virtual nodes of two devices, for one use.

    Attributes:
        folder: of the example.
        results: folder for its pictures and tables.
    """

    def __init__(self, use: Use, shell: Shell, results: Path) -> None:
        self.shell, self.folder, self.results = shell, FOLDER / use.name, results.resolve()
        bin_folder = environment_of(use.name, with_phalanx=True) if use.packaged else Path(sys.executable).parent
        self.python = str(bin_folder / "python")
        self.path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self.killed_at = ""
        self.results.mkdir(parents=True, exist_ok=True)

    def program(self, *words: str, kill_after: str = "", kill: Callable[[str], None] | None = None) -> str:
        """Run a program of the example that uses the cluster; call `kill(job)` at the line that holds `kill_after`. Return what it printed.

        The line names the job, as `job 7: ...`.
        """
        command = [self.python, str(self.folder / words[0]), *words[1:]]
        lines: list[str] = []
        with subprocess.Popen(
            command,
            cwd=self.shell.work,
            env=self.shell.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            limit_s = time.monotonic() + _PROGRAM_S
            for line in process.stdout:
                lines.append(line)
                if kill is not None and not self.killed_at and kill_after in line:
                    kill(line.split()[1].rstrip(":"))
                    self.killed_at = line.strip()
                if time.monotonic() > limit_s:
                    process.kill()
        said = "".join(lines)
        if process.returncode != 0:
            raise UseFailed(f"{words[0]} ended with {process.returncode}\n{last_lines(said, 30)}")
        if kill is not None and not self.killed_at:
            raise UseFailed(f"no line held {kill_after!r}, so nothing was killed\n{last_lines(said, 30)}")
        return said

    def submit(self, *words: str) -> str:
        """Submit a job in the folder of the example; return its id."""
        told = ("submit", "--quiet", "-e", f"PATH={self.path}", "--workdir", str(self.folder))
        words = tuple(str(self.folder / word) if word.endswith(".yaml") else word for word in words)
        job: str = self.shell(*told, *words).stdout.strip()
        return job

    def succeeded(self, job: str, within_s: float = 400.0) -> dict[str, Any]:
        """Wait until a job has ended, and return it.

        Raises:
            UseFailed: it did not succeed.
        """
        found: dict[str, Any] = self.shell.until(job, "succeeded", "failed", "cancelled", "timeout", within_s=within_s)
        if found["state"] != "succeeded":
            raise UseFailed(f"job {job} is {found['state']}\n{last_lines(self.logs(job), 30)}")
        return found

    def logs(self, job: str) -> str:
        """What a job printed."""
        return str(self.shell("logs", job).stdout)

    def when_logged(self, job: str, text: str, silent_s: float = 180.0) -> None:
        """Wait until a job has printed a text, as long as it prints anything within `silent_s`."""
        printed, limit_s = "", time.monotonic() + silent_s
        while text not in (now := self.logs(job)):
            if now != printed:
                printed, limit_s = now, time.monotonic() + silent_s
            if time.monotonic() > limit_s or self.shell.job(job)["job"]["state"] not in {"pending", "running"}:
                raise UseFailed(f"job {job} never printed {text!r}\n{last_lines(now, 30)}")
            time.sleep(0.3)

    def kill_process(self, job: str, word: str) -> None:
        """Kill the youngest process of a job with this word in its command line."""
        found = self.shell.processes(word, PHALANX_JOB_ID=job)
        if not found:
            raise UseFailed(f"job {job} has no process {word}")
        os.kill(found[-1], signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """Kill a node: its supervisor and all that runs under it."""
        BenchmarkCluster(home=str(self.shell.home), port=0, virtual="").kill_node(name)

    def fetched(self, job: str) -> Path:
        """Fetch what a job wrote."""
        folder: Path = self.shell.work / f"fetched-{job}"
        self.shell("get", job, str(folder))
        return folder

    def same_after_a_kill(self, *words: str, kill_after: str, kill: Callable[[str], None]) -> dict[str, Any]:
        """Run a program twice, once with a kill; return its `result.json`, which must be the same both times."""
        calm = self.shell.work / "undisturbed"
        self.program(*words, "--output", str(calm))
        self.program(*words, "--output", str(self.results), kill_after=kill_after, kill=kill)
        first, second = (json.loads((folder / "result.json").read_text()) for folder in (calm, self.results))
        if first != second:
            raise UseFailed(f"the result differs after a kill at {self.killed_at!r}:\n{first}\n{second}")
        found: dict[str, Any] = second
        return found


@contextlib.contextmanager
def cluster_for(use: Use, folder: Path, results: Path) -> Iterator[UseCluster]:
    """Bring up a cluster with a PHALANX_HOME under `folder`, and stop it afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    shell = Shell(folder)
    made = UseCluster(use, shell, results)
    shell.env["PATH"] = made.path
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    try:
        yield made
    finally:
        shell("down", "--cancel-jobs")


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_APT_S, check=False)
