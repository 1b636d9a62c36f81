"""Build the `SLURM_*` variables of a batch script and of the tasks that `srun` starts in it. Pure.

Source: sbatch(1) and srun(1) of Slurm 22.05, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from phalanx.core.fleet.hostlist import fold_hostlist


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmBatchNode:
    """One node of the job. `address`: where other nodes reach it; `devices`: how many the job has there."""

    name: str
    address: str
    devices: int
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmBatchJob:
    """One attempt of a batch script.

    Attributes:
        job_number: the job's number; for an element of an array its own, not the array's.
        options: the job's `slurm` options.
        array: SLURM_ARRAY_* variables; empty without an array.
    """

    job_number: str
    name: str
    nodes: tuple[SlurmBatchNode, ...]
    options: Mapping[str, str]
    user: str
    uid: int
    cluster: str = "phalanx"
    array: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    end_s: float | None = None
    start_s: float = 0.0

    @property
    def ntasks(self) -> int:
        """Tasks of the whole job."""
        return int(self.options.get("ntasks") or len(self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One `srun`: `counts` tasks on each of `nodes` (node ranks)."""

    number: int
    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    cpus_per_task: str = ""

    @property
    def tasks(self) -> int:
        """Number of all tasks."""
        return sum(self.counts)

    def node_of(self, task: int) -> tuple[int, int]:
        """Return a task's index in `nodes` and its local id: block distribution."""
        for place, count in enumerate(self.counts):
            if task < count:
                return place, task
            task -= count
        raise IndexError(task)


