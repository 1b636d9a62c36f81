"""What one step of the controller hands to its shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import PhalanxError
from phalanx.core.fleet.node import Node
from phalanx.core.ids import NodeId
from phalanx.core.state.commands import Command
from phalanx.core.state.world import Change
from phalanx.core.work.job import Job
from phalanx.core.work.people import Token, User
from phalanx.core.work.queue import Project, Queue

Answer = Job | Node | Queue | Project | User | Token | list[Job] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The two clocks of one step: Unix seconds for records, CLOCK_BOOTTIME seconds for leases and limits (nobody sets it)."""

    wall_s: float
    boot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """Nothing in here may leave before `change` is committed.

    Attributes:
        answers: one for each event of the inbox, in order; an error for a refused one.
        commands: for supervisors, in order.
        lost: nodes whose leases end with this commit.
        wake_in_s: step again after at most this long, even with an empty inbox.
    """

    change: Change
    answers: Sequence[Answer | PhalanxError]
    commands: Sequence[Command]
    lost: Sequence[NodeId]
    wake_in_s: float
