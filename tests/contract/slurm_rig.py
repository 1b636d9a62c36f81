"""The contract suite's cluster on Slurm: three nodes of two devices on this machine, real daemons, and the head on top."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cluster import ROOT, Cluster, free_port, until
from tests.slurm_here import SlurmHere

BACK_S = 6.0  # after a node's death until its daemon is started again, as after a short power cut


@dataclass(slots=True, kw_only=True)
class SlurmRig(Cluster):
    """A head on Slurm."""

    slurm: SlurmHere

    def start(self, *, wait_nodes: bool = True) -> None:
        """Start the head; Slurm runs already."""
        command = [
            sys.executable, "-m", "phalanx.app.head", "--home", self.home, "--port", str(self.port), "--lease", str(self.lease_s),
            *self.words,
        ]  # fmt: skip
        own = {"PHALANX_HOME": self.home, "PYTHONPATH": os.path.join(ROOT, "src"), "TMPDIR": self.slurm.folder}
        self.environment = {**self.slurm.environment, **own}
        with open(os.path.join(self.home, "head.out"), "ab") as output:
            self.head = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=self.environment
            )
        until(self.serves, "the head serves")
        if wait_nodes:
            until(lambda: sum(node["state"] == "up" for node in self.nodes()) == 3, "all nodes are up")

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """Slurm's daemon there, its steps, our supervisor and all under it."""
        at_s = time.time()
        self.slurm.kill_node(name)
        for pid in _processes_on(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        threading.Timer(BACK_S, self.slurm.start_node, (name,)).start()
        return at_s


@contextlib.contextmanager
def slurm(words: tuple[str, ...]) -> Iterator[SlurmRig]:
    """See `SlurmRig`."""
    folder, home = tempfile.mkdtemp(prefix="phalanx-slurm-"), tempfile.mkdtemp(prefix="phalanx-engine-")
    daemons = SlurmHere(folder=folder)
    rig = SlurmRig(
        home=home, port=free_port(), virtual="", lease_s=4.0, words=("--engine", "slurm", *words), slurm=daemons
    )
    try:
        daemons.start()
        rig.start()
        yield rig
    finally:
        rig.stop()
        daemons.stop()
        for path in (folder, home):
            shutil.rmtree(path, ignore_errors=True)


def _processes_on(name: str) -> list[int]:
    """What Slurm started on that node, with the step daemons above it."""
    mark, found = f"SLURMD_NODENAME={name}", set()
    for path in glob.glob("/proc/[0-9]*/environ"):
        pid = int(path.split("/")[2])
        with contextlib.suppress(OSError):
            with open(path, encoding="utf-8", errors="replace") as file:
                if mark not in file.read().split("\0"):
                    continue
            found.add(pid)
            parent = _parent(pid)
            with open(f"/proc/{parent}/comm", encoding="utf-8") as comm:
                if comm.read().startswith("slurmstepd"):
                    found.add(parent)
    return sorted(found)


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
