"""Real Slurm daemons in the lab: munged on every host, slurmctld on the first, slurmd on all, fake GPUs as GRES.

`Slurm(lab).start()` writes the configuration into each host, covers its /etc/slurm with it and starts the daemons; they die with their
host, and `boot` starts them again after a restart. Nothing of the system's own /etc/slurm is touched. Debian's packages:
slurmctld slurmd slurm-client munge; with `books` also slurmdbd and mariadb-server-core (`tests/lab/books.py`).
"""

from __future__ import annotations

import functools
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.books import DISK, Books
from tests.lab.lab import Lab

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
"""Program -> the Debian package that brings it."""

KEY = "/run/munge.key"

READY_S = 100.0
"""A hang guard: nodes register in 2 s here, and on a busy machine a daemon of Slurm takes half a minute to notice its node again."""

COMMON = """
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
GresTypes=gpu
"""
"""Of every Slurm that we start. `config_overrides`: a node is what is written here, not what slurmd counts on this machine. `linuxproc` and
`task/none` need no control group, which a container may not let us make."""

CGROUP = "CgroupPlugin=cgroup/v1\n"
"""slurmd wants a plugin all the same; this one is taken where no control group is mounted."""

CONFIGURATION = (
    COMMON
    + """
ClusterName=lab
SlurmctldHost={controller}({controller_address})
StateSaveLocation={disk}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={disk}/slurmctld.log
SlurmdLogFile={disk}/slurmd.log
DefMemPerCPU={default_mib}
SlurmctldTimeout=10
SlurmdTimeout={silence_s}
InactiveLimit=0
UnkillableStepTimeout=20
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
{more}
"""
)
"""Without `DefMemPerCPU` a job that states no memory takes all of its node's."""

SILENCE_S = 10
"""`SlurmdTimeout`, after which slurmctld may call a silent node down; it takes up to three times that (docs/lab.md). Default 300 s."""


@functools.cache
def why_no_slurm() -> str:
    """One line that says what is missing; empty where Slurm is installed. Ask `needs.why_not` first."""
    lacking = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    return f"Slurm in the lab needs {', '.join(lacking)}: `make lab-slurm` installs them on Debian" if lacking else ""


