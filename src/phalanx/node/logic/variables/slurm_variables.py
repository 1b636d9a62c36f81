"""Build the `SLURM_*` variables of a batch script and of the tasks that `srun` starts in it. Pure.

Source: sbatch(1) and srun(1) of Slurm 22.05, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from phalanx.core.fleet.hostlist import fold_hostlist


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmBatchNode:
    """One node of the job. `address`: where other nodes reach it; `devices`: how many the job has there; `indices`: which, by number."""

    name: str
    address: str
    devices: int
    cpus: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmBatchJob:
    """One attempt of a batch script.

    Attributes:
        job_number: the job's number; for an element of an array its own, not the array's.
        options: the job's `slurm` options.
        array: SLURM_ARRAY_* variables; empty without an array.
        components: of a heterogeneous job, each as a job of its own with its nodes and options; empty for any other job.
        first_rank: of a component, the rank of its first node in the job.
    """

    job_number: str
    name: str
    nodes: tuple[SlurmBatchNode, ...]
    options: Mapping[str, str]
    user: str
    uid: int
    gid: int = 0
    cluster: str = "phalanx"
    array: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    end_s: float | None = None
    start_s: float = 0.0
    components: tuple[SlurmBatchJob, ...] = ()
    first_rank: int = 0

    @property
    def ntasks(self) -> int:
        """Tasks of the whole job."""
        return int(self.options.get("ntasks") or len(self.nodes))

    @property
    def says_ntasks(self) -> bool:
        """Whether the script gave a number of tasks; Lightning takes a script with SLURM_NTASKS for a task of srun."""
        return self.options.get("ntasks_given", "1") == "1"

    @property
    def asks_for_gpus(self) -> bool:
        """Whether the script requested GPUs, not only whole nodes that have some."""
        return self.options.get("gpus_wanted", "1" if any(node.devices for node in self.nodes) else "") == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One `srun`: `counts` tasks on each of `nodes` (node ranks). `cyclic`: task 0 on the first node, task 1 on the second ... `mpi`: of --mpi."""

    number: int
    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    cpus_per_task: str = ""
    cyclic: bool = False
    mpi: str = ""

    @property
    def tasks(self) -> int:
        """Number of all tasks."""
        return sum(self.counts)

    @property
    def distribution(self) -> str:
        """The word for how tasks are laid out. Slurm calls at most one task for each node cyclic, where the two are the same."""
        return "cyclic" if self.cyclic or self.tasks <= len(self.nodes) else "block"

    def node_of(self, task: int) -> tuple[int, int]:
        """Return a task's index in `nodes` and its local id.

        Raises:
            IndexError: there is no such task.
        """
        if self.cyclic:
            for place in range(len(self.nodes)):
                mine = self.tasks_on(place)
                if task in mine:
                    return place, mine.index(task)
            raise IndexError(task)
        for place, count in enumerate(self.counts):
            if task < count:
                return place, task
            task -= count
        raise IndexError(task)

    def tasks_on(self, place: int) -> Sequence[int]:
        """Return the tasks of one node, by its index in `nodes`, in ascending order."""
        if not self.cyclic:
            first = sum(self.counts[:place])
            return range(first, first + self.counts[place])
        rounds = range(max(self.counts))
        order = [one for turn in rounds for one, count in enumerate(self.counts) if turn < count]
        return [task for task, one in enumerate(order) if one == place]


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
    found = {
        "SLURM_JOB_ID": batch.job_number,
        "SLURM_JOBID": batch.job_number,
        "SLURM_JOB_NAME": batch.name,
        "SLURM_CLUSTER_NAME": batch.cluster,
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_TASKS_PER_NODE": compress_counts(_batch_counts(batch)),
        "SLURM_JOB_CPUS_PER_NODE": compress_counts([one.cpus for one in nodes]),
        "SLURM_CPUS_ON_NODE": str(node.cpus),
        "SLURM_SUBMIT_DIR": asked.get("submit_dir", ""),
        "SLURM_SUBMIT_HOST": asked.get("submit_host", ""),
        "SLURM_JOB_PARTITION": asked.get("partition") or batch.cluster,
        "SLURM_JOB_USER": batch.user,
        "SLURM_JOB_UID": str(batch.uid),
        "SLURM_JOB_GID": str(batch.gid),
        "SLURM_NODEID": str(node_rank),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_PRIO_PROCESS": "0",
        "SLURMD_NODENAME": node.name,
        "SLURM_TOPOLOGY_ADDR": node.name,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "ENVIRONMENT": "BATCH",
        "SLURM_JOB_START_TIME": str(int(batch.start_s)),
    }
    if batch.says_ntasks:
        found |= {"SLURM_NTASKS": str(batch.ntasks), "SLURM_NPROCS": str(batch.ntasks)}
    if batch.restarts:
        found["SLURM_RESTART_COUNT"] = str(batch.restarts)
    if batch.end_s is not None:
        found["SLURM_JOB_END_TIME"] = str(int(batch.end_s))
    for name, word in OPTION_VARIABLES.items():
        if asked.get(word):
            found[name] = _mebibytes(asked[word]) if word.startswith("mem") else asked[word]
    if asked.get("export", "").upper() == "NONE":
        found["SLURM_GET_USER_ENV"] = "1"
    elif asked.get("export", "").upper() == "ALL":  # the default, which Slurm does not repeat
        del found["SLURM_EXPORT_ENV"]
    if asked.get("hint") == "nomultithread":
        found.setdefault("SLURM_THREADS_PER_CORE", "1")
    return found | gpu_variables(batch, node_rank) | dict(batch.array)


