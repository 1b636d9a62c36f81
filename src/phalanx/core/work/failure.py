"""Failure records: evidence as a supervisor collects it, and the diagnosis that the head stores.

Records only. The failure rules (`core.recovery.failure_rules`) map evidence to diagnoses; the attempt machine acts on a diagnosis.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.units import format_bytes

EVIDENCE_LINES_MAX: Final = 12
"""Last lines of a rank's output in its evidence: a Python error and library messages around it; the rest is in the log."""
EVIDENCE_LINE_CHARS_MAX: Final = 300
XIDS_MAX: Final = 16  # distinct codes since the attempt began: a storm repeats a few of them


class FailureAttribution(enum.StrEnum):
    """What a failure is attributed to; `blame` in rule files."""

    USER = "user"  # the job's own error: it would fail elsewhere too
    INFRASTRUCTURE = "infrastructure"  # a node, a device, a link
    PREEMPTED = "preempted"  # the scheduler or an operator took the nodes back
    FOLLOW_ON = "echo"  # a follow-on failure after the death of a peer


class FailureReaction(enum.StrEnum):
    """The reaction to a failure."""

    RESTART_IN_PLACE = "here"  # the gang starts again in place
    RESTART_ELSEWHERE = "elsewhere"  # placed again; avoids that node while others suffice
    DRAIN = "drain"  # the same, and the node is drained, with the evidence as reason
    STOP = "stop"  # the job ends: a retry would fail the same way


class RestartBudget(enum.StrEnum):
    """The budget that a restart is charged to."""

    RETRY = "retry"  # the job's own `retry`
    PROGRESS = "progress"  # restarts without progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckPosition:
    """Where one rank was stuck when its gang hung.

    Attributes:
        state: of its main thread in /proc: R runs, S sleeps, D waits in the kernel, T is stopped.
        frame: innermost Python frame, `function (file.py:12)`; "" if no stack could be captured.
        in_collective: by its stack, it waits in a collective.
        step: the last step it reported; None before its first.
    """

    state: str = ""
    frame: str = ""
    in_collective: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOveruse:
    """The processes of a job on one node needed more memory than the job asked for there.

    Attributes:
        used_bytes: what they used when they were stopped. The kernel stops them at their limit, the watchdog above it.
        asked_bytes: what the job asked for.
        gpu: the shared device whose memory it is; None for the node's memory.
    """

    used_bytes: int
    asked_bytes: int
    gpu: int | None = None

    def __str__(self) -> str:
        """`out of memory: used 3.1 GiB of the 2 GiB asked for`."""
        used, asked = format_bytes(self.used_bytes), format_bytes(self.asked_bytes)
        if self.gpu is not None:
            return f"out of GPU memory: used {used} of GPU {self.gpu}, its share has {asked}"
        return f"out of memory: used {used} of the {asked} asked for"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvidence:
    """Signs that a supervisor found of one rank that failed, or that it ended because the gang hung.

    Attributes:
        lines: the end of its output, oldest first.
        xids: errors of the GPU driver on this node since the attempt began, by first occurrence.
        oom_killed: the kernel killed a process of the job when memory ran out.
        stuck_position: where the rank was stuck, if the gang hung.
        memory: the limit of the job's own memory that was the reason, if one was.
    """

    lines: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    oom_killed: bool = False
    stuck_position: StuckPosition | None = None
    memory: MemoryOveruse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDiagnosis:
    """The result of the failure rules for one failure.

    Attributes:
        rule: its name, as listed by `phalanx rules show`.
        description: the failure in words: "XID 79: the GPU has fallen off the bus".
        weight: what it adds to the node's fault score (`core.recovery.bad_nodes`); 0 if it says nothing about the node.
        line: the output line that matched; "" if another sign matched.
    """

    rule: str
    attribution: FailureAttribution
    remedy: FailureReaction
    charge: RestartBudget
    description: str
    weight: float = 0.0
    line: str = ""
