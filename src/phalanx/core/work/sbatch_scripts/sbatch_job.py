"""Maps the options of an `#SBATCH` script to a job: nodes, tasks, devices, time and files, with Slurm's meaning of each. Pure.

The script runs once, on node rank 0, as in Slurm; `srun` in it starts the tasks. Options that Phalanx does not honour are listed in `notes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.fleet.hostlist import expand_hostlist
from phalanx.core.units import GIB, MIB
from phalanx.core.work.array import parse_array
from phalanx.core.work.dependency import parse_dependencies
from phalanx.core.work.sbatch_scripts.sbatch import SBATCH_OPTIONS, ParsedOption, parse_script_options

_TIME: Final = re.compile(r"(?:([0-9]{1,5})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_MEMORY: Final = re.compile(r"([0-9]{1,12})([KMGT]?)B?", re.IGNORECASE)
_LICENCE: Final = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)(?:@[A-Za-z0-9_.-]+)?(?::([0-9]{1,7}))?")
_SHARES: Final = {"mps": "mps", "shard": "time"}  # how Slurm's generic resources share a GPU; it does not fence shards
SHARDS_PER_GPU: Final = 4  # a number that sites choose in gres.conf
# A Slurm feature that names a GPU model, with its memory perhaps: a100, h100_80gb, gb200, mi300x, rtx6000. Other features are names of a site's own.
_GPU_FEATURE: Final = re.compile(
    r"(?:[ahbptv][0-9]{2,4}[a-z]?|[lt][0-9]{1,2}[a-z]?|g[hb][0-9]{3}|mi[0-9]{2,3}[a-z]?|rtx[a-z0-9]+)(?:[-_][0-9]{2,3}gb?)?"
)
_GPUS: Final = re.compile(r"(?:([A-Za-z0-9_.+\-]+):)?([0-9]{1,6})")
_MIG_TYPE: Final = re.compile(r"(?:([a-z0-9_.-]*?)[_.-])?([0-9]{1,2}g\.[0-9]{1,4}gb(?:\+me)?)")
_TYPE_MEMORY: Final = re.compile(r"[0-9]{1,4}gb")
_SIGNAL: Final = re.compile(r"(?:([BR]{1,2}):)?([A-Za-z0-9]{1,12})(?:@([0-9]{1,5}))?")
_RELATIVE: Final = re.compile(r"now(?:\+([0-9]{1,9})([a-z]*))?", re.IGNORECASE)
_SIGNALS: Final = {
    "HUP": 1,
    "INT": 2,
    "QUIT": 3,
    "ABRT": 6,
    "KILL": 9,
    "USR1": 10,
    "USR2": 12,
    "ALRM": 14,
    "TERM": 15,
    "CONT": 18,
    "STOP": 19,
    "TSTP": 20,
    "URG": 23,
    "XCPU": 24,
}
# Sbatch(1): "If a sig_num is specified without any sig_time, the default time will be 60 seconds."
_SIGNAL_LEAD_S: Final = 60
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "0", "-1")
_UNITS_S: Final = {
    "": 1,
    "seconds": 1,
    "second": 1,
    "minutes": 60,
    "minute": 60,
    "hours": 3600,
    "hour": 3600,
    "days": 86400,
    "day": 86400,
    "weeks": 604800,
    "week": 604800,
}
SLURM_KEYS: Final = frozenset(
    {
        "ntasks",
        "ntasks_per_node",
        "cpus_per_task",
        "gpus_per_task",
        "mem",
        "mem_per_cpu",
        "tasks_per_node",
        "output",
        "error",
        "open_mode",
        "args",
        "submit_dir",
        "submit_host",
        "script_name",
        "partition",
        "account",
        "signal",
        "array",
        "key",
        "export",
    }
)
"""The keys of a job's `slurm`."""
DEFAULT_OUTPUT: Final = "slurm-%j.out"
DEFAULT_ARRAY_OUTPUT: Final = "slurm-%A_%a.out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedScript:
    """A script as a job.

    Attributes:
        mapping: as in a job file; its `slurm` holds the settings that the nodes need.
        notes: options that are not honoured, one line each.
        partition, account: as written, for the caller to map to a queue and a project.
        export: the part of the submitter's environment that is passed on: "ALL", "NONE", or names and values.
    """

    mapping: dict[str, object]
    notes: tuple[str, ...]
    partition: str = ""
    account: str = ""
    export: str = "ALL"


