"""One cluster of three nodes with two devices each, on each engine, behind the same few verbs. Real daemons; nothing here is played.

A rig is a `benchmarks.cluster.BenchmarkCluster`: start, kill_head, stop, call, submit, job, wait_for_state, history; and `kill_node`, which is a
power cut as far as one machine can have one: every process of the node at once, those of the engine's own daemons there too.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from benchmarks.cluster import BenchmarkCluster, free_port
from phalanx.engines.local import records
from phalanx.engines.ray.cluster import session_folder
from phalanx.engines.ray.ray_process import sweep_ray
from tests.contract.kubernetes_real_rig import real_kubernetes
from tests.contract.kubernetes_rig import kubernetes, resident_kubernetes
from tests.contract.slurm_rig import slurm
from tests.kubernetes.real_cluster import why_not as why_no_kubernetes
from tests.slurm_here import why_not as why_no_slurm

VIRTUAL = "3x2"
# A job's guarantees, short enough for a test.
SOON = ("--min-run", "1s", "--min-run-by-right", "1s", "--min-stay", "1s")

R = TypeVar("R", bound=BenchmarkCluster)


@dataclass(slots=True)
class LocalRig(BenchmarkCluster):
    """Virtual nodes of the local engine, brought back 5 s after they died."""


@dataclass(slots=True)
class RayRig(BenchmarkCluster):
    """A Ray head and two more Ray nodes, on loopback."""

    def stop(self) -> None:
        """End everything, also what a head that was killed left of Ray."""
        BenchmarkCluster.stop(self)
        for path in glob.glob(os.path.join(self.home, "ray", "*", "engine.json")):
            living = records.read(os.path.dirname(path))
            if living is not None:
                sweep_ray(living)
        shutil.rmtree(session_folder(self.home), ignore_errors=True)

    def node_records(self) -> dict[str, dict]:
        """What Ray's actors wrote of the supervisors they brought."""
        found = {}
        for path in sorted(glob.glob(os.path.join(self.home, "ray-nodes", "nodes", "*", "engine.json"))):
            with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                found[os.path.basename(os.path.dirname(path))] = json.load(file)
        return found

    def kill_node(self, name: str, signal_number: int = 9) -> float:
        """The supervisor and all under it, then Ray's own processes of that node."""
        at_s = BenchmarkCluster.kill_node(self, name, signal_number)
        self.kill_ray(name)
        return at_s

    def kill_ray(self, name: str) -> None:
        """Ray's own processes of one node, and nothing of ours."""
        living = records.read(os.path.join(self.home, "ray", name))
        assert living is not None, f"Ray's node {name} does not run"
        sweep_ray(living)


@contextlib.contextmanager
def local() -> Iterator[LocalRig]:
    """See `LocalRig`."""
    with _running(LocalRig, revive_s=5.0, head_arguments=SOON) as rig:
        yield rig


@contextlib.contextmanager
def ray(*words: str) -> Iterator[RayRig]:
    """See `RayRig`; with further words for its head."""
    with _running(RayRig, head_arguments=("--engine", "ray", *SOON, *words)) as rig:
        yield rig


@contextlib.contextmanager
def _running(kind: type[R], **options: Any) -> Iterator[R]:
    home = tempfile.mkdtemp(prefix="phalanx-engine-")
    rig = kind(home=home, port=free_port(), virtual=VIRTUAL, lease_s=4.0, **options)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()
        shutil.rmtree(home, ignore_errors=True)


def gated(rig: BenchmarkCluster, gate: str, **body: Any) -> str:
    """A job that ends well once the gate is open."""
    script = f"echo begun; while [ ! -e {os.path.join(rig.home, gate)} ]; do sleep 0.05; done; echo over"
    return rig.submit(run=script, tasks_per_node=1, name=gate, grace="1s", **body)


def open_gate(rig: BenchmarkCluster, gate: str) -> None:
    """Let the jobs of this gate end."""
    with open(os.path.join(rig.home, gate), "w", encoding="utf-8"):
        pass


def _why_no_ray() -> str:
    told = "Ray is not installed: pip install '.[ray]' -c constraints.txt"
    return "" if importlib.util.find_spec("ray") else told


RIGS: Mapping[str, Callable[[], contextlib.AbstractContextManager[BenchmarkCluster]]] = {
    "kubernetes": partial(kubernetes, SOON),
    "kubernetes_real": partial(real_kubernetes, SOON),
    "kubernetes_resident": partial(resident_kubernetes, SOON),
    "local": local,
    "ray": ray,
    "slurm": partial(slurm, SOON),
}
WHY_NOT: dict[str, Callable[[], str]] = {
    "kubernetes": lambda: "",
    "kubernetes_real": why_no_kubernetes,
    "kubernetes_resident": lambda: "",
    "local": lambda: "",
    "ray": _why_no_ray,
    "slurm": why_no_slurm,
}
