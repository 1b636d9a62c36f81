"""What an `srun` line asks for, and which of its options are not done here. Pure.

Source: srun(1) of Slurm 22.05. Options end at the first word that is none: what follows is the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.fleet.hostlist import expand
from phalanx.core.work.nearest import nearest
from phalanx.node.logic.slurm_variables import Batch, Step, spread

_VALUES: Final = {
    "ntasks": "n", "nodes": "N", "ntasks-per-node": "", "cpus-per-task": "c", "nodelist": "w", "exclude": "x", "output": "o", "error": "e",
    "chdir": "D", "export": "", "gpus-per-task": "", "job-name": "J", "wait": "W",
}  # fmt: skip
_FLAGS: Final = {
    "label": "l",
    "unbuffered": "u",
    "quiet": "Q",
    "verbose": "v",
    "exact": "",
    "overlap": "",
    "no-kill": "k",
}
_MAYBE: Final = {"kill-on-bad-exit": "K", "exclusive": ""}
_NOT_BOUND: Final = "tasks are not bound to cores or devices of their own"
_UNMET: Final = {
    "cpu-bind": _NOT_BOUND, "mem-bind": _NOT_BOUND, "gpu-bind": _NOT_BOUND, "hint": _NOT_BOUND, "threads-per-core": _NOT_BOUND,
    "ntasks-per-core": _NOT_BOUND, "ntasks-per-socket": _NOT_BOUND, "cores-per-socket": _NOT_BOUND, "sockets-per-node": _NOT_BOUND,
    "distribution": "tasks go node by node (block)", "mem": "a step takes what the job has", "mem-per-cpu": "a step takes what the job has",
    "mem-per-gpu": "a step takes what the job has", "time": "a step ends with its job", "gpus": "a step sees the job's devices",
    "gpus-per-node": "a step sees the job's devices", "gres": "a step sees the job's devices", "ntasks-per-gpu": "give --ntasks-per-node",
    "partition": "the job has its place", "account": "the job has its account", "qos": "the job has its queue",
    "constraint": "the job has its nodes", "open-mode": "files are begun anew", "task-prolog": "not run", "task-epilog": "not run",
    "prolog": "not run", "epilog": "not run", "input": "tasks read nothing", "cpu-freq": "clocks are left alone", "comment": "not kept",
    "network": "left alone", "propagate": "limits are the node's", "profile": "devices are sampled anyway", "acctg-freq": "devices are sampled anyway",
    "slurmd-debug": "there is no slurmd", "immediate": "the job has its nodes", "gpu-freq": "clocks are left alone", "msg-timeout": "not needed",
    "relative": "give --nodelist", "reservation": "the job has its nodes", "tres-per-task": "give --gpus-per-task", "compress": "files are not sent",
}  # fmt: skip
_UNMET_SHORT: Final = {"m": "distribution", "t": "time", "G": "gpus", "p": "partition", "A": "account", "C": "constraint", "i": "input",
                       "q": "qos", "r": "relative", "I": "immediate"}  # fmt: skip
_REFUSED: Final = {
    "pty": "use phalanx shell JOB", "multi-prog": "start the programs by separate sruns", "bcast": "copy the file first",
    "het-group": "jobs are not heterogeneous here", "jobid": "a step runs in the job that starts it", "container": "the job has its image",
    "x11": "there is no display", "preserve-env": "give -n and -N",
}  # fmt: skip
_ALONE: Final = frozenset({"pty", "multi-prog", "x11", "preserve-env", "exclusive", "kill-on-bad-exit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Srun:
    """One line, read.

    Attributes:
        given: by long name.
        notes: what is not done, one line each.
    """

    command: tuple[str, ...]
    given: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())

    def number(self, name: str) -> int | None:
        """A whole number from 1 on.

        Raises:
            BadRequest: it is none.
        """
        text = self.given.get(name)
        if text is None:
            return None
        least = text.partition("-")[0] if name == "nodes" else text
        if not least.isdecimal() or not int(least):
            raise BadRequest(f"--{name}={text} is no number")
        return int(least)


def read_srun(words: Sequence[str]) -> Srun:
    """Options and command.

    Raises:
        BadRequest: an unknown option, one that cannot be done here, or no command.
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
            raise BadRequest(f"--{name} cannot be done here", hint=_REFUSED[name])
        if name == "mpi":
            if value not in {"none", ""}:
                raise BadRequest(
                    f"--mpi={value} cannot be done here: srun starts no MPI",
                    hint='mpirun --hostfile "$PHALANX_HOSTFILE" does',
                )
        elif name in _UNMET:
            notes.append(f"--{name}{f'={value}' if value else ''} is not honoured: {_UNMET[name]}")
        else:
            given[name] = value
    if not left:
        raise BadRequest("srun: there is no command", hint="srun [options] program [arguments]")
    return Srun(command=tuple(left), given=given, notes=tuple(notes))


