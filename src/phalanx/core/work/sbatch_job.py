"""From the options of an `#SBATCH` script to a job: nodes, tasks, devices, time, files, with Slurm's meaning of each. Pure.

The script itself runs once, on node rank 0, as Slurm runs it; `srun` in it starts the tasks. What Phalanx does not do is named in `notes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.fleet.hostlist import expand
from phalanx.core.units import GIB, MIB
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.sbatch import OPTIONS, Given, read_options

_TIME: Final = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_MEMORY: Final = re.compile(r"([0-9]{1,12})([KMGT]?)B?", re.IGNORECASE)
_GPUS: Final = re.compile(r"(?:([A-Za-z0-9_.\-]+):)?([0-9]{1,6})")
_SIGNAL: Final = re.compile(r"(?:([BR]{1,2}):)?([A-Za-z0-9]{1,12})(?:@([0-9]{1,5}))?")
_AHEAD: Final = re.compile(r"now(?:\+([0-9]{1,9})([a-z]*))?", re.IGNORECASE)
_SIGNALS: Final = {
    "HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "USR1": 10, "USR2": 12, "ALRM": 14, "TERM": 15, "CONT": 18, "STOP": 19,
    "TSTP": 20, "URG": 23, "XCPU": 24,
}  # fmt: skip
_SIGNAL_AHEAD_S: Final = (
    60  # sbatch(1): "If a sig_num is specified without any sig_time, the default time will be 60 seconds."
)
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "0", "-1")
_UNITS_S: Final = {"": 1, "seconds": 1, "second": 1, "minutes": 60, "minute": 60, "hours": 3600, "hour": 3600, "days": 86400,
                   "day": 86400, "weeks": 604800, "week": 604800}  # fmt: skip
SLURM_WORDS: Final = frozenset({
    "ntasks", "ntasks_per_node", "cpus_per_task", "gpus_per_task", "mem", "mem_per_cpu", "tasks_per_node", "output", "error",
    "open_mode", "args", "submit_dir", "submit_host", "script_name", "partition", "account", "signal", "array", "key", "export",
})  # fmt: skip
"""What a job's `slurm` may hold."""
OUTPUT_DEFAULT: Final = "slurm-%j.out"
OUTPUT_DEFAULT_ARRAY: Final = "slurm-%A_%a.out"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A script as a job.

    Attributes:
        mapping: as a job file holds it; its `slurm` is what the nodes need to know.
        notes: what is not honoured, one line each.
        partition, account: as asked, for whoever knows the queues and projects.
        export: what of the submitter's environment travels: "ALL", "NONE", or names and values.
    """

    mapping: dict[str, object]
    notes: tuple[str, ...]
    partition: str = ""
    account: str = ""
    export: str = "ALL"


@dataclass(slots=True)
class _Asked:
    """The options by name, with their lines for complaints."""

    given: Mapping[str, Given]
    notes: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        found = self.given.get(name)
        return "" if found is None else found.value.strip()

    def has(self, name: str) -> bool:
        return name in self.given

    def number(self, name: str, *, low: int = 1) -> int | None:
        text = self.text(name)
        if not text:
            return None
        if not text.isdecimal() or not low <= int(text) <= 1_000_000:
            raise self.wrong(name, f"is no number from {low} on")
        return int(text)

    def wrong(self, name: str, why: str, hint: str = "") -> BadFile:
        found = self.given[name]
        at = f"line {found.line}: " if found.line else ""
        return BadFile(f"{at}--{name}={found.value}: {why}", hint=hint)


def read_script(text: str, *, name: str, args: Sequence[str] = (), folder: str, more: Sequence[Given] = ()) -> BatchJob:
    """The job that a script asks for.

    Args:
        text: the script.
        name: its file's, for a job without one.
        args: words for the script, after its name on the command line.
        folder: absolute; where it was submitted.
        more: options that go before the script's own.

    Raises:
        BadFile: an option is wrong or unknown, with its line.
    """
    given = {one.name: one for one in (*read_options(text), *more)}
    asked = _Asked(given=given)
    asked.notes += _unmet(given)
    shape = _shape(asked)
    workdir = asked.text("chdir") or folder
    slurm: dict[str, str] = {
        **shape.slurm, **_files(asked), "args": json.dumps(list(args)), "submit_dir": folder, "script_name": name,
        "partition": asked.text("partition"), "account": asked.text("account"), "signal": _signal(asked),
        "array": asked.text("array").partition("%")[0],
    }  # fmt: skip
    mapping: dict[str, object] = {
        "name": asked.text("job-name") or name, "run": text, "tasks_per_node": 1, **shape.mapping, "time": _time(asked),
        "array": _checked(asked, "array"), "depends_on": _dependency(asked), "begin": _begin(asked), "hold": True if asked.has("hold") else None,
        "workdir": workdir if workdir.startswith("/") else f"{folder.rstrip('/')}/{workdir}",
        "reservation": asked.text("reservation") or None, "nodelist": _hosts(asked, "nodelist"), "exclude": _hosts(asked, "exclude"),
        "priority": _priority(asked), "labels": {"slurm.comment": asked.text("comment")[:256]} if asked.text("comment") else None,
        "slurm": {key: value for key, value in slurm.items() if value},
    }  # fmt: skip
    return BatchJob(
        mapping={key: value for key, value in mapping.items() if value is not None}, notes=tuple(asked.notes),
        partition=asked.text("partition").partition(",")[0], account=asked.text("account"), export=asked.text("export") or "ALL",
    )  # fmt: skip


def _unmet(given: Mapping[str, Given]) -> list[str]:
    said = []
    for one in given.values():
        why = OPTIONS[one.name].unmet
        if not why or (one.name == "input" and one.value in {"/dev/null", "none"}):
            continue
        at = f"line {one.line}: " if one.line else ""
        value = f"={one.value}" if one.value else ""
        said.append(f"{at}--{one.name}{value} is not honoured: {why}")
    return said


# ---- nodes, tasks, devices ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    mapping: dict[str, object]
    slurm: dict[str, str]


def _shape(asked: _Asked) -> _Shape:
    """How many nodes, tasks, CPUs and devices. A job that says neither nodes nor tasks is one task on one node."""
    per_node, tasks = asked.number("ntasks-per-node"), asked.number("ntasks", low=0) or None
    model, gpus_node, gpus_all, gpus_task = _devices(asked, tasks)
    nodes = _nodes(asked)
    if nodes is None and tasks is not None and per_node is not None:
        nodes = -(-tasks // per_node)
    if nodes is None and gpus_node is not None and gpus_all is not None:
        nodes = max(1, gpus_all // gpus_node)
    if gpus_all is not None and gpus_node is None and nodes is not None:
        if gpus_all % nodes:
            raise asked.wrong(
                "gpus", f"{gpus_all} GPUs do not fall into equal parts on {nodes} nodes", "give --gpus-per-node"
            )
        gpus_node = gpus_all // nodes
    count = nodes or 1
    if tasks is not None and nodes is not None and tasks < nodes:
        asked.notes.append(f"--nodes={nodes} with --ntasks={tasks}: {tasks} nodes are taken, as Slurm does")
        nodes = count = tasks
    if tasks is None:
        tasks = per_node * count if per_node is not None else count
    on_one = per_node or -(-tasks // count)
    cpus_task = asked.number("cpus-per-task")
    cpus = (cpus_task or 1) * on_one if cpus_task is not None or not (gpus_node or gpus_all) else None
    mapping: dict[str, object] = {
        "nodes": nodes,
        "cpus": cpus,
        "memory": _memory(asked, cpus or on_one, gpus_node or 0),
    }
    if gpus_node is not None:
        mapping |= {
            "nodes": count,
            "gpus": f"{model}:{count * gpus_node}" if model else count * gpus_node,
            "gpus_per_node": gpus_node,
        }
    elif gpus_all is not None:
        mapping["gpus"] = f"{model}:{gpus_all}" if model else gpus_all
    elif nodes is None:
        mapping["nodes"] = 1
    slurm = {
        "ntasks": str(tasks), "ntasks_per_node": str(per_node or ""), "cpus_per_task": str(cpus_task or ""),
        "gpus_per_task": str(gpus_task or ""), "mem": asked.text("mem"), "mem_per_cpu": asked.text("mem-per-cpu"),
        "tasks_per_node": str(on_one),
    }  # fmt: skip
    return _Shape(mapping=mapping, slurm=slurm)


def _nodes(asked: _Asked) -> int | None:
    text = asked.text("nodes")
    if not text:
        return None
    least, dash, most = text.partition("-")
    if not least.isdecimal() or int(least) < 1 or (dash and not most.isdecimal()):
        raise asked.wrong("nodes", "is neither a number of nodes nor a range")
    if dash and int(most) != int(least):
        asked.notes.append(f"--nodes={text}: {least} nodes are asked for, the least of the range")
    return int(least)


def _devices(asked: _Asked, tasks: int | None) -> tuple[str, int | None, int | None, int | None]:
    """Model, devices for each node, in all, and for each task; None for what is not said."""
    model, node, total, task = "", None, None, None
    for option in ("gpus-per-node", "gpus", "gpus-per-task"):
        if not asked.text(option):
            continue
        match = _GPUS.fullmatch(asked.text(option))
        if match is None:
            raise asked.wrong(option, "is not [TYPE:]NUMBER")
        model, number = match[1] or model, int(match[2])
        node = number if option == "gpus-per-node" else node
        total = number if option == "gpus" else total
        task = number if option == "gpus-per-task" else task
    for word in [word for word in asked.text("gres").split(",") if word and word.lower() != "none"]:
        kind, *rest = word.removeprefix("gres:").removeprefix("gres/").split(":")
        if kind != "gpu":
            asked.notes.append(f"--gres={word} is not honoured: Phalanx knows GPUs alone")
            continue
        number = int(rest[-1]) if rest and rest[-1].isdecimal() else 1
        names = [part for part in rest if not part.isdecimal()]
        model, node = (names[0] if names else model), number
    if task is not None and total is None:
        per_node = asked.number("ntasks-per-node")
        if node is None and per_node is not None:
            node = task * per_node
        elif node is None:
            total = task * (tasks or 1)
    per_gpu = asked.number("ntasks-per-gpu")
    if per_gpu is not None:
        asked.notes.append("--ntasks-per-gpu is not honoured: give --ntasks-per-node")
    return model, node or None, total or None, task


def _memory(asked: _Asked, cpus: int, gpus: int) -> str | None:
    """Memory of a node, in Slurm's units (a bare number is MiB)."""
    for option, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        text = asked.text(option)
        if not text:
            continue
        match = _MEMORY.fullmatch(text)
        if match is None:
            raise asked.wrong(option, "is no amount of memory", "write 4000 (MiB), 64G")
        if not int(match[1]):
            asked.notes.append(
                f"--{option}=0 is not honoured: a job is not granted all of a node's memory; none is asked for"
            )
            return None
        size = int(match[1]) * {"K": 1 << 10, "": MIB, "M": MIB, "G": GIB, "T": GIB << 10}[match[2].upper()]
        return f"{max(1, size * max(1, times) // MIB)}M"
    return None


