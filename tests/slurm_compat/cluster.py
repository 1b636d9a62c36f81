"""Two clusters of one shape that run the same scripts: Slurm's daemons in the lab, and Phalanx with virtual nodes on the lab's first host.

Both see the same shared folder, as on a cluster with a shared file system, and the same stand-ins for the programs that scripts call.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.lab.lab import Lab
from tests.lab.slurm import Slurm
from tests.slurm_compat import cases

NODES: Final = 4
GPUS: Final = 8
CPUS: Final = 192
MEMORY_GIB: Final = 1920
PHALANX_PORT: Final = 7611
FIRST_JOB: Final = 870001
"""Slurm's first job number: so long that no other number in a text is taken for it."""
ENDS_WITHIN_S: Final = 60.0
FEATURES: Final = ("h100", "h200", "gpu80g", "scratch")
PARTITIONS: Final = ("gpu", "cpu", "medium", "devel", "students", "teaching", "orchid")
_SLURM_VERSION: Final = "0x160508"
"""22.05.8, as the plugin has to say: <slurm/slurm.h>, SLURM_VERSION_NUM."""


def why_no_compiler() -> str:
    """Return one line that says that there is no C compiler; "" if there is one."""
    return "" if shutil.which("cc") else "the comparison with Slurm builds a plugin and needs a C compiler: install gcc"


class NamedSlurm(Slurm):
    """Slurm whose nodes are named as Phalanx names virtual nodes: n0, n1 ..."""

    def files(self) -> dict[str, str]:
        """The configuration, by file name."""
        found = super().files()
        own = f"Feature={','.join(FEATURES)} Sockets=2 CoresPerSocket={CPUS // 2} ThreadsPerCore=1"
        found["slurm.conf"] = re.sub(
            r"^NodeName=h([0-9]+) ", rf"NodeName=n\1 NodeHostname=h\1 {own} ", found["slurm.conf"], flags=re.MULTILINE
        )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one script did.

    Attributes:
        exit_code: of the job; None if it was refused or did not end.
        submitted: whether it was accepted.
        said: output of the submit command.
        calls: records of the stand-ins.
        files: text by path, relative to the script's folder.
        job: the job's number.
    """

    submitted: bool
    exit_code: int | None
    said: str
    job: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


class SharedFolder:
    """The folder that both clusters see: the script's own, the stand-ins, and their records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work, self.records, self.programs = folder / "work", folder / "records", folder / "bin"
        self.programs.mkdir(parents=True)
        text = (cases.FOLDER / "stand_in.py").read_text(encoding="utf-8").replace("@RECORDS@", str(self.records))
        for name in cases.PROGRAMS:
            self._program(self.programs / name, text)
        self._text = text
        sourced = self.programs / "activate"
        self._program(self.programs / "activation", text)
        sourced.write_text('activation "$@"\n', encoding="utf-8")

    def clear(self, script: Path) -> None:
        """Make a new folder for a script."""
        for place in (self.work, self.records):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        for directory in cases.DIRECTORIES:
            (self.work / directory).mkdir(parents=True)
        for name, text in cases.FILES.items():
            (self.work / name).write_text(text, encoding="utf-8")
        (self.work / "start.sh").chmod(0o755)
        for name in cases.LOCAL_PROGRAMS:
            self._program(self.work / name, self._text)
        (self.work / "script.sbatch").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")

    def calls(self) -> tuple[Mapping[str, Any], ...]:
        """What the stand-ins recorded."""
        return tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.records.glob("*.json")))

    def files(self) -> dict[str, str]:
        """Text of each file that the script wrote, by path."""
        given = {*cases.FILES, *cases.LOCAL_PROGRAMS, "script.sbatch"}
        found = {}
        for path in sorted(self.work.rglob("*")):
            name = str(path.relative_to(self.work))
            if path.is_file() and name not in given:
                found[name] = path.read_text(encoding="utf-8", errors="replace")
        return found

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


