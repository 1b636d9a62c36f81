"""The hooks of a node's operator: which programs run before and after a job and as health checks, and what their exit codes mean.

Pure: `parse_hooks` reads the text of the operator's file, `judge_hook` turns the end of a program into an effect. `node.prepare.hook_runner` runs
programs. The head sends no program and no name of one: only the file on the node decides.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.ids import NodeId
from phalanx.node.logic.utf8 import replace_invalid_utf8

HOOKS_VARIABLE: Final = "PHALANX_HOOKS"
"""Path of the operator's file; empty for no hooks."""
TIMEOUT_S: Final = 60.0
"""Default time-out, that of Slurm's HealthCheckProgram. Source: SchedMD, slurm.conf(5), read 2026-11-26."""
TIMEOUT_MAX_S: Final = 3600.0
INTERVAL_S: Final = 300.0  # between two runs of a health check
INTERVAL_MIN_S: Final = 10.0  # a shorter one would use the cores of jobs
HOOKS_MAX: Final = 32  # of one kind
LINE_MAX: Final = 200  # characters of a program's last line in a reason
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_KEYS: Final = frozenset({"program", "timeout_s", "interval_s", "queues", "nodes", "exit_codes", "on_timeout"})


class HookKind(enum.StrEnum):
    """When a hook runs: before the first process of a job, after its last one, or periodically and before each job."""

    PROLOG = "prolog"
    EPILOG = "epilog"
    HEALTH = "health"


class HookEffect(enum.StrEnum):
    """The meaning of an exit code.

    DRAIN: cordon the node; before a job also place the job elsewhere. FAIL: only of a prolog, the job is at fault. WARN: a line in logs.
    """

    NONE = "none"
    DRAIN = "drain"
    FAIL = "fail"
    WARN = "warn"


class HooksInvalid(ValueError):
    """The file of hooks cannot be used: its text, or who may write it or a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorHook:
    """One program.

    Attributes:
        program: absolute path and arguments.
        queues, nodes: it runs only for jobs of these queues, on these nodes; empty for all.
        exit_codes: effects that differ from the default, DRAIN.
        on_timeout: the effect of a time-out or a program that does not start.
    """

    kind: HookKind
    program: tuple[str, ...]
    timeout_s: float = TIMEOUT_S
    interval_s: float = INTERVAL_S
    queues: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    exit_codes: tuple[tuple[int, HookEffect], ...] = ()
    on_timeout: HookEffect = HookEffect.DRAIN

    @property
    def name(self) -> str:
        """For messages: kind and file name."""
        kind = "health check" if self.kind is HookKind.HEALTH else self.kind.value
        return f"{kind} {self.program[0].rpartition('/')[2]}"

    def concerns(self, node_id: NodeId, queue: str | None) -> bool:
        """Whether it runs on the node for a job of the queue; None: for no job."""
        return (not self.nodes or node_id in self.nodes) and (queue is None or not self.queues or queue in self.queues)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRun:
    """How a program ended: its exit code as a shell gives it; None after a time-out or if it could not be started (`error`)."""

    code: int | None
    last_line: str = ""
    error: str = ""


def parse_hooks(text: str) -> tuple[OperatorHook, ...]:
    """Parse the file, in the order of kinds and lines.

    Raises:
        HooksInvalid: with the place and what is expected.
    """
    import tomllib  # most nodes have no hooks

    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HooksInvalid(str(error)) from error
    kinds = [kind.value for kind in HookKind]
    for name, listed in found.items():
        if name not in kinds:
            raise HooksInvalid(f"[[{name}]] is unknown; use [[prolog]], [[epilog]] and [[health]]")
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise HooksInvalid(f"write [[{name}]], not [{name}]")
        if len(listed) > HOOKS_MAX:
            raise HooksInvalid(f"{len(listed)} times [[{name}]]; at most {HOOKS_MAX}")
    return tuple(
        _hook(HookKind(kind), at, one) for kind in kinds for at, one in enumerate(found.get(kind, []), start=1)
    )


def judge_hook(hook: OperatorHook, run: HookRun) -> tuple[HookEffect, str]:
    """Return the effect of a program's end, and one sentence for people; an empty text for exit code 0."""
    if run.code == 0:
        return HookEffect.NONE, ""
    if run.code is None:
        effect = hook.on_timeout
        text = f"{hook.name} {run.error}" if run.error else f"{hook.name} timed out after {hook.timeout_s:g} s"
    else:
        effect = dict(hook.exit_codes).get(run.code, HookEffect.DRAIN)
        text = f"{hook.name} ended with code {run.code}"
    return effect, f"{text}: {run.last_line}" if run.last_line else text


def last_line(output: bytes) -> str:
    """Return the last line with text, without control characters, cut to LINE_MAX characters."""
    lines = [_CONTROL.sub(" ", line).strip() for line in output.decode("utf-8", "replace").splitlines()]
    return replace_invalid_utf8(next((line for line in reversed(lines) if line), ""))[:LINE_MAX]


def _hook(kind: HookKind, at: int, values: Mapping[str, Any]) -> OperatorHook:
    where = f"[[{kind}]] {at}"
    unknown = sorted(set(values) - _KEYS)
    if unknown:
        raise HooksInvalid(f"{where}: {unknown[0]!r} is unknown; known: {', '.join(sorted(_KEYS))}")
    program = values.get("program")
    words = [program] if isinstance(program, str) else program
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) and "\0" not in word for word in words)
    ):
        raise HooksInvalid(f"{where}: program must be a path, or a list of a path and arguments")
    if not words[0].startswith("/"):
        raise HooksInvalid(f"{where}: program must be an absolute path, not {words[0]!r}")
    if kind is HookKind.HEALTH and values.get("queues"):
        raise HooksInvalid(f"{where}: a health check concerns the node, so it has no queues")
    codes = values.get("exit_codes", {})
    if not isinstance(codes, dict):
        raise HooksInvalid(f'{where}: exit_codes must be a table such as {{ 3 = "warn" }}')
    return OperatorHook(
        kind=kind,
        program=tuple(words),
        timeout_s=_seconds(where, "timeout_s", values.get("timeout_s", TIMEOUT_S), 0.1, TIMEOUT_MAX_S),
        interval_s=_seconds(where, "interval_s", values.get("interval_s", INTERVAL_S), INTERVAL_MIN_S, 86400.0),
        queues=_names(where, "queues", values.get("queues", [])),
        nodes=_names(where, "nodes", values.get("nodes", [])),
        exit_codes=tuple((_code(where, code), _effect(where, kind, effect)) for code, effect in codes.items()),
        on_timeout=_effect(where, kind, values.get("on_timeout", HookEffect.DRAIN)),
    )


def _seconds(where: str, key: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise HooksInvalid(f"{where}: {key} must be {least:g} to {most:g} seconds, not {value!r}")
    return float(value)


def _names(where: str, key: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise HooksInvalid(f"{where}: {key} must be a list of names")
    return frozenset(value)


def _code(where: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 255:
        raise HooksInvalid(f"{where}: exit code {text!r} is not 1 to 255; 0 always means to go on")
    return int(text)


def _effect(where: str, kind: HookKind, value: Any) -> HookEffect:
    allowed = [HookEffect.DRAIN, HookEffect.WARN] + [HookEffect.FAIL] * (kind is HookKind.PROLOG)
    if value not in allowed:
        raise HooksInvalid(f"{where}: {value!r} is no effect of this hook; use {' or '.join(allowed)}")
    return HookEffect(value)