@dataclass(slots=True)
class _Options:
    """The options by name, with their lines for error messages."""

    given: Mapping[str, ParsedOption]
    notes: list[str] = field(default_factory=list)
    honoured: set[str] = field(default_factory=set)  # options that are honoured in this script only

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
            raise self.wrong(name, f"is not a number of at least {low}")
        return int(text)

    def wrong(self, name: str, why: str, hint: str = "") -> BadFile:
        found = self.given[name]
        at = f"line {found.line}: " if found.line else ""
        return BadFile(f"{at}--{name}={found.value}: {why}", hint=hint)


def convert_script(
    text: str, *, name: str, args: Sequence[str] = (), folder: str, shards_per_gpu: int = SHARDS_PER_GPU
) -> ConvertedScript:
    """The job that a script requests.

    Args:
        text: the script.
        name: of its file, the default for the job's name.
        args: arguments of the script, after its name on the command line.
        folder: absolute; where it was submitted.
        shards_per_gpu: parts that `--gres=shard` counts

    Raises:
        BadFile: an option is wrong or unknown, with its line.
    """
    given = {one.name: one for one in parse_script_options(text)}
    options = _Options(given=given)
    shape = _shape(options, shards_per_gpu)
    options.notes[:0] = _ignored_notes(given, honoured=options.honoured)
    workdir = options.text("chdir") or folder
    slurm: dict[str, str] = {
        **shape.slurm,
        **_files(options),
        "args": json.dumps(list(args)),
        "submit_dir": folder,
        "script_name": name,
        "partition": options.text("partition"),
        "account": options.text("account"),
        "signal": _signal(options),
        "array": options.text("array").partition("%")[0],
    }
    mapping: dict[str, object] = {
        "name": options.text("job-name") or name,
        "run": text,
        "tasks_per_node": 1,
        **shape.mapping,
        "time": _time(options),
        "array": _array(options),
        "depends_on": _dependency(options),
        "begin": _begin(options),
        "hold": True if options.has("hold") else None,
        "workdir": workdir if workdir.startswith("/") else f"{folder.rstrip('/')}/{workdir}",
        "reservation": options.text("reservation") or None,
        "nodelist": _hosts(options, "nodelist"),
        "exclude": _hosts(options, "exclude"),
        "priority": _priority(options),
        "labels": {"slurm.comment": options.text("comment")[:256]} if options.text("comment") else None,
        "slurm": {key: value for key, value in slurm.items() if value},
    }
    return ConvertedScript(
        mapping={key: value for key, value in mapping.items() if value is not None},
        notes=tuple(options.notes),
        partition=options.text("partition").partition(",")[0],
        account=options.text("account"),
        export=options.text("export") or "ALL",
    )


def _ignored_notes(given: Mapping[str, ParsedOption], *, honoured: Container[str] = ()) -> list[str]:
    notes_found = []
    for one in given.values():
        if one.name in honoured:
            continue
        why = SBATCH_OPTIONS[one.name].unsupported_reason
        if not why or (one.name == "input" and one.value in {"/dev/null", "none"}):
            continue
        at = f"line {one.line}: " if one.line else ""
        value = f"={one.value}" if one.value else ""
        notes_found.append(f"{at}--{one.name}{value} is not honoured: {why}")
    return notes_found


# ---- nodes, tasks, devices ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    mapping: dict[str, object]
    slurm: dict[str, str]