def step_of(asked: Srun, batch: Batch, number: int) -> Step:
    """Which nodes, and how many tasks on each.

    Raises:
        BadRequest: more nodes than the job has, nodes it does not have, or a number of tasks that does not fit them.
    """
    ranks = list(range(len(batch.nodes)))
    names = {
        name: rank
        for rank, node in enumerate(batch.nodes)
        for name in (shown_address(batch, rank), node.address, node.name)
    }
    if "nodelist" in asked.given:
        ranks = [_rank(names, name) for name in expand(asked.given["nodelist"])]
    if "exclude" in asked.given:
        out = {_rank(names, name) for name in expand(asked.given["exclude"])}
        ranks = [rank for rank in ranks if rank not in out]
    nodes, tasks = asked.number("nodes"), asked.number("ntasks")
    per_node = asked.number("ntasks-per-node")
    if nodes is not None and nodes > len(ranks):
        raise BadRequest(f"--nodes={nodes}: the job has {len(ranks)} for it")
    if nodes is None and tasks is not None and per_node is not None:
        nodes = -(-tasks // per_node)
    ranks = ranks[: nodes or len(ranks)]
    default = int(batch.asked.get("ntasks_per_node") or 0) or None
    if tasks is None and per_node is not None:
        tasks = per_node * len(ranks)
    if tasks is None:
        whole = len(ranks) == len(batch.nodes)
        tasks = batch.ntasks if whole else (default or max(1, batch.ntasks // len(batch.nodes))) * len(ranks)
    ranks = ranks[: min(len(ranks), tasks)]
    try:
        counts = spread(tasks, len(ranks), per_node or (default if tasks <= (default or 0) * len(ranks) else None))
    except ValueError as error:
        raise BadRequest(f"srun: {error}") from None
    return Step(
        number=number, nodes=tuple(ranks), counts=counts,
        cpus_per_task=asked.given.get("cpus-per-task") or batch.asked.get("cpus_per_task", ""),
    )  # fmt: skip


def shown_address(batch: Batch, rank: int) -> str:
    """What `scontrol show hostnames` says of a node: where it can be reached. Virtual nodes share one loopback, whose every address works."""
    address = batch.nodes[rank].address
    return f"127.0.{(rank + 1) >> 8}.{(rank + 1) & 255}" if address.startswith("127.") else batch.nodes[rank].name


def exported(words: str, here: Mapping[str, str]) -> dict[str, str]:
    """The environment that `--export` lets through: ALL, NONE, names, NAME=value."""
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
        raise BadRequest(f"{name} is no node of this job", hint="scontrol show hostnames lists them")
    return names[name]


def _split(word: str, left: list[str]) -> tuple[str, str]:
    """Long name and value of an option; takes the next word where the value stands there."""
    known = {**_VALUES, **_FLAGS, **_MAYBE}
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if name not in known and name not in _UNMET and name not in _REFUSED and name != "mpi":
            near = nearest(name, [*known, *_UNMET])
            raise BadRequest(
                f"srun has no option --{name}", hint=f"did you mean --{near}?" if near else "man srun lists them"
            )
        if not equals and name not in _FLAGS and name not in _ALONE and left:
            value = left.pop(0)
        return name, value
    letters = {short: name for name, short in known.items() if short} | _UNMET_SHORT
    name = letters.get(word[1], "")
    if not name:
        raise BadRequest(f"srun has no option -{word[1]}", hint="man srun lists them")
    value = word[2:].removeprefix("=")
    if name in _FLAGS and value:
        left.insert(0, f"-{value}")
        value = ""
    elif not value and name not in _FLAGS and name not in _ALONE and left:
        value = left.pop(0)
    return name, value
