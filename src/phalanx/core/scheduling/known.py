"""The part of the scheduler that explanations read."""

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
    """A view of the scheduler; see `scheduler.Scheduler` for its attributes."""

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
        """Started by the policy, not yet placed."""

    def why(self, job: Job) -> Waiting | None:
        """Why the pending job waits."""

    def reserved_for(self, job: Job) -> str:
        """The reservation that keeps the job off its nodes."""