@dataclass(slots=True, kw_only=True)
class Slurm:
    """Slurm on all hosts of a lab; the first is the controller and computes too.

    Attributes:
        cpus, memory_mib: what each node is said to have.
        gpu: the type that its GPUs are said to be.
        books: Slurm's accounting, on the first host; None for a Slurm that keeps none.
        more: further lines of slurm.conf.
        also: further files of /etc/slurm, by name.
    """

    lab: Lab
    cpus: int = 16
    memory_mib: int = 4096
    gpu: str = "h100"
    silence_s: int = SILENCE_S
    books: Books | None = None
    more: str = ""
    also: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start the daemons of every living host that has none, and wait until those nodes are idle.

        Raises:
            RuntimeError: Slurm is not installed, a daemon ended, or the nodes did not come; with the logs' last lines.
        """
        if why_no_slurm():
            raise RuntimeError(why_no_slurm())
        living = [host for host in self.lab.hosts.values() if host.pid]
        for host in living:
            if not host.path("/run/slurmd.pid").exists():
                self.boot(host.name)
        self.wait_idle(len(living))

    def boot(self, name: str) -> None:
        """Start the daemons of one host: after `Lab.restart` too, which lost them."""
        host = self.lab.host(name)
        for folder in ("conf", "state", "spool"):
            host.path(DISK).joinpath(folder).mkdir(parents=True, exist_ok=True)
        for file, text in self.files().items():
            host.path(f"{DISK}/conf/{file}").write_text(text, encoding="ascii")
        secret = self._key()
        key = host.path(KEY)
        key.touch(mode=0o600)
        key.write_bytes(secret)
        host.path("/run/munge").mkdir(mode=0o755)  # a user's srun must reach the socket in it
        if not self.lab.run(name, ["findmnt", "--noheadings", "/etc/slurm"], check=False):
            self.lab.run(name, ["mount", "--bind", f"{DISK}/conf", "/etc/slurm"])
        own = ["--socket=/run/munge/munge.socket.2", "--pid-file=/run/munged.pid", "--seed-file=/run/munge.seed"]
        self._daemon(name, ["munged", f"--key-file={KEY}", f"--log-file={DISK}/munged.log", *own])
        if host.index == 0:
            if self.books is not None:
                self.books.open(name, self.wait)
            self._daemon(name, ["slurmctld"])
        self._daemon(name, ["slurmd"])

    def stop(self) -> None:
        """End every daemon; jobs that run are ended first. The hosts stay."""
        first = next(iter(self.lab.hosts))
        if self.lab.host(first).pid:
            self.lab.run(first, ["sh", "-c", "scancel --state=RUNNING; scancel --state=PENDING"], check=False)
            self.wait(lambda: not self.lab.run(first, ["squeue", "--noheader"], check=False), "all jobs have ended")
        for name, host in self.lab.hosts.items():
            if host.pid:
                files = "/run/slurmd.pid /run/slurmctld.pid /run/slurmdbd.pid /run/mariadb.pid /run/munged.pid"
                ended = f"for file in {files}; do [ -e $file ] && kill $(cat $file); done; rm -rf /run/munge {KEY}"
                self.lab.run(name, ["sh", "-c", ended], check=False)
        self.wait(lambda: not self._daemons(), "all daemons have ended")

    def files(self) -> dict[str, str]:
        """The configuration, by file name."""
        hosts = list(self.lab.hosts.values())
        gres = f" Gres=gpu:{self.gpu}:{self.lab.gpus}" if self.lab.gpus else ""
        lines = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs={self.cpus} RealMemory={self.memory_mib}{gres} State=UNKNOWN"
            for host in hosts
        ]
        slurm = CONFIGURATION.format(
            controller=hosts[0].name,
            controller_address=hosts[0].address,
            disk=DISK,
            silence_s=self.silence_s,
            default_mib=self.memory_mib // self.cpus,
            nodes="\n".join(lines),
            more=self.more + (self.books.configuration(hosts[0].name) if self.books is not None else ""),
        )
        devices = f"Name=gpu Type={self.gpu} File=/dev/nvidia[0-{self.lab.gpus - 1}]\n" if self.lab.gpus else ""
        return {
            "slurm.conf": slurm.lstrip(),
            "gres.conf": f"AutoDetect=off\n{devices}",
            "cgroup.conf": CGROUP,
            **self.also,
        }

    def wait_idle(self, count: int) -> None:
        """Wait until that many nodes take work."""
        self.wait(lambda: sum(state == "idle" for state in self.states().values()) >= count, f"{count} nodes are idle")

    def states(self) -> dict[str, str]:
        """Node -> state, as sinfo says it; empty while slurmctld does not answer."""
        said = self.lab.run(
            next(iter(self.lab.hosts)), ["sinfo", "--noheader", "--Node", "--format=%N %T"], check=False
        )
        return dict(line.split() for line in said.splitlines())

    def wait(self, holds: Callable[[], bool], what: str, *, within_s: float = READY_S) -> None:
        """Wait until it holds.

        Raises:
            RuntimeError: it never did; with what the daemons said last.
        """
        end = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > end:
                raise RuntimeError(f"Slurm: not within {within_s:g} s: {what}\n{self._said()}")
            time.sleep(0.1)

    def _daemon(self, name: str, argv: list[str]) -> None:
        """Start a program that puts itself into the background, which frees it from the death of whoever started it."""
        try:
            self.lab.run(name, argv, timeout_s=READY_S)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self._said()}") from None

    def _key(self) -> bytes:
        """What the hosts trust each other by: that of a host which has it, or a new one. Slurm takes no work from a stranger."""
        for host in self.lab.hosts.values():
            if host.pid and host.path(KEY).exists():
                return host.path(KEY).read_bytes()
        return secrets.token_bytes(128)

    def _daemons(self) -> list[int]:
        """Outer pids of Slurm's and munge's processes in all hosts."""
        found = []
        for name in self.lab.hosts:
            for pid in self.lab.processes(name):
                with suppress(OSError):
                    if (
                        Path(f"/proc/{pid}/comm")
                        .read_text(encoding="utf-8")
                        .startswith(("slurm", "munged", "mariadbd"))
                    ):
                        found.append(pid)
        return found

    def _said(self) -> str:
        """The last lines of each log of each host that lives."""
        tail = ["sh", "-c", f"tail -n 5 {DISK}/*.log"]
        return "\n".join(
            f"{name}: {self.lab.run(name, tail, check=False)}" for name, host in self.lab.hosts.items() if host.pid
        )