def tasks_per_node(tasks: int, nodes: int, per_node: int | None = None) -> tuple[int, ...]:
    """Return the number of tasks on each node: as even as possible, with the remainder on the first nodes; at most `per_node`.

    Raises:
        ValueError: they do not fit, or there are fewer tasks than nodes.
    """
    if tasks < nodes or (per_node is not None and tasks > nodes * per_node):
        raise ValueError(f"{tasks} tasks on {nodes} nodes" + (f" of at most {per_node}" if per_node else ""))
    if per_node is not None:
        full = [per_node] * nodes
        short, place = nodes * per_node - tasks, nodes - 1
        while short:  # the last nodes get fewer, but at least one each
            cut = min(short, full[place] - 1)
            full[place] -= cut
            short -= cut
            place -= 1
        return tuple(full)
    return tuple(tasks // nodes + (place < tasks % nodes) for place in range(nodes))


def batch_variables(batch: SlurmBatchJob, node_rank: int = 0) -> dict[str, str]:
    """Return the variables of the script, or on another node of a task, that describe the job."""
    asked, nodes, node = batch.options, batch.nodes, batch.nodes[node_rank]
    names = node_list(batch, range(len(nodes)))
    per_node = int(asked["ntasks_per_node"]) if asked.get("ntasks_per_node") else None
    try:
        counts = tasks_per_node(batch.ntasks, len(nodes), per_node)
    except ValueError:
        counts = (1,) * len(nodes)
    found = {
        "SLURM_JOB_ID": batch.job_number,
        "SLURM_JOBID": batch.job_number,
        "SLURM_JOB_NAME": batch.name,
        "SLURM_CLUSTER_NAME": batch.cluster,
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NTASKS": str(batch.ntasks),
        "SLURM_NPROCS": str(batch.ntasks),
        "SLURM_TASKS_PER_NODE": compress_counts(counts),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts([one.cpus for one in nodes]),
        "SLURM_CPUS_ON_NODE": str(node.cpus),
        "SLURM_SUBMIT_DIR": asked.get("submit_dir", ""),
        "SLURM_SUBMIT_HOST": asked.get("submit_host", ""),
        "SLURM_JOB_PARTITION": asked.get("partition") or batch.cluster,
        "SLURM_JOB_USER": batch.user,
        "SLURM_JOB_UID": str(batch.uid),
        "SLURM_NODEID": str(node_rank),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": node.name,
        "SLURM_TOPOLOGY_ADDR": node.name,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_START_TIME": str(int(batch.start_s)),
    }
    if batch.restarts:
        found["SLURM_RESTART_COUNT"] = str(batch.restarts)
    if batch.end_s is not None:
        found["SLURM_JOB_END_TIME"] = str(int(batch.end_s))
    for name, word in (
        ("SLURM_JOB_ACCOUNT", "account"),
        ("SLURM_NTASKS_PER_NODE", "ntasks_per_node"),
        ("SLURM_CPUS_PER_TASK", "cpus_per_task"),
        ("SLURM_GPUS_PER_TASK", "gpus_per_task"),
        ("SLURM_MEM_PER_NODE", "mem"),
        ("SLURM_MEM_PER_CPU", "mem_per_cpu"),
    ):
        if asked.get(word):
            found[name] = _mebibytes(asked[word]) if word.startswith("mem") else asked[word]
    if node.devices:
        indices = ",".join(map(str, range(node.devices)))
        found |= {
            "SLURM_GPUS": str(sum(one.devices for one in nodes)),
            "SLURM_GPUS_ON_NODE": str(node.devices),
            "SLURM_JOB_GPUS": indices,
        }
        if len({one.devices for one in nodes}) == 1:
            found["SLURM_GPUS_PER_NODE"] = str(node.devices)
    return found | dict(batch.array)


def step_variables(batch: SlurmBatchJob, step: SlurmStep, task: int, *, host: str) -> dict[str, str]:
    """Return the variables of one task of a step. `host` is the node that started the step."""
    place, local = step.node_of(task)
    node_rank = step.nodes[place]
    first = sum(step.counts[:place])
    names = node_list(batch, step.nodes)
    found = batch_variables(batch, node_rank) | {
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(place),
        "SLURM_STEP_ID": str(step.number),
        "SLURM_STEPID": str(step.number),
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": str(len(step.nodes)),
        "SLURM_STEP_NUM_TASKS": str(step.tasks),
        "SLURM_STEP_TASKS_PER_NODE": compress_counts(step.counts),
        "SLURM_NTASKS": str(step.tasks),
        "SLURM_NPROCS": str(step.tasks),
        "SLURM_NNODES": str(len(step.nodes)),
        "SLURM_TASKS_PER_NODE": compress_counts(step.counts),
        "SLURM_NODELIST": names,
        "SLURM_GTIDS": ",".join(str(first + one) for one in range(step.counts[place])),
        "SLURM_LAUNCH_NODE_IPADDR": host,
        "SLURM_DISTRIBUTION": "block",
    }
    if step.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = step.cpus_per_task
    found.pop("ENVIRONMENT", None)
    return found


def node_list(batch: SlurmBatchJob, ranks: Sequence[int]) -> str:
    """Return node names as a Slurm host list."""
    return fold_hostlist([batch.nodes[rank].name for rank in ranks])


def compress_counts(counts: Sequence[int]) -> str:
    """Compress counts as Slurm does: `4(x2),3` for 4, 4, 3."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def expand_file_pattern(
    pattern: str, batch: SlurmBatchJob, *, node_rank: int = 0, step: int | None = None, task: int | None = None
) -> str:
    """Expand Slurm's `%j`, `%A`, `%a`, `%x`, `%u`, `%N`, `%n`, `%t`, `%s`, `%J`, `%%` in a file name; `%4j` pads with zeros. Others stay."""
    array = batch.array.get("SLURM_ARRAY_JOB_ID", batch.job_number)
    known = {
        "j": batch.job_number,
        "A": array,
        "a": batch.array.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "x": batch.name,
        "u": batch.user,
        "N": batch.nodes[node_rank].name,
        "n": str(node_rank),
        "t": str(task or 0),
        "s": "batch" if step is None else str(step),
        "J": batch.job_number if step is None else f"{batch.job_number}.{step}",
        "%": "%",
    }
    found, place = "", 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char != "%":
            found += char
            continue
        digits = ""
        while place < len(pattern) and pattern[place].isdecimal() and len(digits) < 2:
            digits += pattern[place]
            place += 1
        letter = pattern[place] if place < len(pattern) else ""
        place += 1
        value = known.get(letter)
        if value is None:
            found += f"%{digits}{letter}"
        else:
            found += value.zfill(min(10, int(digits))) if digits and value.isdigit() else value
    return found


def _mebibytes(text: str) -> str:
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
    number = text.rstrip("Bb")
    unit = number[-1:].upper()
    return str(int(int(number[:-1]) * units[unit])) if unit in units else number