OPTION_VARIABLES: Final = {
    "SLURM_JOB_ACCOUNT": "account",
    "SLURM_JOB_DEPENDENCY": "dependency",
    "SLURM_JOB_RESERVATION": "reservation",
    "SLURM_NTASKS_PER_NODE": "ntasks_per_node",
    "SLURM_CPUS_PER_TASK": "cpus_per_task",
    "SLURM_CPUS_PER_GPU": "cpus_per_gpu",
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus_per_node",
    "SLURM_GPUS_PER_TASK": "gpus_per_task",
    "SLURM_MEM_PER_NODE": "mem",
    "SLURM_MEM_PER_CPU": "mem_per_cpu",
    "SLURM_MEM_PER_GPU": "mem_per_gpu",
    "SLURM_EXPORT_ENV": "export",
    "SLURM_HINT": "hint",
    "SLURM_THREADS_PER_CORE": "threads_per_core",
}
"""Variables that repeat an option of the script, as written; memory in MiB."""


def _batch_counts(batch: SlurmBatchJob) -> Sequence[int]:
    """Tasks of each node, as the script sees them: without a number of tasks, as many as its CPUs allow, like Slurm."""
    asked, nodes = batch.options, batch.nodes
    if not batch.says_ntasks:
        return [max(1, node.cpus // int(asked.get("cpus_per_task") or 1)) for node in nodes]
    per_node = int(asked["ntasks_per_node"]) if asked.get("ntasks_per_node") else None
    try:
        return tasks_per_node(batch.ntasks, len(nodes), per_node)
    except ValueError:
        return (1,) * len(nodes)


def gpu_variables(batch: SlurmBatchJob, node_rank: int, *, step: bool = False) -> dict[str, str]:
    """Return the variables that name the job's devices on a node by their numbers; none without devices."""
    node = batch.nodes[node_rank]
    if not node.devices:
        return {}
    indices = ",".join(map(str, node.indices or range(node.devices)))
    if not batch.asks_for_gpus:
        return {"SLURM_JOB_GPUS": indices}
    found = {"SLURM_JOB_GPUS": indices, "SLURM_GPUS_ON_NODE": str(node.devices), "ROCR_VISIBLE_DEVICES": indices}
    return found | {"SLURM_STEP_GPUS": indices} if step else found


def step_variables(
    batch: SlurmBatchJob, step: SlurmStep, task: int, *, host: str, label: bool = False, umask: int = 0o022
) -> dict[str, str]:
    """Return the variables of one task of a step. `host` is the node that started the step; `label`: lines begin with the task's number."""
    place, local = step.node_of(task)
    node_rank = step.nodes[place]
    names = node_list(batch, step.nodes)
    found = (
        batch_variables(batch, node_rank)
        | gpu_variables(batch, node_rank, step=True)
        | {
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
            "SLURM_GTIDS": ",".join(map(str, step.tasks_on(place))),
            "SLURM_LAUNCH_NODE_IPADDR": host,
            "SLURM_DISTRIBUTION": step.distribution,
            "SLURM_UMASK": f"{umask:04o}",
        }
    )
    if step.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = step.cpus_per_task
    if step.mpi:
        found["SLURM_MPI_TYPE"] = step.mpi
    if label:
        found["SLURM_LABELIO"] = "1"
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
