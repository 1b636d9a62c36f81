"""How often a command starts, and the notes that state it before the start (DESIGN 2).

Once per device; a command that is itself a launcher once per node; an MPI launcher once, on the first node. Used when a request becomes a
spec, and wherever a shape is shown to users. Only the words of the command count; the content of a script is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.shape_note import plural, shape_note
from phalanx.core.work.spec import LaunchMode, Role

MPI_LAUNCHERS: Final = frozenset(
    {
        *("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"),
        *("mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich", "mpiexec.mpich"),  # Debian's alternatives
    }
)
"""Launchers that start the ranks of all nodes from one call, by an agent of ours."""
SSH_LAUNCHERS: Final = frozenset({"horovodrun"})
"""Launchers that start the ranks of all nodes from one call, but by ssh only; started once per node, they would create separate worlds."""
_LAUNCHERS: Final = frozenset({"torchrun", "deepspeed"}) | MPI_LAUNCHERS | SSH_LAUNCHERS
_LAUNCHER_MODULES: Final = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "torch.distributed.elastic": "torch.distributed.elastic",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# Wrappers: the actual command follows them and their options.
_WRAPPERS: Final = frozenset(
    {"env", "exec", "nice", "ionice", "nohup", "numactl", "stdbuf", "taskset", "time", "chrt", "setsid"}
)
_WRAPPED_RUN: Final = frozenset(
    {"uv", "poetry", "pipenv", "pdm", "hatch", "conda", "mamba", "micromamba"}
)  # `uv run torchrun`
SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_PYTHON: Final = re.compile(r"(python|pypy)(\d+(\.\d+)*)?")
_PYTHON_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_SHELL_SPLIT: Final = re.compile(r"&&|\|\||[;|&\n(){}]")
_CONTINUED: Final = re.compile(r"\\\n")


def find_launcher(argv: Sequence[str], script: str = "") -> str | None:
    """The name of the launcher that a command is, or None. In a shell text, any of its commands counts."""
    if argv:
        return _launcher_in(argv)
    for command in split_commands(script):
        if found := _launcher_in([word.strip("'\"") for word in command.split()]):
            return found
    return None


def single_node_launcher(role: Role) -> str | None:
    """The launcher of a role that would create a separate world on each node, or None. `deepspeed` does without `--no_ssh`, in a command that
    starts once per node; a script with its own `tasks_per_node` may call it on the first node alone.
    """
    found = find_launcher(role.argv, role.script)
    if found == "deepspeed":
        joins = "--no_ssh" in " ".join((*role.argv, role.script)).split()
        return found if role.launch is LaunchMode.PER_NODE and not joins else None
    return found if found in SSH_LAUNCHERS else None


def split_commands(script: str) -> list[str]:
    """The commands of a shell text, roughly: split at `&&`, `||`, `;`, `|` and line ends, comments dropped. Good enough to look
    for a launcher, but not a shell parser.
    """
    lines = [line for line in _CONTINUED.sub(" ", script).splitlines() if not line.lstrip().startswith("#")]
    return [command for line in lines for part in _SHELL_SPLIT.split(line) if (command := part.strip())]


def count_logical_lines(script: str) -> int:
    """Number of lines of a shell text that are not blank or comments; a line continued by a backslash is one."""
    joined = _CONTINUED.sub(" ", script)
    return sum(1 for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def tasks_on_node(role: Role, devices: int) -> int:
    """Number of tasks that start on a node where the job holds `devices`; at least one."""
    match role.launch:
        case LaunchMode.FIXED:
            return max(1, role.tasks_per_node or 1)
        case (
            LaunchMode.PER_NODE | LaunchMode.ONCE
        ):  # on other nodes, a process of ours starts the tasks of an MPI launcher
            return 1
        case LaunchMode.PER_DEVICE:
            return max(1, devices)


def slots_on_node(role: Role, devices: int) -> int:
    """Number of tasks that a launcher shall start on a node where the job holds `devices`; at least one."""
    return max(1, role.tasks_per_node or devices)


def known_task_count(role: Role) -> int | None:
    """Number of tasks of the job if the request determines it; None if it depends on the placement."""
    if role.launch is LaunchMode.ONCE:  # the output of all tasks is that of the launcher
        return 1
    if role.others:
        counted = [known_task_count(one) for one in role.each]
        return None if None in counted else sum(count or 0 for count in counted)
    if role.gpus.alternatives:
        counts = {known_task_count(replace(role, gpus=one)) for one in role.gpus.choices}
        return counts.pop() if len(counts) == 1 else None
    shape = _fixed(role.gpus)
    if shape:
        return sum(tasks_on_node(role, devices) for devices in shape)
    return role.gpus.total if role.launch is LaunchMode.PER_DEVICE else None


def launch_notes(role: Role, devices_by_node: Sequence[int] = ()) -> list[str]:
    """Lines shown before a start: the shape, and the number of tasks; one for a job without GPUs.

    Args:
        role: the request.
        devices_by_node: devices on each node, by node rank; empty before a placement, when only the request is known.
    """
    shape = list(devices_by_node) or _fixed(role.gpus)
    share = role.gpus.share
    if share is not None:
        nodes = role.gpus.nodes or 1
        part = (
            f"{share.count} MIG {plural('slice', share.count)} {share.profile}"
            if share.profile
            else f"{share} of a GPU"
        )
        return [f"{nodes} {plural('node', nodes)} x {part}", _tasks_note(role, [share.count] * nodes)]
    if shape:
        return [_cpu_note(role, shape)] if not any(shape) else [shape_note(shape), _tasks_note(role, shape)]
    count = role.gpus.total
    kind = "" if role.gpus.model is None else f" {role.gpus.model.upper()}"
    return [f"{count}{kind} {plural('GPU', count)}, on as few nodes as possible", _unplaced_note(role, count)]


def role_notes(role: Role, devices: Sequence[Sequence[int]]) -> list[str]:
    """The two lines for a job with several roles: the shape of each, and that the script starts once."""
    shapes = []
    for one, on_nodes in zip(role.each, devices, strict=True):
        nodes = one.gpus.nodes or 1
        on_cpus = f"CPUs of {nodes} {plural('node', nodes)}"
        shapes.append(launch_notes(one, on_nodes)[0] if one.gpus.total else on_cpus)
    named = [f"component {number}: {shape}" for number, shape in enumerate(shapes)]
    return ["; ".join(named), "1 task: the script, on the first node of component 0"]


def alternatives_notes(role: Role, devices: Sequence[Sequence[int] | None]) -> list[str]:
    """The two lines for a job with alternatives: the shape and the number of tasks of each.

    Args:
        role: the request, with at least one alternative.
        devices: devices on each node for each alternative, in their order; empty if no fleet is known, None if it cannot hold it.
    """
    shapes, tasks, ends = [], [], set()
    for one, on_nodes in zip(role.gpus.choices, devices, strict=True):
        shape, started = launch_notes(replace(role, gpus=one), on_nodes or ())
        kind = one.kinds_text or "any model"
        count, comma, end = started.rpartition(", ")
        never = " (these nodes cannot hold it)" if on_nodes is None else ""
        shapes.append((f"{kind}: {shape}" if on_nodes or _fixed(one) else shape) + never)
        tasks.append(f"{(count or started).partition(':')[0]} on {kind}")
        ends.add(comma + end if count else "")
    return ["one of " + "; ".join(shapes), " or ".join(tasks) + (ends.pop() if len(ends) == 1 else "")]


def _cpu_note(role: Role, devices_by_node: Sequence[int]) -> str:
    """`0 GPUs: 1 task on CPUs`; with its nodes if there are several, and with what decided the number of tasks."""
    nodes = len(devices_by_node)
    tasks = sum(_tasks_shown(role, devices) for devices in devices_by_node)
    where = "" if nodes == 1 else f" of {nodes} nodes"
    frequency = "" if nodes == tasks == 1 else f", {_frequency_text(role, cpu_only=True)}"
    return f"0 GPUs: {tasks} {plural('task', tasks)} on CPUs{where}{frequency}"


def _tasks_shown(role: Role, devices: int) -> int:
    """Tasks on a node as a user counts them: those of an MPI launcher, which itself runs once, are its slots."""
    return slots_on_node(role, devices) if role.launch is LaunchMode.ONCE else tasks_on_node(role, devices)


def _tasks_note(role: Role, devices_by_node: Sequence[int]) -> str:
    tasks = [_tasks_shown(role, devices) for devices in devices_by_node]
    total, nodes = sum(tasks), len(tasks)
    layout = f"{nodes} {plural('node', nodes)} x {tasks[0]}" if len(set(tasks)) == 1 else " + ".join(map(str, tasks))
    return f"{total} {plural('task', total)}: {layout}, {_frequency_text(role, cpu_only=not any(devices_by_node))}"


def _unplaced_note(role: Role, gpus: int) -> str:
    if role.launch is LaunchMode.PER_DEVICE:
        return f"{gpus} {plural('task', gpus)}, one per GPU"
    if role.launch is LaunchMode.PER_NODE:
        return f"one task on each node: {_frequency_text(role, cpu_only=False)}"
    if role.launch is LaunchMode.ONCE and role.tasks_per_node is None:
        return f"{gpus} {plural('task', gpus)}, {_frequency_text(role, cpu_only=False)}"
    return f"{role.tasks_per_node} {plural('task', role.tasks_per_node or 1)} on each node, as given by tasks_per_node"


def _frequency_text(role: Role, *, cpu_only: bool) -> str:
    match role.launch:
        case LaunchMode.FIXED:
            return f"{role.tasks_per_node} per node as asked"
        case LaunchMode.PER_NODE:
            launcher = find_launcher(role.argv, role.script) or "the command"
            return f"one per node, because {launcher} is a launcher and starts the rest"
        case LaunchMode.ONCE:
            return f"started by {find_launcher(role.argv, role.script) or 'the command'}, which runs once"
        case LaunchMode.PER_DEVICE:
            return "one per node" if cpu_only else "one per GPU"


def _fixed(gpus: GpuRequest) -> list[int]:
    if gpus.nodes is not None:
        return [gpus.per_node or 0] * gpus.nodes
    return [gpus.total] if gpus.total <= 1 else []


def _launcher_in(words: Sequence[str]) -> str | None:
    rest = unwrapped(words)
    if not rest:
        return None
    name = rest[0].rsplit("/", 1)[-1]
    if name in _LAUNCHERS:
        return name
    if name in SHELLS:
        return find_launcher((), shell_text(rest[1:]))
    if name == "accelerate":  # other subcommands, such as `accelerate config`, launch nothing
        return "accelerate" if "launch" in rest[1:] else None
    return _module_launcher(rest[1:]) if _PYTHON.fullmatch(name) else None


def shell_text(arguments: Sequence[str]) -> str:
    """The text that `bash -c TEXT` runs; "" for a script file."""
    for index, word in enumerate(arguments[:-1]):
        if not word.startswith("-"):
            return ""
        if word.endswith("c") and not word.startswith("--"):  # also -lc, -xec
            return arguments[index + 1]
    return ""


def unwrapped(words: Sequence[str]) -> Sequence[str]:
    """The words of the command itself, after `env A=1`, `nice -n 5`, `uv run` and the like."""
    rest = list(words)
    while rest:
        name = rest[0].rsplit("/", 1)[-1]
        if _ASSIGNMENT.fullmatch(rest[0]):
            rest = rest[1:]
        elif name in _WRAPPERS:
            rest = _past_options(rest[1:])
        elif name in _WRAPPED_RUN and "run" in rest[1:3]:
            rest = _past_options(rest[rest.index("run") + 1 :])
        else:
            break
    return rest


def _past_options(words: list[str]) -> list[str]:
    """Skip a wrapper's own options. Their values (`-n 5`, `0-3`) begin with a digit, which no program name does."""
    for index, word in enumerate(words):
        if not word.startswith("-") and not word[:1].isdigit():
            return words[index:]
    return []


def _module_launcher(arguments: Sequence[str]) -> str | None:
    """The launcher that `python ... -m MODULE` or `python .../torchrun` starts, or None."""
    skip = False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word in _PYTHON_WITH_VALUE:
            skip = True
        elif word == "-c":  # code follows
            return None
        elif word == "-m":
            return _LAUNCHER_MODULES.get(arguments[index + 1]) if index + 1 < len(arguments) else None
        elif word.startswith("-m") and word[2:] in _LAUNCHER_MODULES:
            return _LAUNCHER_MODULES[word[2:]]
        elif not word.startswith("-"):
            name = word.rsplit("/", 1)[-1]
            return name if name in _LAUNCHERS else None
    return None