# ---- time, order, files -------------------------------------------------------------------------------------------------


def seconds_of(text: str) -> int | None:
    """Slurm's times: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. None for one that is none."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    if days is not None:
        return days * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return first * 3600 + (second or 0) * 60 + third
    return first * 60 + (second or 0)


def _time(asked: _Asked) -> str | None:
    text = asked.text("time")
    if not text or text.upper() in _UNLIMITED:
        return None
    seconds = seconds_of(text)
    if not seconds:
        raise asked.wrong("time", "is no time as Slurm writes it", "minutes, HH:MM:SS or D-HH:MM:SS")
    return f"{seconds}s"


def _checked(asked: _Asked, option: str) -> str | None:
    text = asked.text(option)
    if not text:
        return None
    try:
        parse_array(text)
    except BadRequest as error:
        raise asked.wrong(option, error.message.removeprefix("array: "), error.hint) from None
    return text


def _dependency(asked: _Asked) -> list[str] | None:
    """All must hold (commas). Slurm's `?`, where one suffices, and `after` are not understood by this release."""
    text = asked.text("dependency")
    if not text:
        return None
    if "?" in text:
        raise asked.wrong(
            "dependency",
            "one of several (?) is not understood by this release",
            "write all that must hold, with commas",
        )
    words = []
    for part in text.split(","):
        kind, *ids = part.strip().split(":")
        words.append(":".join([kind, *(re.sub(r"_\*$", "", one) for one in ids)]))
    try:
        parse_dependencies(words)
    except BadRequest as error:
        raise asked.wrong("dependency", error.message.removeprefix("depends_on: "), error.hint) from None
    return words


