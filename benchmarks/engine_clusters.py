"""A cluster of three servers on each engine, in the lab (docs/lab.md): heads, joined servers, Ray and Slurm as a user would start them.

Each is a `benchmarks.cluster.BenchmarkCluster` whose head is on host h0. Its lab cuts cables and kills hosts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.cluster import BenchmarkCluster, wait_until
from tests.lab.lab import Lab
from tests.lab.slurm import Slurm
from tests.lab.typed import join_words

PHALANX: Final = [os.path.join(os.path.dirname(sys.executable), "phalanx")]
HOME: Final = "/home/lab/.phalanx"
WORKDIR: Final = "/var/tmp"  # exists on every host; not shared
JOIN_S: Final = 90.0  # time-out; Ray takes 5 to 10 s
_RAY: Final = ("ray::", "raylet", "gcs_server", "/ray/")


@dataclass(slots=True, kw_only=True)
class LabCluster(BenchmarkCluster):
    """A head on h0 of a lab.

    Attributes:
        up_arguments: arguments of `phalanx up`.
        slurm: the Slurm below the head, if any.
        join_arguments: arguments of `phalanx join` for another server; empty if the engine provides the servers.
    """

    lab: Lab
    up_arguments: tuple[str, ...]
    slurm: Slurm | None = None
    join_arguments: tuple[str, ...] = ()

    def begin(self) -> None:
        """Run `phalanx up`, and let all other servers join."""
        self.environment = dict(os.environ)
        output = self.lab.run("h0", [*PHALANX, "up", *self.up_arguments], timeout_s=JOIN_S)
        if self.slurm is None:
            self.join_arguments = tuple(join_words(output))
            for name in self.worker_hosts:
                self.join(name)
        wait_until(lambda: len(self.nodes_up()) == len(self.lab.hosts), "all nodes are up", every_s=0.1)

    def end(self) -> None:
        """Stop Phalanx on all hosts; the lab removes the rest."""
        for name in reversed(self.lab.hosts):
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.lab.run(name, [*PHALANX, "down", "--cancel-jobs"], check=False, timeout_s=30.0)

    @property
    def worker_hosts(self) -> list[str]:
        """All hosts except the one of the head."""
        return list(self.lab.hosts)[1:]

    def join(self, name: str) -> float:
        """Let a server join; return the seconds from the exec of the command until its node is up."""
        began = time.monotonic()
        self.lab.run(name, [*PHALANX, *self.join_arguments, "--virtual", "2"], timeout_s=JOIN_S)
        return time.monotonic() - began

    def leave(self, name: str) -> None:
        """Let a server leave."""
        self.lab.run(name, [*PHALANX, "down"], timeout_s=JOIN_S)
        wait_until(lambda: name not in self.nodes_up(), f"{name} has left", every_s=0.05)

    def nodes_up(self) -> set[str]:
        """Return the nodes that are up."""
        return {node["id"] for node in self.nodes() if node["state"] == "up"}

    def connect(self) -> socket.socket:
        """Connect to loopback of h0."""
        return self.lab.inside("h0", functools.partial(BenchmarkCluster.connect, self))

    def on_head_host(self, argv: list[str]) -> list[str]:
        """See `Cluster`."""
        return self.lab.command("h0", argv)

    def token(self) -> str:
        """See `Cluster`."""
        try:
            return self.lab.host("h0").path(f"{HOME}/token").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def memory_mib(self) -> tuple[float, float]:
        """Return the proportional set size of our processes on the host of the head, and of the daemons of the engine there, in MiB."""
        ours = theirs = 0.0
        for pid in self.lab.processes("h0"):
            with contextlib.suppress(OSError):
                words = _read(f"/proc/{pid}/cmdline").replace("\0", " ")
                size = pss_mib(pid)
                name = _read(f"/proc/{pid}/comm").strip()
                if "phalanx.app.head" in words or "phalanx.engines" in words:
                    ours += size
                elif name.startswith(("slurm", "munged")) or any(word in words for word in _RAY):
                    theirs += size
        return ours, theirs


@contextlib.contextmanager
def joined(lab: Lab) -> Iterator[LabCluster]:
    """Run servers that joined a head with the local engine."""
    with _running(lab, ("--listen", lab.host("h0").address, "--virtual", "1x2")) as cluster:
        yield cluster


@contextlib.contextmanager
def ray(lab: Lab) -> Iterator[LabCluster]:
    """Run the same with a Ray cluster started by Phalanx."""
    with _running(lab, ("--engine", "ray", "--listen", lab.host("h0").address, "--virtual", "1x2")) as cluster:
        yield cluster


@contextlib.contextmanager
def slurm(lab: Lab) -> Iterator[LabCluster]:
    """Run Slurm on every host, and a head that uses it."""
    daemons = Slurm(lab=lab)
    daemons.start()
    with _running(lab, ("--engine", "slurm", "--listen", lab.host("h0").address), daemons) as cluster:
        yield cluster


@contextlib.contextmanager
def _running(lab: Lab, up: tuple[str, ...], slurm: Slurm | None = None) -> Iterator[LabCluster]:
    cluster = LabCluster(home=WORKDIR, port=7600, virtual="", lab=lab, up_arguments=up, slurm=slurm)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()


def pss_mib(pid: int) -> float:
    """Return the proportional set size of a process in MiB; 0 if it cannot be read."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
