"""What those who explain the scheduler read of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry
from phalanx.core.scheduling.fit import Fit
from phalanx.core.scheduling.policy import Policy
from phalanx.core.state.plan import Waiting
from phalanx.core.work.job import Job


class Known(Protocol):
    """The scheduler's books; see `scheduler.Scheduler` for each.

    Attributes:
        said: why classes wait, kept until something changes.
        held_over: the last cycle has placed its share, and some are left.
    """

    policy: Policy
    board: Board
    fit: Fit
    entries: dict[JobId, Entry]
    ids: dict[int, JobId]
    parked: dict[JobId, Waiting]
    said: dict[tuple[int, int], Waiting]
    held_over: bool

    @property
    def due(self) -> Collection[JobId]:
        """Started by the policy, and not placed yet."""

    def why(self, job: Job) -> Waiting | None:
        """Why the pending job waits."""

    def reserved_for(self, job: Job) -> str:
        """Which reservation keeps the job off its nodes."""
