"""Maps the options of an `#SBATCH` script to a job: nodes, tasks, devices, time and files, with Slurm's meaning of each. Pure.

The script runs once, on node rank 0, as in Slurm; `srun` in it starts the tasks. Options that Phalanx does not honour are listed in `notes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.units import GIB, MIB
from phalanx.core.work.sbatch_scripts.het_components import (
    ComponentOptions,
    check_whole_gpus,
    component_mapping,
    component_notes,
    component_options,
)
from phalanx.core.work.sbatch_scripts.sbatch import (
    SBATCH_OPTIONS,
    ParsedOption,
)
from phalanx.core.work.sbatch_scripts.script_mail import script_mail
from phalanx.core.work.sbatch_scripts.script_options import ScriptOptions
from phalanx.core.work.sbatch_scripts.script_times import (
    script_array,
    script_begin,
    script_dependency,
    script_files,
    script_hosts,
    script_priority,
    script_signal,
    script_time,
)

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
SCRIPT_KEY: Final = "key"
"""The key of a job's `slurm` by which its processes on several nodes recognize each other: a secret."""
ARRAY_SETTING: Final = "array"
"""The key of a job's `slurm` with the elements of its array, in the order of which they are numbered."""
SLURM_KEYS: Final = frozenset(
    {
        "ntasks",
        "ntasks_given",
        "nodes_given",
        "ntasks_per_node",
        "cpus_per_task",
        "cpus_per_gpu",
        "gpus",
        "gpus_per_node",
        "gpus_per_task",
        "gpus_wanted",
        "mem",
        "mem_per_cpu",
        "mem_per_gpu",
        "tasks_per_node",
        "dependency",
        "reservation",
        "hint",
        "threads_per_core",
        "distribution",
        "container",
        "home",
        "output",
        "error",
        "open_mode",
        "args",
        "submit_dir",
        "submit_host",
        "script",
        "partition",
        "account",
        "signal",
        ARRAY_SETTING,
        "components",
        SCRIPT_KEY,
        "export",
    }
)
"""The keys of a job's `slurm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedScript:
    """A script as a job.

    Attributes:
        mapping: as in a job file; its `slurm` holds the settings that the nodes need.
        notes: options that are not honoured, one line each.
        partition, account: as written, for the caller to map to a queue and a project.
        export: the part of the submitter's environment that is passed on: "ALL", "NONE", or names and values.
        exclusive: the components whose nodes are the job's alone, by number; 0 for a job of one. The caller, who knows the nodes, replaces
            GPUs and CPUs by all that they have.
    """

    mapping: dict[str, object]
    notes: tuple[str, ...]
    partition: str = ""
    account: str = ""
    export: str = "ALL"
    exclusive: tuple[int, ...] = ()


def convert_script(
    text: str,
    *,
    name: str,
    args: Sequence[str] = (),
    folder: str,
    shards_per_gpu: int = SHARDS_PER_GPU,
    given: Sequence[str] = (),
    honoured: Sequence[str] = (),
) -> ConvertedScript:
    """The job that a script requests.

    Args:
        text: the script.
        name: of its file, the default for the job's name.
        args: arguments of the script, after its name on the command line.
        folder: absolute; where it was submitted.
        shards_per_gpu: parts that `--gres=shard` counts
        given: options of the command line of sbatch, which replace those of the script; with a `:` between components
        honoured: options that the caller honours itself

    Raises:
        BadFile: an option is wrong or unknown, with its line.
    """
    components = component_options(text, given)
    found, *others = components
    options = ScriptOptions(given=found)
    shape = _shape(options, shards_per_gpu)
    options.notes[:0] = _ignored_notes(found, honoured={*options.honoured, *honoured})
    if others:
        check_whole_gpus(shape.mapping, 0)
        options.notes += component_notes(components)
    workdir = options.text("chdir") or folder
    slurm = {
        **shape.slurm,
        **_settings(options, args, folder),
        "components": _components(others, shards_per_gpu, options.notes),
    }
    mapping: dict[str, object] = {
        "name": options.text("job-name") or name,
        "run": text,
        "tasks_per_node": 1,
        **shape.mapping,
        "time": script_time(options),
        "array": script_array(options),
        "depends_on": script_dependency(options),
        "begin": script_begin(options),
        "hold": True if options.has("hold") else None,
        "notify": script_mail(options),
        "workdir": workdir if workdir.startswith("/") else f"{folder.rstrip('/')}/{workdir}",
        "reservation": options.text("reservation") or None,
        "nodelist": script_hosts(options, "nodelist"),
        "exclude": script_hosts(options, "exclude"),
        "priority": script_priority(options),
        "labels": {"slurm.comment": options.text("comment")[:256]} if options.text("comment") else None,
        "slurm": {key: value for key, value in slurm.items() if value},
    }
    return ConvertedScript(
        mapping={key: value for key, value in mapping.items() if value is not None},
        notes=tuple(options.notes),
        partition=options.text("partition").partition(",")[0],
        account=options.text("account"),
        export=options.text("export") or "ALL",
        exclusive=_exclusive_components(components),
    )


def _exclusive_components(components: Sequence[ComponentOptions]) -> tuple[int, ...]:
    """The numbers of the components whose nodes are the job's alone."""
    return tuple(
        number
        for number, own in enumerate(components)
        if "exclusive" in own and own["exclusive"].value not in {"user", "mcs"}
    )


def _components(others: Sequence[ComponentOptions], shards_per_gpu: int, notes: list[str]) -> str:
    """The further components of a heterogeneous job, as JSON; empty for any other job."""
    found = []
    for number, own in enumerate(others, start=1):
        options = ScriptOptions(given=own)
        shape = _shape(options, shards_per_gpu)
        found.append(component_mapping(shape.mapping, shape.slurm, own, number))
        notes += [*_ignored_notes(own, honoured=options.honoured), *options.notes]
    return json.dumps(found) if found else ""


