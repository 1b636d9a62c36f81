"""How often a command starts, and how that is said before it starts (DESIGN 2).

Once per device; a command that is itself a launcher once per node. Called where a request becomes a spec, and wherever a shape
is told to people. Never guesses about what a script does inside: only the command's own words count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.spec import Launch, Role

_LAUNCHERS: Final = frozenset({"torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun"})
ONE_WORLD_PER_CALL: Final = frozenset({"mpirun", "mpiexec", "horovodrun"})
"""Launchers that start all nodes' ranks from one call; started once per node they would make as many separate worlds."""
_LAUNCHER_MODULES: Final = {
    "torch.distributed.run": "torch.distributed.run",
    "torch.distributed.launch": "torch.distributed.launch",
    "torch.distributed.elastic": "torch.distributed.elastic",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# Words that only start the next one: the command is what follows them and their options.
_WRAPPERS: Final = frozenset(
    {"env", "exec", "nice", "ionice", "nohup", "numactl", "stdbuf", "taskset", "time", "chrt", "setsid"}
)
_WRAPPED_RUN: Final = frozenset(
    {"uv", "poetry", "pipenv", "pdm", "hatch", "conda", "mamba", "micromamba"}
)  # `uv run torchrun`
_PYTHON: Final = re.compile(r"(python|pypy)(\d+(\.\d+)*)?")
_PYTHON_WITH_VALUE: Final = frozenset({"-X", "-W", "--check-hash-based-pycs"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_SHELL_SPLIT: Final = re.compile(r"&&|\|\||[;|&\n(){}]")
_CONTINUED: Final = re.compile(r"\\\n")


def launcher_of(argv: Sequence[str], script: str = "") -> str | None:
    """The launcher that a command is, by name, or None. Of a shell text, any of its commands counts."""
    if argv:
        return _launcher_in(argv)
    for command in commands_of(script):
        if found := _launcher_in([word.strip("'\"") for word in command.split()]):
            return found
    return None


def commands_of(script: str) -> list[str]:
    """The commands of a shell text, roughly: cut at `&&`, `||`, `;`, `|` and line ends, comments dropped. Good enough to look
    for a launcher; the shell alone knows exactly.
    """
    lines = [line for line in _CONTINUED.sub(" ", script).splitlines() if not line.lstrip().startswith("#")]
    return [command for line in lines for part in _SHELL_SPLIT.split(line) if (command := part.strip())]


def logical_lines(script: str) -> int:
    """How many lines a shell text has that do something; a line continued by a backslash is one."""
    joined = _CONTINUED.sub(" ", script)
    return sum(1 for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def tasks_on(role: Role, devices: int) -> int:
    """How many tasks start on a node of which the job holds `devices`; at least one."""
    match role.launch:
        case Launch.FIXED:
            return max(1, role.tasks_per_node or 1)
        case Launch.PER_NODE:
            return 1
        case Launch.PER_DEVICE:
            return max(1, devices)


def tasks_known(role: Role) -> int | None:
    """How many tasks the job has, where that follows from what was asked; None where it hangs on the placement."""
    shape = _fixed(role.gpus)
    if shape:
        return sum(tasks_on(role, devices) for devices in shape)
    return role.gpus.total if role.launch is Launch.PER_DEVICE else None


def notes(role: Role, devices_by_node: Sequence[int] = ()) -> list[str]:
    """Two lines told before a start: the shape, and how many tasks it makes.

    Args:
        role: what was asked.
        devices_by_node: devices on each node, by node rank; empty before a placement, when only what was asked can be said.
    """
    shape = list(devices_by_node) or _fixed(role.gpus)
    if shape:
        return [shape_note(shape), _tasks_note(role, shape)]
    count = role.gpus.total
    kind = "" if role.gpus.model is None else f" {role.gpus.model.upper()}"
    return [f"{count}{kind} {_s('GPU', count)}, on as few nodes as hold them", _undecided(role, count)]


def shape_note(devices_by_node: Sequence[int]) -> str:
    """`2 nodes x 8 = 16 GPUs`; uneven ones as `2 nodes, 3 + 1 = 4 GPUs`; `1 node, no GPU`."""
    nodes, total = len(devices_by_node), sum(devices_by_node)
    if total == 0:
        return f"{nodes} {_s('node', nodes)}, no GPU"
    if len(set(devices_by_node)) == 1:
        return f"{nodes} {_s('node', nodes)} x {devices_by_node[0]} = {total} {_s('GPU', total)}"
    return f"{nodes} nodes, {' + '.join(map(str, devices_by_node))} = {total} GPUs"


def _tasks_note(role: Role, devices_by_node: Sequence[int]) -> str:
    tasks = [tasks_on(role, devices) for devices in devices_by_node]
    total, nodes = sum(tasks), len(tasks)
    layout = f"{nodes} {_s('node', nodes)} x {tasks[0]}" if len(set(tasks)) == 1 else " + ".join(map(str, tasks))
    return f"{total} {_s('task', total)}: {layout}, {_how_often(role, cpu_only=not any(devices_by_node))}"


def _undecided(role: Role, gpus: int) -> str:
    if role.launch is Launch.PER_DEVICE:
        return f"{gpus} {_s('task', gpus)}, one per GPU"
    if role.launch is Launch.PER_NODE:
        return f"one task on each node: {_how_often(role, cpu_only=False)}"
    return f"{role.tasks_per_node} {_s('task', role.tasks_per_node or 1)} on each node, as tasks per node was given"


def _how_often(role: Role, *, cpu_only: bool) -> str:
    match role.launch:
        case Launch.FIXED:
            return f"{role.tasks_per_node} per node as asked"
        case Launch.PER_NODE:
            launcher = launcher_of(role.argv, role.script) or "the command"
            return f"one per node, because {launcher} is a launcher and starts the rest"
        case Launch.PER_DEVICE:
            return "one per node" if cpu_only else "one per GPU"


def _fixed(gpus: GpuRequest) -> list[int]:
    if gpus.nodes is not None:
        return [gpus.per_node or 0] * gpus.nodes
    return [gpus.total] if gpus.total <= 1 else []


def _launcher_in(words: Sequence[str]) -> str | None:
    rest = _unwrapped(words)
    if not rest:
        return None
    name = rest[0].rsplit("/", 1)[-1]
    if name in _LAUNCHERS:
        return name
    if name == "accelerate":  # `accelerate config` and kin start nothing
        return "accelerate" if "launch" in rest[1:] else None
    return _module_launcher(rest[1:]) if _PYTHON.fullmatch(name) else None


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """The words from the command proper on: past `env A=1`, `nice -n 5`, `uv run` and kin."""
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
    """Past a wrapper's own options. A value of its own (`-n 5`, `0-3`) holds a digit first; no program is named so."""
    for index, word in enumerate(words):
        if not word.startswith("-") and not word[:1].isdigit():
            return words[index:]
    return []


def _module_launcher(arguments: Sequence[str]) -> str | None:
    """What `python ... -m MODULE` or `python .../torchrun` starts, if that is a launcher."""
    skip = False
    for index, word in enumerate(arguments):
        if skip:
            skip = False
        elif word in _PYTHON_WITH_VALUE:
            skip = True
        elif word == "-c":  # what follows is code
            return None
        elif word == "-m":
            return _LAUNCHER_MODULES.get(arguments[index + 1]) if index + 1 < len(arguments) else None
        elif word.startswith("-m") and word[2:] in _LAUNCHER_MODULES:
            return _LAUNCHER_MODULES[word[2:]]
        elif not word.startswith("-"):
            name = word.rsplit("/", 1)[-1]
            return name if name in _LAUNCHERS else None
    return None


def _s(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