def _begin(asked: _Asked) -> str | None:
    """Slurm's `now+1hour`, `16:00`, `2026-12-01T08:00`; the clock on the wall is for the command line to read."""
    text = asked.text("begin")
    match = _AHEAD.fullmatch(text)
    if match is None:
        if text.lower() in {"midnight", "noon", "fika", "teatime", "today", "tomorrow"}:
            raise asked.wrong(
                "begin", "words for hours are not understood by this release", "write 16:00 or 2026-12-01T08:00"
            )
        return text or None
    unit = (match[2] or "").lower()
    if unit not in _UNITS_S:
        raise asked.wrong("begin", f"{unit!r} is no unit of time", "now+2hours")
    return f"{int(match[1] or 0) * _UNITS_S[unit]}s" if match[1] else None


def _signal(asked: _Asked) -> str:
    """`who:number:seconds ahead` of `[B:]SIG[@TIME]`; who is `batch` or `steps`."""
    text = asked.text("signal")
    if not text:
        return ""
    match = _SIGNAL.fullmatch(text)
    word = "" if match is None else match[2].upper().removeprefix("SIG")
    if match is None or not (word in _SIGNALS or (word.isdecimal() and 0 < int(word) < 65)):
        raise asked.wrong("signal", "is not [B:]SIGNAL[@SECONDS]", "--signal=B:USR1@120")
    if not asked.text("time"):
        asked.notes.append("--signal comes before the end of the time limit, and the job has none: it will not come")
    number = int(word) if word.isdecimal() else _SIGNALS[word]
    return f"{'batch' if 'B' in (match[1] or '') else 'steps'}:{number}:{match[3] or _SIGNAL_AHEAD_S}"


def _files(asked: _Asked) -> dict[str, str]:
    default = OUTPUT_DEFAULT_ARRAY if asked.text("array") else OUTPUT_DEFAULT
    mode = asked.text("open-mode") or "truncate"
    if mode not in {"append", "truncate"}:
        raise asked.wrong("open-mode", "is neither append nor truncate")
    return {"output": asked.text("output") or default, "error": asked.text("error"), "open_mode": mode}


def _hosts(asked: _Asked, option: str) -> str | None:
    text = asked.text(option)
    if not text:
        return None
    try:
        return ",".join(expand(text))
    except BadRequest as error:
        raise asked.wrong(option, error.message, error.hint) from None


def _priority(asked: _Asked) -> int | None:
    """A positive --nice goes behind, a negative one ahead; Slurm's scale is a thousand times ours."""
    if not asked.has("nice"):
        return None
    text = asked.text("nice") or "100"
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise asked.wrong("nice", "is no whole number")
    return max(-10_000, min(10_000, -int(text)))