def _settings(options: ScriptOptions, args: Sequence[str], folder: str) -> dict[str, str]:
    """The settings of the script for its nodes, without its shape; an empty one is not given."""
    return {
        **script_files(options),
        **_repeated_options(options),
        "args": json.dumps(list(args)),
        "submit_dir": folder,
        "partition": options.text("partition"),
        "account": options.text("account"),
        "signal": script_signal(options),
        ARRAY_SETTING: options.text("array").partition("%")[0],
    }


def _repeated_options(options: ScriptOptions) -> dict[str, str]:
    """Options that the job's variables repeat."""
    container = {
        option.removeprefix("container-"): options.text(option)
        for option in ("container-image", "container-mounts", "container-workdir")
        if options.text(option)
    }
    flags = [flag for flag in ("container-mount-home", "container-writable") if options.has(flag)]
    container |= {flag.removeprefix("container-"): "1" for flag in flags}
    return {
        "export": options.text("export"),
        "dependency": options.text("dependency"),
        "reservation": options.text("reservation"),
        "hint": options.text("hint"),
        "threads_per_core": options.text("threads-per-core"),
        "distribution": options.text("distribution"),
        "container": json.dumps(container) if options.text("container-image") else "",
    }


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


def _shape(options: ScriptOptions, shards_per_gpu: int) -> _Shape:
    """The number of nodes, tasks, CPUs and devices. Without nodes and tasks: one task on one node."""
    per_node, tasks = options.number("ntasks-per-node"), options.number("ntasks", low=0) or None
    model, gpus_node, gpus_all = _devices(options, tasks)
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
    cpus_task, cpus_gpu = options.number("cpus-per-task"), options.number("cpus-per-gpu")
    cpus = (cpus_task or 1) * tasks_on_node if cpus_task is not None or not (gpus_node or gpus_all) else None
    if cpus_gpu is not None:
        if cpus_task is not None:
            raise options.wrong("cpus-per-gpu", "and --cpus-per-task exclude each other", "give one of them")
        cpus = cpus_gpu * (gpus_node or -(-(gpus_all or 0) // count)) or cpus
    mapping: dict[str, object] = {
        "nodes": nodes,
        "cpus": cpus,
        "resources": _resources(options),
        "memory": _memory(options, cpus or tasks_on_node, gpus_node or -(-(gpus_all or 0) // count)),
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
        "ntasks_given": "1" if options.text("ntasks") or per_node is not None else "0",
        "nodes_given": "1" if options.text("nodes") else "0",
        "ntasks_per_node": str(per_node or ""),
        "cpus_per_task": str(cpus_task or ""),
        "cpus_per_gpu": str(cpus_gpu or ""),
        "gpus": options.text("gpus"),
        "gpus_per_node": options.text("gpus-per-node"),
        "gpus_per_task": options.text("gpus-per-task"),
        "gpus_wanted": "1" if gpus_node or gpus_all else "0",
        "mem": options.text("mem"),
        "mem_per_cpu": options.text("mem-per-cpu"),
        "mem_per_gpu": options.text("mem-per-gpu"),
        "tasks_per_node": str(tasks_on_node),
    }
    return _Shape(mapping=mapping, slurm=slurm)


def _nodes(options: ScriptOptions) -> int | None:
    text = options.text("nodes")
    if not text:
        return None
    least, dash, most = text.partition("-")
    if not least.isdecimal() or int(least) < 1 or (dash and not most.isdecimal()):
        raise options.wrong("nodes", "is neither a number of nodes nor a range")
    if dash and int(most) != int(least):
        options.notes.append(f"--nodes={text}: {least} nodes are requested, the lower end of the range")
    return int(least)


def _devices(options: ScriptOptions, tasks: int | None) -> tuple[str, int | None, int | None]:
    """Model, devices per node and in total; None for each that is not given."""
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
    return model, node or None, total or None


def _models_of_constraint(options: ScriptOptions) -> str:
    """The GPU models that `--constraint` names, as `h100,a100`; empty if it names anything else, or the script asks for no GPUs."""
    words = [word.strip().lower() for word in options.text("constraint").strip("[]()").split("|")]
    asks = any(options.has(name) for name in ("gpus", "gpus-per-node", "gpus-per-task"))
    asks = asks or any(kind == "gpu" for kind, *_ in _gres(options))
    if not asks or not all(_GPU_FEATURE.fullmatch(word) for word in words):
        return ""
    options.honoured.add("constraint")
    return ",".join(dict.fromkeys(word.replace("_", "-") for word in words))


def _gres(options: ScriptOptions) -> Iterator[tuple[str, str, int, str]]:
    """Kind, type ("" for none), number and text of each generic resource."""
    for word in [word for word in options.text("gres").split(",") if word and word.lower() != "none"]:
        kind, *rest = word.removeprefix("gres:").removeprefix("gres/").split(":")
        names = [part for part in rest if not part.isdecimal()]
        yield kind, names[0] if names else "", int(rest[-1]) if rest and rest[-1].isdecimal() else 1, word


def _slices(
    options: ScriptOptions, model: str, nodes: int, gpus_node: int | None, gpus_all: int | None
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


def _share(options: ScriptOptions, nodes: int, shards_per_gpu: int) -> dict[str, object]:
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


def _resources(options: ScriptOptions) -> str | None:
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


def _memory(options: ScriptOptions, cpus: int, gpus: int) -> str | None:
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
