"""The result of one scheduling cycle: placements for jobs that start, stops for preempted jobs, reasons for those that wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.core.ids import JobId, NodeId, PoolId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import WaitReasonCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A proposed allocation; it takes effect once verified against the newest state and committed.

    `speed`: of the job there, as a share of that on its fastest model; 1 if it was not observed.
    """

    job_id: JobId
    allocation: Allocation
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStop:
    """Stop a running job: it saves and stops, then waits again (PREEMPTED) or continues elsewhere (MOVED).

    Attributes:
        why: shown to its owner: which job preempts it, and by which rule.
        preempted_by: the job that preempts it; None if it is moved for its own benefit.
    """

    job_id: JobId
    cause: EndCause
    why: str
    preempted_by: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReason:
    """Why a job does not start now: the main reason, and a sentence that names what blocks it."""

    reason: WaitReasonCode
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNodes:
    """Nodes of a pool that would be worth starting. `job_ids`: the jobs that wait for them; none if they only fill the pool's minimum."""

    pool: PoolId
    count: int
    why: str
    job_ids: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions against the state of `version`. Equal states give equal plans, byte for byte.

    Attributes:
        placements: in the order granted.
        stops: in the order decided; carried out before the placements.
        waits: why each other pending job waits, computed on access.
        wanted: nodes of pools that would be worth starting; empty if that was computed a moment ago.
        needed: nodes of the fleet that waiting jobs need, although they may be idle; None if that was computed a moment ago.
        decided: the policy ran; False if nothing had changed.
        wake_s: when to plan again even if nothing happens; infinite for never.
    """

    version: int
    placements: tuple[Placement, ...]
    waits: Mapping[JobId, WaitReason]
    stops: tuple[PlannedStop, ...] = ()
    wake_s: float = float("inf")
    decided: bool = True
    wanted: tuple[WantedNodes, ...] = ()
    needed: frozenset[NodeId] | None = None

    def placement(self, job_id: JobId) -> Placement | None:
        """The job's placement in this plan, or None."""
        return next((placement for placement in self.placements if placement.job_id == job_id), None)

    def stop(self, job_id: JobId) -> PlannedStop | None:
        """The job's stop in this plan, or None."""
        return next((stop for stop in self.stops if stop.job_id == job_id), None)

    def waiting(self, job_id: JobId) -> WaitReason:
        """Why the job waits.

        Raises:
            KeyError: it does not wait in this plan.
        """
        return self.waits[job_id]
