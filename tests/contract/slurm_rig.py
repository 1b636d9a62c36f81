"""The contract suite's cluster on Slurm: three nodes of two devices on this machine, real daemons, and the head on top."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.cluster import (
    BenchmarkCluster,
    command_words,
    free_port,
)
from tests.slurm_here import SlurmHere

BACK_S = 6.0  # after a node's death until its daemon is started again, as after a short power cut


@dataclass(slots=True, kw_only=True)
class SlurmRig(BenchmarkCluster):
    """A head on Slurm."""

    slurm: SlurmHere
    nodes_at_start: int = 3  # that are up before any job
    revivals: list[threading.Timer] = field(default_factory=list)

    def start(self, *, wait_nodes: bool = True) -> None:
        """Start the head; Slurm runs already."""
        self.start_head(variables={**self.slurm.environment, "TMPDIR": self.slurm.folder})
        if wait_nodes:
            self.wait_for_nodes(self.nodes_at_start)

    def stop(self) -> None:
        """End the head, and start no daemon any more."""
        for revival in self.revivals:
            revival.cancel()
            revival.join()
        BenchmarkCluster.stop(self)

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """Slurm's daemon there, its steps, our supervisor and all under it."""
        at_s = time.time()
        self.slurm.kill_node(name)
        for pid in self.slurm.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        self.revivals.append(threading.Timer(BACK_S, self.slurm.start_node, (name,)))
        self.revivals[-1].start()
        return at_s


@contextlib.contextmanager
def slurm(words: tuple[str, ...], *, nodes: int = 3, machines: int = 3) -> Iterator[SlurmRig]:
    """See `SlurmRig`."""
    folder, home = tempfile.mkdtemp(prefix="phalanx-slurm-"), tempfile.mkdtemp(prefix="phalanx-engine-")
    daemons = SlurmHere(folder=folder, nodes=machines)
    rig = SlurmRig(
        home=home,
        port=free_port(),
        virtual="",
        lease_s=4.0,
        head_arguments=("--engine", "slurm", *words),
        slurm=daemons,
        nodes_at_start=nodes,
    )
    try:
        with here(daemons):
            try:
                rig.start()
                yield rig
            finally:
                rig.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def here(daemons: SlurmHere) -> Iterator[SlurmHere]:
    """A Slurm that runs, of which nothing is left afterwards.

    Raises:
        AssertionError: something is; it goes with what it is.
    """
    try:
        daemons.start()
        yield daemons
    finally:
        daemons.stop()
        left = {pid: " ".join(command_words(pid)) for pid in daemons.processes()}
        shutil.rmtree(daemons.folder, ignore_errors=True)
        assert not left, f"left of the Slurm in {daemons.folder}: {left}"