class World:
    """The lab with both clusters. Use as a context."""

    def __init__(self, folder: Path) -> None:
        self.lab = Lab(size=NODES, gpus=GPUS)
        self.shared = SharedFolder(folder)
        plugin = folder / "containers.so"
        source = cases.FOLDER / "container_plugin.c"
        build = ["cc", "-shared", "-fPIC", f"-DVERSION={_SLURM_VERSION}", "-o", str(plugin), str(source)]
        subprocess.run(build, check=True, timeout=60)
        partitions = "\n".join(f"PartitionName={name} Nodes=ALL MaxTime=INFINITE State=UP" for name in PARTITIONS)
        self.slurm = NamedSlurm(
            lab=self.lab,
            cpus=CPUS,
            memory_mib=MEMORY_GIB * 1024,
            more=f"FirstJobId={FIRST_JOB}\nSchedulerParameters=bf_interval=1\n{partitions}\n",  # which starts heterogeneous jobs
            also={"plugstack.conf": f"required {plugin}\n"},
        )

    def __enter__(self) -> Self:
        self.lab.up()
        for name, host in self.lab.hosts.items():
            for file, text in cases.HOME_FILES.items():
                host.path(f"/home/lab/{file}").write_text(text, encoding="utf-8")
            self.lab.run(name, ["mount", "--bind", str(self.shared.programs), "/usr/local/bin"])
            for file in (".profile", ".bashrc"):  # of this machine's root, whom --export=NONE signs in
                path = Path(pwd.getpwuid(0).pw_dir) / file
                if path.exists():
                    self.lab.run(name, ["mount", "--bind", "/home/lab/.bashrc", str(path)])
        self.slurm.start()
        self.phalanx("up", "--virtual", f"{NODES}xh100:{GPUS}", "--port", str(PHALANX_PORT))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.phalanx("down", "--cancel-jobs", check=False)
        finally:
            self.lab.down()

    # ---- commands in the first host ----------------------------------------------------------------------------------

    def in_host(
        self, argv: Sequence[str], *, check: bool = True, shell: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, in the script's folder; with the variables of the user's shell if `shell`.

        Raises:
            RuntimeError: it failed, and `check`.
        """
        folder = str(self.shared.work) if self.shared.work.exists() else "/"
        settings = [f"{name}={value}" for name, value in cases.ENVIRONMENT.items()] if shell else []
        command = self.lab.command("h0", ["env", *settings, *argv], folder=folder)
        plain = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
        plain["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=plain)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def phalanx(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of Phalanx on the first host."""
        settings = [
            f"PHALANX_HOME={self.shared.folder}/phalanx",
            f"PHALANX_VIRTUAL_CPUS={CPUS}",
            f"PHALANX_VIRTUAL_MEMORY={MEMORY_GIB}G",
        ]
        argv = ["env", *settings, sys.executable, "-m", "phalanx.app.cli", *words]
        return self.in_host(argv, check=check, shell=words[0] != "up")  # nodes do not inherit the user's shell

    # ---- one script ----------------------------------------------------------------------------------------------------

    def on_slurm(self, script: Path) -> Outcome:
        """Run a script on Slurm."""
        self.shared.clear(script)
        reserved = "--reservation=workshop" in script.read_text(encoding="utf-8")
        if reserved:
            when = ["starttime=now", "duration=1-0", "nodes=ALL"]
            self.in_host(["scontrol", "create", "reservation=workshop", "users=root", *when])
        done = self.in_host(["sbatch", "script.sbatch", *cases.ARGUMENTS.get(script.name[:2], ())], check=False)
        found = re.search(r"Submitted batch job ([0-9]+)", done.stdout)
        said = done.stdout + done.stderr
        if found is None:
            return Outcome(submitted=False, exit_code=None, said=said)
        code = self._slurm_end(found[1])
        self.in_host(["scancel", "--user=root"], check=False)
        self._wait(lambda: not self.in_host(["squeue", "--noheader"]).stdout.strip())
        if reserved:
            self.in_host(["scontrol", "delete", "reservation=workshop"])
        return Outcome(
            submitted=True,
            exit_code=code,
            said=said,
            job=found[1],
            calls=self.shared.calls(),
            files=self.shared.files(),
        )

    def _slurm_end(self, job: str) -> int | None:
        """The highest exit code of the job, once it and what it started have ended."""

        def ended() -> bool:
            waiting = self.in_host(["squeue", "--noheader", "--format=%T %r"]).stdout.splitlines()
            return all(line.endswith("BeginTime") for line in waiting)

        if not self._wait(ended):
            return None
        text = self.in_host(["scontrol", "show", "job", job]).stdout
        codes = [
            max(int(code), 128 + int(signal) if int(signal) else 0)
            for code, signal in re.findall(r"ExitCode=(\d+):(\d+)", text)
        ]
        return max(codes)

    def on_phalanx(self, script: Path) -> Outcome:
        """Run a script on Phalanx."""
        self.shared.clear(script)
        words = ["submit", "--wait", "script.sbatch", *cases.ARGUMENTS.get(script.name[:2], ())]
        reserved = "--reservation=workshop" in script.read_text(encoding="utf-8")
        if reserved:  # other jobs would not start on its nodes
            whose = ["--user", "root", "--name", "workshop", "--for", "1d", "--why", "compare"]
            self.phalanx("nodes", "reserve", f"n[0-{NODES - 1}]", *whose)
        done = self.phalanx(*words, check=False)
        if reserved:
            self.phalanx("nodes", "unreserve", "workshop")
        said = done.stdout + done.stderr
        found = re.search(r"(?:job|array) ([0-9]+) ", done.stdout)
        if found is None:
            return Outcome(submitted=False, exit_code=None, said=said)
        self._wait(
            lambda: not [one for one in self._phalanx_jobs() if one["state"] not in {"waiting", "queued", "pending"}]
        )
        for one in self._phalanx_jobs():
            self.phalanx("cancel", str(one["id"]), check=False)
        self._wait(lambda: not self._phalanx_jobs())
        return Outcome(
            submitted=True,
            exit_code=done.returncode,
            said=said,
            job=found[1],
            calls=self.shared.calls(),
            files=self.shared.files(),
        )

    def _phalanx_jobs(self) -> list[dict[str, Any]]:
        """Jobs that have not ended."""
        ended = {"succeeded", "failed", "cancelled", "timeout", "timed_out"}
        found = json.loads(self.phalanx("ps", "--json").stdout or "[]")
        return [one for one in found if one["state"] not in ended]

    @staticmethod
    def _wait(holds: Any, within_s: float = ENDS_WITHIN_S) -> bool:
        end = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True
