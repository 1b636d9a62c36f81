"""Slurm on this machine alone: munged, slurmctld and a slurmd for each of a few nodes, on loopback, all under one folder. Root.

Nothing of the system's own Slurm is touched: ports, socket, key, spool and configuration are its own, and every daemon is ended by its pid.
Where hosts must differ (cables, power, addresses), use the lab.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import time
from dataclasses import dataclass, field

from benchmarks.cluster import until
from tests.lab.slurm import why_no_slurm

DEVICE_MAJOR = 120  # of the range for local use: no driver owns it
SILENCE_S = 5

CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={silence_s}
KillWait=2
GresTypes=gpu
DefMemPerCPU=64
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=8 RealMemory=4096 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


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
            host=socket.gethostname(), folder=self.folder, port=ports[0], last=self.nodes - 1, first_port=ports[1], last_port=ports[-1],
            gpus=self.gpus, silence_s=SILENCE_S,
        )  # fmt: skip
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
            ("cgroup.conf", "CgroupPlugin=cgroup/v1\n"),
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
        until(lambda: os.path.exists(f"{self.folder}/munge.socket"), "munged listens")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for number in range(self.nodes):
            self.start_node(f"n{number}")
        until(lambda: list(self.states().values()) == ["idle"] * self.nodes, "Slurm's nodes are idle", limit_s=60.0)

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
        """End every daemon."""
        self.run("scancel", "--partition=here")
        time.sleep(0.5)
        for daemon in reversed(self.daemons.values()):
            with contextlib.suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, name: str, argv: list[str]) -> None:
        with open(f"{self.folder}/{name}.out", "ab") as output:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )


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
