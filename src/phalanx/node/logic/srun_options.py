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
from phalanx.node.logic.slurm_variables import SlurmBatchJob, SlurmStep, tasks_per_node

_VALUES: Final = {
    "ntasks": "n",
    "nodes": "N",
    "ntasks-per-node": "",
    "cpus-per-task": "c",
    "nodelist": "w",
    "exclude": "x",
    "output": "o",
    "error": "e",
    "chdir": "D",
    "export": "",
    "gpus-per-task": "",
    "job-name": "J",
    "wait": "W",
}
_FLAGS: Final = {
    "label": "l",
    "unbuffered": "u",
    "quiet": "Q",
    "verbose": "v",
    "exact": "",
    "overlap": "",
    "no-kill": "k",
}
_OPTIONAL_VALUE: Final = {"kill-on-bad-exit": "K", "exclusive": ""}
_NOT_BOUND: Final = "tasks are not bound to their own cores or devices"
_WHOLE_MEMORY: Final = "a step can use all memory of the job"
_ALL_DEVICES: Final = "a step sees all devices of the job"
_CLOCKS: Final = "clock rates are not changed"
_SAMPLED: Final = "devices are always sampled"
_IGNORED: Final = {
    "cpu-bind": _NOT_BOUND,
    "mem-bind": _NOT_BOUND,
    "gpu-bind": _NOT_BOUND,
    "hint": _NOT_BOUND,
    "threads-per-core": _NOT_BOUND,
    "ntasks-per-core": _NOT_BOUND,
    "ntasks-per-socket": _NOT_BOUND,
    "cores-per-socket": _NOT_BOUND,
    "sockets-per-node": _NOT_BOUND,
    "distribution": "tasks are placed node by node (block)",
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
    "m": "distribution",
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
_REFUSED: Final = {
    "pty": "use phalanx shell JOB",
    "multi-prog": "start each program with its own srun",
    "bcast": "copy the file first",
    "het-group": "heterogeneous jobs are not supported",
    "jobid": "a step runs in the job that starts it",
    "container": "the job already has its image",
    "x11": "there is no display",
    "preserve-env": "use -n and -N",
}
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


def parse_srun(words: Sequence[str]) -> SrunRequest:
    """Parse options and command.

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
        if name in _REFUSED:
            raise BadRequest(f"--{name} is not supported here", hint=_REFUSED[name])
        if name == "mpi":
            if value not in {"none", ""}:
                raise BadRequest(
                    f"--mpi={value} is not supported here", hint='start MPI by mpirun --hostfile "$PHALANX_HOSTFILE"'
                )
        elif name in _IGNORED:
            notes.append(f"--{name}{f'={value}' if value else ''} is ignored: {_IGNORED[name]}")
        else:
            given[name] = value
    if not left:
        raise BadRequest("no command given", hint="srun [options] program [arguments]")
    return SrunRequest(command=tuple(left), options=given, notes=tuple(notes))


def plan_step(asked: SrunRequest, batch: SlurmBatchJob, number: int) -> SlurmStep:
    """Choose the nodes, and the number of tasks on each.

    Raises:
        BadRequest: more nodes than the job has, nodes it does not have, or a number of tasks that does not fit them.
    """
    ranks = list(range(len(batch.nodes)))
    names = {
        name: rank
        for rank, node in enumerate(batch.nodes)
        for name in (step_hostname(batch, rank), node.address, node.name)
    }
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
    )


def step_hostname(batch: SlurmBatchJob, rank: int) -> str:
    """Return the name that `scontrol show hostnames` prints for a node, under which it is reachable.

    Virtual nodes share one loopback network, where every 127.x address works.
    """
    address = batch.nodes[rank].address
    return f"127.0.{(rank + 1) >> 8}.{(rank + 1) & 255}" if address.startswith("127.") else batch.nodes[rank].name


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


def _rank(names: Mapping[str, int], name: str) -> int:
    if name not in names:
        raise BadRequest(f"{name} is not a node of this job", hint="scontrol show hostnames lists them")
    return names[name]


def _split(word: str, left: list[str]) -> tuple[str, str]:
    """Return long name and value of an option; the value may be the next word."""
    known = {**_VALUES, **_FLAGS, **_OPTIONAL_VALUE}
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if name not in known and name not in _IGNORED and name not in _REFUSED and name != "mpi":
            near = nearest_match(name, [*known, *_IGNORED])
            raise BadRequest(
                f"srun has no option --{name}", hint=f"did you mean --{near}?" if near else "man srun lists them"
            )
        if not equals and name not in _FLAGS and name not in _WITHOUT_VALUE and left:
            value = left.pop(0)
        return name, value
    letters = {short: name for name, short in known.items() if short} | _IGNORED_SHORT
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
