"""What one cycle decided: placements for jobs that start, reasons for those that wait."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import JobId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.job import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A proposed allocation; it counts only once verified against the newest state and committed."""

    job_id: JobId
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Why a job does not start now: the dominant reason, and a sentence with who or what is in the way."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions against the snapshot of `version`. Equal snapshots give equal plans, byte for byte."""

    version: int
    placements: tuple[Placement, ...]
    waits: dict[JobId, Waiting]

    def placement(self, job_id: JobId) -> Placement | None:
        """The job's placement in this plan, or None."""
        return next((placement for placement in self.placements if placement.job_id == job_id), None)

    def waiting(self, job_id: JobId) -> Waiting:
        """Why the job waits.

        Raises:
            KeyError: it does not wait in this plan.
        """
        return self.waits[job_id]
