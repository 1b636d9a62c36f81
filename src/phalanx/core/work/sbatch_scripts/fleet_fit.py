"""Fits the job of an `#SBATCH` script to the nodes that exist: whole nodes for `--exclusive`, and lower numbers for a cluster that is too small. Pure.

A script is written for one cluster and its numbers are that cluster's. What a job requests on nodes of its own is known only once they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.units import MIB, format_bytes, parse_memory_bytes

_PARTS: Final = re.compile(r"[0-9]+x|.*/")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What one node has. `model` is "" for a node without devices, or with several models."""

    id: str
    gpus: int
    cpus: int
    memory_bytes: int
    model: str = ""


@dataclass(slots=True)
class _Job:
    """The numbers of a script's job that can be changed; `put` writes them back."""

    mapping: Mapping[str, object]
    slurm: dict[str, str] = field(init=False)
    nodes: int = field(init=False)
    gpus: int = field(init=False)  # on each node
    cpus: int = field(init=False)  # on each node; 0 for the node's share
    memory_bytes: int = field(init=False)
    tasks: int = field(init=False)  # on each node
    model: str = field(init=False)

    def __post_init__(self) -> None:
        mapping = self.mapping
        self.slurm = {str(name): str(value) for name, value in _table(mapping.get("slurm")).items()}
        model, _, total = str(mapping.get("gpus") or 0).rpartition(":")
        self.model = model
        self.nodes = _whole(mapping.get("nodes")) or 1
        self.gpus = _whole(mapping.get("gpus_per_node")) or -(-_whole(total) // self.nodes)
        self.cpus = _whole(mapping.get("cpus"))
        self.memory_bytes = parse_memory_bytes(mapping["memory"]) if mapping.get("memory") else 0
        self.tasks = _whole(self.slurm.get("tasks_per_node")) or 1

    def spread(self, node_cpus: int) -> None:
        """Take as many nodes as the tasks need: a script that gives a number of tasks leaves the number of nodes to Slurm."""
        tasks, each = _whole(self.slurm.get("ntasks")) or 1, _whole(self.slurm.get("cpus_per_task")) or 1
        fit = max(1, node_cpus // each)
        if tasks > self.tasks * self.nodes or self.tasks > fit:
            self.nodes = max(self.nodes, -(-tasks // fit))
            self.tasks = -(-tasks // self.nodes)
            self.cpus = self.tasks * each

    def put(self) -> dict[str, object]:
        """The mapping with these numbers."""
        found = dict(self.mapping)
        self.slurm["tasks_per_node"] = str(self.tasks)
        self.slurm["ntasks"] = str(min(_whole(self.slurm.get("ntasks")) or 1, self.tasks * self.nodes))
        found |= {"nodes": self.nodes, "slurm": self.slurm}
        if self.gpus:
            total = self.gpus * self.nodes
            found |= {"gpus": f"{self.model}:{total}" if self.model else total, "gpus_per_node": self.gpus}
        if self.cpus:
            found["cpus"] = self.cpus
        if self.memory_bytes:
            found["memory"] = f"{max(1, self.memory_bytes // MIB)}M"
        return found


def take_whole_nodes(mapping: Mapping[str, object], nodes: Sequence[NodeShape]) -> tuple[dict[str, object], str]:
    """Request all GPUs and CPUs of each node, for `--exclusive`; return the mapping and a line that says so.

    Of several kinds of nodes that fit, the kind that most nodes have counts; if two are equally many, the one with more GPUs.

    Raises:
        BadRequest: the script requests a part of a GPU, or no node fits.
    """
    if not _of_whole_gpus(mapping):
        raise BadRequest("--exclusive with a part of a GPU", hint="request whole GPUs, or leave --exclusive out")
    job = _Job(mapping)
    named = {name for name in str(mapping.get("nodelist") or "").split(",") if name}
    fitting = [
        node
        for node in nodes
        if node.gpus >= job.gpus and _has_model(node, job.model) and (not named or node.id in named)
    ]
    if not fitting:
        wanted = f"{job.gpus} GPUs" + (f" of model {job.model}" if job.model else "")
        raise BadRequest(f"--exclusive: no node has {wanted}", hint=Hint(HintCode.LIST_NODES))
    kinds = Counter((node.gpus, node.cpus) for node in fitting)
    gpus, cpus = max(kinds, key=lambda kind: (kinds[kind], kind))
    if job.slurm.get("nodes_given") == "0":
        job.spread(cpus)
    job.gpus, job.cpus = gpus, cpus
    each = (f"{gpus} GPUs and " if gpus else "") + f"{cpus} CPUs"
    return job.put(), f"--exclusive: whole nodes, with {each} each"


def spread_tasks(mapping: Mapping[str, object], nodes: Sequence[NodeShape]) -> dict[str, object]:
    """Spread the tasks of a script without GPUs and without a number of nodes over several nodes, if one has too few CPUs for all."""
    if not _of_whole_gpus(mapping):
        return dict(mapping)
    job = _Job(mapping)
    if job.slurm.get("nodes_given") == "0" and not job.gpus and nodes and not job.slurm.get("ntasks_per_node"):
        largest = _largest(nodes)
        if job.cpus > largest.cpus:
            job.spread(largest.cpus)
            return job.put()
    return dict(mapping)


def numbers_too_large(mapping: Mapping[str, object], nodes: Sequence[NodeShape]) -> list[str]:
    """Return a line for each number of the job that no node, or not enough nodes, can give; empty if the job fits."""
    if not _of_whole_gpus(mapping):
        return []
    job = _Job(mapping)
    usable = _usable(job, nodes)
    most, found = _largest(usable), []
    if job.nodes > len(usable):
        of_one = " of one GPU model" if len(usable) < len(nodes) else ""
        found.append(f"{job.nodes} nodes (the cluster has {len(usable)}{of_one})")
    if job.gpus > most.gpus:
        found.append(f"{job.gpus} GPUs on a node (a node has at most {most.gpus})")
    if job.cpus > most.cpus:
        found.append(f"{job.cpus} CPUs on a node (a node has at most {most.cpus})")
    if job.memory_bytes > most.memory_bytes:
        found.append(
            f"{format_bytes(job.memory_bytes)} of memory on a node (a node has at most {format_bytes(most.memory_bytes)})"
        )
    return found


def scale_down(mapping: Mapping[str, object], nodes: Sequence[NodeShape]) -> dict[str, object]:
    """Lower the numbers of a job to what the nodes have: for a trial on a small machine.

    A script with a task for each GPU keeps one: its tasks are lowered with the GPUs. One that asks for a part of a GPU stays as it is.
    """
    if not _of_whole_gpus(mapping):
        return dict(mapping)
    job = _Job(mapping)
    usable = _usable(job, nodes)
    most = _largest(usable)
    job.nodes = min(job.nodes, max(1, len(usable)))
    if job.gpus > most.gpus:
        if job.tasks == job.gpus and most.gpus:
            job.tasks = most.gpus
        job.gpus = most.gpus
        for name in ("gpus", "gpus_per_node", "gpus_per_task"):
            if job.slurm.get(name):
                job.slurm[name] = str(job.gpus * job.nodes if name == "gpus" else job.gpus)
        if job.slurm.get("gpus_per_task"):
            job.slurm["gpus_per_task"] = str(max(1, job.gpus // job.tasks))
    if job.slurm.get("ntasks_per_node"):
        job.slurm["ntasks_per_node"] = str(job.tasks)
    if job.cpus > most.cpus:
        job.cpus = most.cpus
        if job.slurm.get("cpus_per_task"):
            job.slurm["cpus_per_task"] = str(max(1, most.cpus // job.tasks))
        if job.slurm.get("cpus_per_gpu") and job.gpus:
            job.slurm["cpus_per_gpu"] = str(max(1, most.cpus // job.gpus))
    job.memory_bytes = min(job.memory_bytes, most.memory_bytes)
    return job.put()


def _usable(job: _Job, nodes: Sequence[NodeShape]) -> Sequence[NodeShape]:
    """The nodes that the job can use together: with GPUs those of one model, which holds the job if one does, else the one with most nodes."""
    models: dict[str, list[NodeShape]] = {}
    for node in nodes:
        if job.gpus and node.gpus and _has_model(node, job.model):
            models.setdefault(node.model, []).append(node)

    def rank(group: list[NodeShape]) -> tuple[bool, int, int]:
        most = _largest(group)
        holds = job.gpus <= most.gpus and job.cpus <= most.cpus and job.memory_bytes <= most.memory_bytes
        return holds and job.nodes <= len(group), len(group), most.gpus

    return max(models.values(), key=rank, default=list(nodes))


def _largest(nodes: Sequence[NodeShape]) -> NodeShape:
    return NodeShape(
        id="",
        gpus=max((node.gpus for node in nodes), default=0),
        cpus=max((node.cpus for node in nodes), default=0),
        memory_bytes=max((node.memory_bytes for node in nodes), default=0),
    )


def _of_whole_gpus(mapping: Mapping[str, object]) -> bool:
    """Whether the job asks for whole GPUs, or none: parts and MIG slices are written as `2x1/4`."""
    return not mapping.get("share") and not _PARTS.match(str(mapping.get("gpus") or ""))


def _has_model(node: NodeShape, models: str) -> bool:
    return not models or any(model.strip().lower() in node.model.lower() for model in models.split(","))


def _whole(value: object) -> int:
    text = str(value or 0)
    return int(text) if text.isdecimal() else 0


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
