"""Slurm on this machine alone: munged, slurmctld and a slurmd for each of a few nodes, on loopback, all under one folder. Root.

Nothing of the system's own Slurm is touched: ports, socket, key, spool and configuration are its own, and every daemon is ended by its pid.
Where hosts must differ (cables, power, addresses), use the lab.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.cluster import wait_until
from phalanx.node.processes.proctable import (
    ProcessRow,
    descendants,
    process_environment,
    read_table,
)
from phalanx.node.processes.sweeps import kill_until_none
from tests.lab.slurm import CGROUP, COMMON, why_no_slurm

DEVICE_MAJOR = 120  # of the range for local use: no driver owns it
SILENCE_S = 5
LEAVE_S = 5.0  # for jobs to end in good order: KillWait is 2 s

CONFIGURATION = (
    COMMON
    + """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={silence_s}
DefMemPerCPU=64
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=8 RealMemory=4096 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
)


def why_not() -> str:
    """One line that says what is missing; empty where it can run."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    return why_no_slurm()


@dataclass(slots=True)
class SlurmHere:
    """The daemons. `environment` is what Slurm's commands need to mean this one."""

    folder: str
    nodes: int = 3
    gpus: int = 2
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands."""
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def start(self) -> None:
        """Start everything and wait until the nodes are idle."""
        os.makedirs(f"{self.folder}/state", exist_ok=True)
        ports = _free_ports(self.nodes + 1)
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            folder=self.folder,
            port=ports[0],
            last=self.nodes - 1,
            first_port=ports[1],
            last_port=ports[-1],
            gpus=self.gpus,
            silence_s=SILENCE_S,
        )
        gres = ["AutoDetect=off"]
        for number in range(self.nodes):
            os.makedirs(f"{self.folder}/spool/n{number}", exist_ok=True)
            for index in range(self.gpus):
                minor = number * self.gpus + index
                os.mknod(f"{self.folder}/gpu{minor}", 0o600 | stat.S_IFCHR, os.makedev(DEVICE_MAJOR, minor))
                gres.append(f"NodeName=n{number} Name=gpu File={self.folder}/gpu{minor}")
        for name, said in (
            ("slurm.conf", text),
            ("gres.conf", "\n".join(gres) + "\n"),
            ("cgroup.conf", CGROUP),
        ):
            with open(f"{self.folder}/{name}", "w", encoding="ascii") as file:
                file.write(said)
        key = f"{self.folder}/munge.key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(secrets.token_bytes(128))
        own = [
            "--socket",
            f"{self.folder}/munge.socket",
            "--pid-file",
            f"{self.folder}/munged.pid",
            "--seed-file",
            f"{self.folder}/munge.seed",
        ]
        self._daemon(
            "munged",
            ["munged", "--foreground", "--force", "--key-file", key, "--log-file", f"{self.folder}/munged.log", *own],
        )
        wait_until(lambda: os.path.exists(f"{self.folder}/munge.socket"), "munged listens")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for number in range(self.nodes):
            self.start_node(f"n{number}")
        wait_until(
            lambda: list(self.states().values()) == ["idle"] * self.nodes, "Slurm's nodes are idle", limit_s=60.0
        )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._daemon(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """The slurmd of a node, at once; what it started is the caller's."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def states(self) -> dict[str, str]:
        """Node -> state, as sinfo says it; empty while slurmctld does not answer."""
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)

    def run(self, *argv: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout

    def stop(self) -> None:
        """End every daemon, and whatever of a job then still lives: a step daemon that cannot report its end tries for ever.

        Raises:
            RuntimeError: a process would not die.
        """
        with contextlib.suppress(
            TimeoutError, subprocess.TimeoutExpired
        ):  # those of a dead node never end in good order
            self.run("scancel", "--partition=here")
            wait_until(lambda: not self.run("squeue", "--noheader"), "all jobs have ended", limit_s=LEAVE_S)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        left = kill_until_none(self._members, LEAVE_S, certain=lambda: False)
        if left:
            raise RuntimeError(f"of the Slurm in {self.folder} these would not die: {left}")

    def processes(self, node: str = "") -> list[int]:
        """What lives of this Slurm, or of one of its nodes: daemons, step daemons (whose parent is process 1), and all below them."""
        table = read_table()
        return sorted(pid for pid in self._members(table, node) if not table[pid].dead)

    def _members(self, table: Mapping[int, ProcessRow], node: str = "") -> set[int]:
        found = {pid for pid in table if self._is_of(pid, node)} - {os.getpid()}
        return found | descendants(table, found)

    def _is_of(self, pid: int, node: str) -> bool:
        """By its environment, or by what it has open: a step daemon writes its title over its environment, and holds its slurmd's log."""
        ours, opened = process_environment(pid), _opened(pid)
        if node:
            here = ours.get(b"SLURM_CONF") == f"{self.folder}/slurm.conf".encode()
            return (
                here and ours.get(b"SLURMD_NODENAME") == node.encode()
            ) or f"{self.folder}/slurmd-{node}.log" in opened
        words = (*ours.values(), *(path.encode() for path in opened))
        return any(word.startswith(f"{self.folder}/".encode()) or word == self.folder.encode() for word in words)

    def _daemon(self, name: str, argv: list[str]) -> None:
        with open(f"{self.folder}/{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )


def _opened(pid: int) -> list[str]:
    """Paths of what a process has open, its working folder among them."""
    found = []
    with contextlib.suppress(OSError):
        found.append(os.readlink(f"/proc/{pid}/cwd"))
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def _free_ports(count: int) -> list[int]:
    """So many ports in one row that nobody listens on."""
    for first in range(17_000, 20_000, count + 1):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(first, first + count))
    raise AssertionError(f"no {count} free ports in a row")
