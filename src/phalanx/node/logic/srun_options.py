"""Parse an `srun` command line, and note the options that are not supported here. Pure.

Source: srun(1) of Slurm 22.05. Options end at the first other word, where the command begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.work.nearest_match import nearest_match
from phalanx.node.logic.step_containers import CONTAINER_FLAGS, CONTAINER_OPTIONS
from phalanx.node.logic.variables.slurm_variables import SlurmBatchJob, SlurmStep, tasks_per_node

# long name -> short name, and what it does here
_VALUES: Final = {
    "ntasks": ("n", "tasks of the step"),
    "nodes": ("N", "nodes of the step; of a range the lower end"),
    "ntasks-per-node": ("", "tasks of each node"),
    "cpus-per-task": ("c", "`SLURM_CPUS_PER_TASK`"),
    "nodelist": ("w", "these nodes"),
    "exclude": ("x", "not these nodes"),
    "output": ("o", "file of the output, one for each task with `%t`"),
    "error": ("e", "file of the error output"),
    "chdir": ("D", "working directory"),
    "export": ("", "which variables are passed"),
    "gpus-per-task": ("", "each task sees only its own GPUs"),
    "het-group": (
        "",
        "the components of a heterogeneous job on which it starts tasks, such as `0,1`; without it, component 0",
    ),
    "job-name": ("J", "accepted"),
    "wait": ("W", "accepted: `srun` waits for all tasks"),
    "jobid": ("", "the job itself, as in `--jobid=$SLURM_JOB_ID`"),
    "distribution": ("m", "`block` or `cyclic`; other words mean block"),
    "gres-flags": ("", "accepted"),
    "accel-bind": ("", "accepted"),
    "mpi": (
        "",
        "`none`: no MPI world; with all others and without it, ranks find PMI-1 (MPICH, Intel MPI) and PMIx (Open MPI); `list`",
    ),
    **{name: ("", does) for name, does in CONTAINER_OPTIONS.items()},
}
_FLAGS: Final = {
    "label": ("l", "the task's number before each line"),
    "unbuffered": ("u", "output is passed on at once"),
    "quiet": ("Q", "accepted"),
    "verbose": ("v", "accepted"),
    "exact": ("", "accepted"),
    "overlap": ("", "always so: steps share the job's CPUs and devices"),
    "no-kill": ("k", "accepted"),
    **{name: ("", does) for name, does in CONTAINER_FLAGS.items()},
}
_OPTIONAL_VALUE: Final = {
    "kill-on-bad-exit": ("K", "a task that fails ends the others"),
    "exclusive": ("", "accepted: steps share the job's CPUs and devices"),
}
_MPI_TYPES: Final = ("none", "pmi2", "pmix", "pmix_v2", "pmix_v3", "pmix_v4", "pmix_v5", "openmpi", "list")
_ALIASES: Final = {"tasks-per-node": "ntasks-per-node", "pack-group": "het-group"}
_NOT_BOUND: Final = "tasks are not bound to their own cores or devices"
_WHOLE_MEMORY: Final = "a step can use all memory of the job"
_ALL_DEVICES: Final = "a step sees all devices of the job"
_CLOCKS: Final = "clock rates are not changed"
_SAMPLED: Final = "devices are always sampled"
IGNORED_SRUN_OPTIONS: Final = {
    "cpus-per-gpu": "a step can use all CPUs of the job",
    "cpu-bind": _NOT_BOUND,
    "mem-bind": _NOT_BOUND,
    "gpu-bind": _NOT_BOUND,
    "hint": _NOT_BOUND,
    "threads-per-core": _NOT_BOUND,
    "ntasks-per-core": _NOT_BOUND,
    "ntasks-per-socket": _NOT_BOUND,
    "cores-per-socket": _NOT_BOUND,
    "sockets-per-node": _NOT_BOUND,
    "mem": _WHOLE_MEMORY,
    "mem-per-cpu": _WHOLE_MEMORY,
    "mem-per-gpu": _WHOLE_MEMORY,
    "time": "a step ends with its job",
    "gpus": _ALL_DEVICES,
    "gpus-per-node": _ALL_DEVICES,
    "gres": _ALL_DEVICES,
    "ntasks-per-gpu": "use --ntasks-per-node",
    "partition": "the job already has its nodes",
    "account": "the job already has its account",
    "qos": "the job already has its queue",
    "constraint": "the job already has its nodes",
    "open-mode": "files are overwritten",
    "task-prolog": "not run",
    "task-epilog": "not run",
    "prolog": "not run",
    "epilog": "not run",
    "input": "tasks have no standard input",
    "cpu-freq": _CLOCKS,
    "comment": "not stored",
    "network": "ignored",
    "propagate": "the node's limits apply",
    "profile": _SAMPLED,
    "acctg-freq": _SAMPLED,
    "slurmd-debug": "there is no slurmd",
    "immediate": "the job already has its nodes",
    "gpu-freq": _CLOCKS,
    "msg-timeout": "not needed",
    "relative": "use --nodelist",
    "reservation": "the job already has its nodes",
    "tres-per-task": "use --gpus-per-task",
    "compress": "files are not sent",
}
_IGNORED_SHORT: Final = {
    "t": "time",
    "G": "gpus",
    "p": "partition",
    "A": "account",
    "C": "constraint",
    "i": "input",
    "q": "qos",
    "r": "relative",
    "I": "immediate",
}
REFUSED_SRUN_OPTIONS: Final = {
    "pty": "use phalanx shell JOB",
    "multi-prog": "start each program with its own srun",
    "bcast": "copy the file first",
    "container": "OCI bundles are not supported; --container-image names an image",
    "container-save": "build the image before",
    "x11": "there is no display",
    "preserve-env": "use -n and -N",
}
HONOURED_SRUN_OPTIONS: Final = {**_VALUES, **_FLAGS, **_OPTIONAL_VALUE}
"""Long name -> short name, and what the option does here."""
_WITHOUT_VALUE: Final = frozenset({"pty", "multi-prog", "x11", "preserve-env", "exclusive", "kill-on-bad-exit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SrunRequest:
    """A parsed srun line.

    Attributes:
        options: option values by long name.
        notes: one line for each option that is not supported.
    """

    command: tuple[str, ...]
    options: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())

    def number(self, name: str) -> int | None:
        """Return an option's value as a whole number of at least 1.

        Raises:
            BadRequest: it is not one.
        """
        text = self.options.get(name)
        if text is None:
            return None
        least = text.partition("-")[0] if name == "nodes" else text
        if not least.isdecimal() or not int(least):
            raise BadRequest(f"--{name}={text}: the value must be a whole number, 1 or more")
        return int(least)


def parse_srun(words: Sequence[str], command: Sequence[str] = ()) -> SrunRequest:
    """Parse options and command; without a command it is `command`, if that is given.

    Raises:
        BadRequest: an unknown option, one that is refused here, or no command.
    """
    given: dict[str, str] = {}
    notes: list[str] = []
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        name, value = _split(word, left)
        if name in REFUSED_SRUN_OPTIONS:
            raise BadRequest(f"--{name} is not supported here", hint=REFUSED_SRUN_OPTIONS[name])
        if name == "mpi" and value not in _MPI_TYPES:
            raise BadRequest(f"--mpi={value} is not supported here", hint="srun --mpi=list, or mpirun PROGRAM")
        if (name, value) == ("input", "none"):  # as here anyway; Hydra gives it when it starts its daemons
            continue
        if name in IGNORED_SRUN_OPTIONS:
            notes.append(f"--{name}{f'={value}' if value else ''} is ignored: {IGNORED_SRUN_OPTIONS[name]}")
        else:
            given[name] = value
    left = left or list(command)
    if not left and given.get("mpi") != "list":
        raise BadRequest("no command given", hint="srun [options] program [arguments]")
    return SrunRequest(command=tuple(left), options=given, notes=tuple(notes))


def plan_step(asked: SrunRequest, batch: SlurmBatchJob, number: int) -> SlurmStep:
    """Choose the nodes, and the number of tasks on each.

    Raises:
        BadRequest: more nodes than the job has, nodes it does not have, or a number of tasks that does not fit them.
    """
    wanted = asked.options.get("jobid", batch.job_number)
    if wanted not in {batch.job_number, batch.array.get("SLURM_ARRAY_JOB_ID", "")}:
        raise BadRequest(
            f"--jobid={wanted}: a step runs in the job that starts it, which is {batch.job_number}",
            hint=f"phalanx exec {wanted} runs a command beside another job",
        )
    ranks = list(range(len(batch.nodes)))
    names = _ranks_by_name(batch)
    if "nodelist" in asked.options:
        ranks = [_rank(names, name) for name in expand_hostlist(asked.options["nodelist"])]
    if "exclude" in asked.options:
        out = {_rank(names, name) for name in expand_hostlist(asked.options["exclude"])}
        ranks = [rank for rank in ranks if rank not in out]
    nodes, tasks = asked.number("nodes"), asked.number("ntasks")
    per_node = asked.number("ntasks-per-node")
    if nodes is not None and nodes > len(ranks):
        raise BadRequest(f"--nodes={nodes}, but the job has {len(ranks)} to choose from")
    if nodes is None and tasks is not None and per_node is not None:
        nodes = -(-tasks // per_node)
    ranks = ranks[: nodes or len(ranks)]
    default = int(batch.options.get("ntasks_per_node") or 0) or None
    if tasks is None and per_node is not None:
        tasks = per_node * len(ranks)
    if tasks is None:
        whole = len(ranks) == len(batch.nodes)
        tasks = batch.ntasks if whole else (default or max(1, batch.ntasks // len(batch.nodes))) * len(ranks)
    ranks = ranks[: min(len(ranks), tasks)]
    try:
        counts = tasks_per_node(
            tasks, len(ranks), per_node or (default if tasks <= (default or 0) * len(ranks) else None)
        )
    except ValueError as error:
        raise BadRequest(f"{error}") from None
    return SlurmStep(
        number=number,
        nodes=tuple(ranks),
        counts=counts,
        cpus_per_task=asked.options.get("cpus-per-task") or batch.options.get("cpus_per_task", ""),
        mpi=asked.options.get("mpi", ""),
        cyclic=(asked.options.get("distribution") or batch.options.get("distribution", "")).startswith("cyclic"),
    )


def step_hostname(batch: SlurmBatchJob, rank: int) -> str:
    """Return the name that `scontrol show hostnames` prints for a node, under which it is reachable.

    Virtual nodes share one loopback network, where every 127.x address works.
    """
    address, number = batch.nodes[rank].address, batch.first_rank + rank + 1
    return f"127.0.{number >> 8}.{number & 255}" if address.startswith("127.") else batch.nodes[rank].name


def exported_environment(words: str, here: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that `--export` passes: ALL, NONE, names, NAME=value."""
    parts = [part for part in words.split(",") if part]
    if not parts:
        return dict(here)
    found = dict(here) if "ALL" in parts else {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            found[name] = value
        elif name in here:
            found[name] = here[name]
    for name in ("PATH", "HOME", "USER"):
        if name in here:
            found.setdefault(name, here[name])
    return found


def _ranks_by_name(batch: SlurmBatchJob) -> dict[str, int]:
    """Return the rank of each node by the names it has: virtual nodes share one address, which then means the first of them."""
    found = {step_hostname(batch, rank): rank for rank in range(len(batch.nodes))}
    for rank, node in enumerate(batch.nodes):
        found.setdefault(node.name, rank)
        found.setdefault(node.address, rank)
    return found


def _rank(names: Mapping[str, int], name: str) -> int:
    if name not in names:
        raise BadRequest(f"{name} is not a node of this job", hint="scontrol show hostnames lists them")
    return names[name]


def _split(word: str, left: list[str]) -> tuple[str, str]:
    """Return long name and value of an option; the value may be the next word."""
    known = HONOURED_SRUN_OPTIONS
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = _ALIASES.get(name, name)
        if name not in known and name not in IGNORED_SRUN_OPTIONS and name not in REFUSED_SRUN_OPTIONS:
            near = nearest_match(name, [*known, *IGNORED_SRUN_OPTIONS])
            raise BadRequest(
                f"srun has no option --{name}", hint=f"did you mean --{near}?" if near else "man srun lists them"
            )
        if not equals and name not in _FLAGS and name not in _WITHOUT_VALUE and left:
            value = left.pop(0)
        return name, value
    letters = {short: name for name, (short, _) in known.items() if short} | _IGNORED_SHORT
    name = letters.get(word[1], "")
    if not name:
        raise BadRequest(f"srun has no option -{word[1]}", hint="man srun lists them")
    value = word[2:].removeprefix("=")
    if name in _FLAGS and value:
        left.insert(0, f"-{value}")
        value = ""
    elif not value and name not in _FLAGS and name not in _WITHOUT_VALUE and left:
        value = left.pop(0)
    return name, value
