"""What is known of a failure, and what was made of it: evidence as a supervisor collects it, the verdict as the head keeps it.

Words only. Which evidence means what is a table of rules (`core.recovery.rules`); what a verdict leads to is the attempt machine's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

LINES_MAX: Final = 12
"""Last lines of a rank's output in its evidence: a Python error and what a library printed around it; the rest is in the log."""
LINE_CHARS_MAX: Final = 300
XIDS_MAX: Final = 16  # different ones since the attempt began: a storm repeats few of them


class Blame(enum.StrEnum):
    """Whose failure it is."""

    USER = "user"  # the job's own doing: it would fail elsewhere too
    INFRASTRUCTURE = "infrastructure"  # a node, a device, a link
    PREEMPTED = "preempted"  # somebody took the place away
    ECHO = "echo"  # a peer's death, as its neighbours see it: not the cause


class Remedy(enum.StrEnum):
    """What is done about it."""

    HERE = "here"  # the gang starts again in place
    ELSEWHERE = "elsewhere"  # placed again, without that node while others will do
    DRAIN = "drain"  # the same, and the node is drained with the evidence
    STOP = "stop"  # the job ends: another try would end the same way


class Charge(enum.StrEnum):
    """Which budget a restart is taken from."""

    RETRY = "retry"  # the job's own `retry`
    PROGRESS = "progress"  # restarts without progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Stance:
    """Where one rank stood when its gang hung.

    Attributes:
        state: of its main thread in /proc: R runs, S sleeps, D waits in the kernel, T is stopped.
        where: innermost Python frame, `function (file.py:12)`; "" where no stack could be taken.
        waits: it stands in a collective, by its stack.
        step: last one it reported; None before its first.
    """

    state: str = ""
    where: str = ""
    waits: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a supervisor found of one rank that ended badly, or that it ended because the gang hung.

    Attributes:
        lines: the end of what it printed, oldest first.
        xids: errors of the GPU driver on this node since the attempt began, in order of their first coming.
        oom_killed: the kernel killed a process of the job for want of memory.
        stance: of a gang that hung.
    """

    lines: tuple[str, ...] = ()
    xids: tuple[int, ...] = ()
    oom_killed: bool = False
    stance: Stance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rules made of one failure.

    Attributes:
        rule: its name, as `phalanx rules show` lists it.
        says: the failure in words: "XID 79: the GPU has fallen off the bus".
        weight: what it counts against the node (`core.recovery.lemon`); 0 where it says nothing of the node.
        line: of the output, what it was read from; "" where it was another sign.
    """

    rule: str
    blame: Blame
    remedy: Remedy
    charge: Charge
    says: str
    weight: float = 0.0
    line: str = ""