def _shape(options: _Options, shards_per_gpu: int) -> _Shape:
    """The number of nodes, tasks, CPUs and devices. Without nodes and tasks: one task on one node."""
    per_node, tasks = options.number("ntasks-per-node"), options.number("ntasks", low=0) or None
    model, gpus_node, gpus_all, gpus_task = _devices(options, tasks)
    model = model or _models_of_constraint(options)
    nodes = _nodes(options)
    if nodes is None and tasks is not None and per_node is not None:
        nodes = -(-tasks // per_node)
    if nodes is None and gpus_node is not None and gpus_all is not None:
        nodes = max(1, gpus_all // gpus_node)
    if gpus_all is not None and gpus_node is None and nodes is not None:
        if gpus_all % nodes:
            raise options.wrong("gpus", f"{gpus_all} GPUs do not divide over {nodes} nodes", "give --gpus-per-node")
        gpus_node = gpus_all // nodes
    count = nodes or 1
    if tasks is not None and nodes is not None and tasks < nodes:
        options.notes.append(f"--nodes={nodes} with --ntasks={tasks}: {tasks} nodes are used, as in Slurm")
        nodes = count = tasks
    if tasks is None:
        tasks = per_node * count if per_node is not None else count
    tasks_on_node = per_node or -(-tasks // count)
    cpus_task = options.number("cpus-per-task")
    cpus = (cpus_task or 1) * tasks_on_node if cpus_task is not None or not (gpus_node or gpus_all) else None
    mapping: dict[str, object] = {
        "nodes": nodes,
        "cpus": cpus,
        "memory": _memory(options, cpus or tasks_on_node, gpus_node or 0),
        "resources": _resources(options),
    }
    if share := _slices(options, model, count, gpus_node, gpus_all) or _share(options, count, shards_per_gpu):
        mapping |= {**share, "nodes": None}
    elif gpus_node is not None:
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
        "ntasks": str(tasks),
        "ntasks_per_node": str(per_node or ""),
        "cpus_per_task": str(cpus_task or ""),
        "gpus_per_task": str(gpus_task or ""),
        "mem": options.text("mem"),
        "mem_per_cpu": options.text("mem-per-cpu"),
        "tasks_per_node": str(tasks_on_node),
    }
    return _Shape(mapping=mapping, slurm=slurm)


def _nodes(options: _Options) -> int | None:
    text = options.text("nodes")
    if not text:
        return None
    least, dash, most = text.partition("-")
    if not least.isdecimal() or int(least) < 1 or (dash and not most.isdecimal()):
        raise options.wrong("nodes", "is neither a number of nodes nor a range")
    if dash and int(most) != int(least):
        options.notes.append(f"--nodes={text}: {least} nodes are requested, the lower end of the range")
    return int(least)


def _devices(options: _Options, tasks: int | None) -> tuple[str, int | None, int | None, int | None]:
    """Model, devices per node, in total, and per task; None for each that is not given."""
    model, node, total, task = "", None, None, None
    for option in ("gpus-per-node", "gpus", "gpus-per-task"):
        if not options.text(option):
            continue
        match = _GPUS.fullmatch(options.text(option))
        if match is None:
            raise options.wrong(option, "is not [TYPE:]NUMBER")
        model, number = match[1] or model, int(match[2])
        node = number if option == "gpus-per-node" else node
        total = number if option == "gpus" else total
        task = number if option == "gpus-per-task" else task
    for kind, name, number, word in _gres(options):
        if kind == "gpu":
            model, node = name or model, number
        elif kind not in _SHARES:
            options.notes.append(f"--gres={word} is not honoured: only GPUs are supported")
    if task is not None and total is None:
        per_node = options.number("ntasks-per-node")
        if node is None and per_node is not None:
            node = task * per_node
        elif node is None:
            total = task * (tasks or 1)
    per_gpu = options.number("ntasks-per-gpu")
    if per_gpu is not None:
        options.notes.append("--ntasks-per-gpu is not honoured: give --ntasks-per-node")
    return model, node or None, total or None, task


def _models_of_constraint(options: _Options) -> str:
    """The GPU models that `--constraint` names, as `h100,a100`; empty if it names anything else, or the script asks for no GPUs."""
    words = [word.strip().lower() for word in options.text("constraint").strip("[]()").split("|")]
    asks = any(options.has(name) for name in ("gpus", "gpus-per-node", "gpus-per-task"))
    asks = asks or any(kind == "gpu" for kind, *_ in _gres(options))
    if not asks or not all(_GPU_FEATURE.fullmatch(word) for word in words):
        return ""
    options.honoured.add("constraint")
    return ",".join(dict.fromkeys(word.replace("_", "-") for word in words))


def _gres(options: _Options) -> Iterator[tuple[str, str, int, str]]:
    """Kind, type ("" for none), number and text of each generic resource."""
    for word in [word for word in options.text("gres").split(",") if word and word.lower() != "none"]:
        kind, *rest = word.removeprefix("gres:").removeprefix("gres/").split(":")
        names = [part for part in rest if not part.isdecimal()]
        yield kind, names[0] if names else "", int(rest[-1]) if rest and rest[-1].isdecimal() else 1, word


def _slices(
    options: _Options, model: str, nodes: int, gpus_node: int | None, gpus_all: int | None
) -> dict[str, object]:
    """The MIG slices that a type such as `1g.10gb`, `h100_1g.10gb` or `nvidia_h100_80gb_hbm3_1g.10gb` names; empty for another type.

    Slurm's gres.conf names a MIG type after the GPU's model and the profile, or after the profile alone.
    """
    match = _MIG_TYPE.fullmatch(model.lower())
    if match is None:
        return {}
    if gpus_node is None and gpus_all is not None and gpus_all > 1:
        raise options.wrong(
            "gpus", f"asks for {gpus_all} {model} on as many nodes as it takes", f"give --gres=gpu:{model}:{gpus_all}"
        )
    if any(each[0] in _SHARES for each in _gres(options)):
        raise options.wrong("gres", "asks for MIG slices and for a part of a GPU", "give one of them")
    words = [word for word in re.split("[_-]", match[1] or "") if word and word != "nvidia"]
    memory = next((word for word in words if _TYPE_MEMORY.fullmatch(word)), "")
    kind = f"{words[0]}{f'-{memory}' if memory else ''}." if words else ""
    return {"gpus": f"{nodes}x{kind}{match[2]}:{gpus_node or gpus_all or 1}"}


def _share(options: _Options, nodes: int, shards_per_gpu: int) -> dict[str, object]:
    """The part of a GPU that `mps` (percent of one) or `shard` asks for on each node; empty for none."""
    found = [each for each in _gres(options) if each[0] in _SHARES]
    if not found:
        return {}
    kind, model, number, word = found[0]
    if len(found) > 1 or options.has("gpus") or any(each[0] == "gpu" for each in _gres(options)):
        raise options.wrong("gres", "asks for whole GPUs and for a part of one, or for two parts", "give one of them")
    whole = shards_per_gpu if kind == "shard" else 100
    if not 1 <= number <= whole:
        raise options.wrong("gres", f"{word}: a GPU has {whole}; more than one GPU is whole GPUs", "give --gres=gpu:2")
    if kind == "shard":
        options.notes.append(
            f"--gres={word} is {number} of {whole} shards of a GPU; set PHALANX_SHARDS_PER_GPU if your Slurm has another number"
        )
    kinds = f"{model}:" if model else ""
    if number == whole:
        return {"gpus": f"{nodes}x{kinds}1"}
    return {"gpus": f"{nodes}x{kinds}{number}/{whole}", "share": _SHARES[kind]}


def _resources(options: _Options) -> str | None:
    """Licences of the job, and temporary disk space of each node as the resource `scratch`, in Slurm's units (a bare number is MiB)."""
    found = []
    for word in [word.strip() for word in options.text("licenses").split(",") if word.strip()]:
        match = _LICENCE.fullmatch(word)
        if match is None:
            raise options.wrong(
                "licenses", f"{word} is not NAME[@SERVER][:SEATS]", "several licences have a comma between them"
            )
        found.append(f"{match[1]}:{match[2] or 1}")
    size = options.text("tmp")
    if size:
        match = _MEMORY.fullmatch(size)
        if match is None:
            raise options.wrong("tmp", "is not an amount of disk space", "write 4000 (MiB) or 100G")
        if int(match[1]):
            found.append(f"scratch:{match[1]}{match[2] or 'M'}")
            options.notes.append(
                f"--tmp={size} is that much of the resource scratch on each node, which nodes offer with --offers"
            )
    return ",".join(found) or None


def _memory(options: _Options, cpus: int, gpus: int) -> str | None:
    """Memory per node, in Slurm's units (a bare number is MiB)."""
    for option, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        text = options.text(option)
        if not text:
            continue
        match = _MEMORY.fullmatch(text)
        if match is None:
            raise options.wrong(option, "is not an amount of memory", "write 4000 (MiB) or 64G")
        if not int(match[1]):
            options.notes.append(
                f"--{option}=0 is not honoured: a job cannot request all memory of a node; none is requested"
            )
            return None
        size = int(match[1]) * {"K": 1 << 10, "": MIB, "M": MIB, "G": GIB, "T": GIB << 10}[match[2].upper()]
        return f"{max(1, size * max(1, times) // MIB)}M"
    return None


# ---- time, order, files -------------------------------------------------------------------------------------------------


def parse_slurm_seconds(text: str) -> int | None:
    """Seconds of Slurm's times: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. None if invalid."""
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


def _time(options: _Options) -> str | None:
    text = options.text("time")
    if not text or text.upper() in _UNLIMITED:
        return None
    seconds = parse_slurm_seconds(text)
    if not seconds:
        raise options.wrong("time", "is not a time in Slurm's format", "minutes, HH:MM:SS or D-HH:MM:SS")
    return f"{seconds}s"


def _array(options: _Options) -> str | None:
    text = options.text("array")
    if not text:
        return None
    try:
        parse_array(text)
    except BadRequest as error:
        raise options.wrong("array", error.message.removeprefix("array: "), error.hint) from None
    return text


def _dependency(options: _Options) -> list[str] | None:
    """All must hold (commas). Slurm's `?`, where one suffices, and `after` are not supported."""
    text = options.text("dependency")
    if not text:
        return None
    if "?" in text:
        raise options.wrong(
            "dependency",
            "one of several (?) is not supported",
            "separate dependencies by commas; all must hold",
        )
    words = []
    for part in text.split(","):
        kind, *ids = part.strip().split(":")
        words.append(":".join([kind, *(re.sub(r"_\*$", "", one) for one in ids)]))
    try:
        parse_dependencies(words)
    except BadRequest as error:
        raise options.wrong("dependency", error.message.removeprefix("depends_on: "), error.hint) from None
    return words


def _begin(options: _Options) -> str | None:
    """Slurm's `now+1hour`, `16:00`, `2026-12-01T08:00`; the command line resolves local times."""
    text = options.text("begin")
    match = _RELATIVE.fullmatch(text)
    if match is None:
        if text.lower() in {"midnight", "noon", "fika", "teatime", "today", "tomorrow"}:
            raise options.wrong("begin", "words for times are not supported", "write 16:00 or 2026-12-01T08:00")
        return text or None
    unit = (match[2] or "").lower()
    if unit not in _UNITS_S:
        raise options.wrong("begin", f"{unit!r} is not a unit of time", "now+2hours")
    return f"{int(match[1] or 0) * _UNITS_S[unit]}s" if match[1] else None


def _signal(options: _Options) -> str:
    """`target:number:seconds before the end` of `[B:]SIG[@TIME]`; the target is `batch` or `steps`."""
    text = options.text("signal")
    if not text:
        return ""
    match = _SIGNAL.fullmatch(text)
    word = "" if match is None else match[2].upper().removeprefix("SIG")
    if match is None or not (word in _SIGNALS or (word.isdecimal() and 0 < int(word) < 65)):
        raise options.wrong("signal", "is not [B:]SIGNAL[@SECONDS]", "--signal=B:USR1@120")
    if not options.text("time"):
        options.notes.append(
            "--signal has no effect: it is sent before the end of the time limit, and the job has none"
        )
    number = int(word) if word.isdecimal() else _SIGNALS[word]
    return f"{'batch' if 'B' in (match[1] or '') else 'steps'}:{number}:{match[3] or _SIGNAL_LEAD_S}"


def _files(options: _Options) -> dict[str, str]:
    default = DEFAULT_ARRAY_OUTPUT if options.text("array") else DEFAULT_OUTPUT
    mode = options.text("open-mode") or "truncate"
    if mode not in {"append", "truncate"}:
        raise options.wrong("open-mode", "is neither append nor truncate")
    return {"output": options.text("output") or default, "error": options.text("error"), "open_mode": mode}


def _hosts(options: _Options, option: str) -> str | None:
    text = options.text(option)
    if not text:
        return None
    try:
        return ",".join(expand_hostlist(text))
    except BadRequest as error:
        raise options.wrong(option, error.message, error.hint) from None


def _priority(options: _Options) -> int | None:
    """A positive --nice lowers the priority, a negative one raises it; Slurm's scale is a thousand times ours."""
    if not options.has("nice"):
        return None
    text = options.text("nice") or "100"
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise options.wrong("nice", "is not a whole number")
    return max(-10_000, min(10_000, -int(text)))
