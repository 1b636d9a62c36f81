"""The constants of the default policy; docs/decisions/0018 gives the source of each, and 0106 that of the limit after which a job is overdue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParameters:
    """The parameters of the default policy.

    Attributes:
        round_s: interval at which jobs are displaced by value for waiting jobs; jobs that fit start at once.
        gang_weight: weight of a gang of a whole node or more.
        hysteresis: factor by which the value of a stop must exceed its cost.
        run_min_s: guaranteed run after a start, against jobs of equal priority.
        run_min_by_right_s: the same against a higher priority and against the owner of borrowed quota.
        move_min_s: least time between two moves of a job whose queue sets none; None: it follows from what a move costs the job (`MoveTimes`).
        stops_max: preemptions of one job; past that only a reclaim of quota stops it. Past as many preemptions and moves no job of equal
            priority displaces it.
        grow_min_s: least time between a start or move of an elastic job and its growth; None: twice the time after which it may move.
        refit_s: interval at which hazards are recomputed.
        overdue_s: least time not served after which a job is overdue; infinite to disable.
        overdue_service_factor: mean service times after which a job is overdue, if longer than `overdue_s`.
        overdue_load_factor: factor by which the limit grows for each fleet's worth of GPUs that waited before the job.
        overdue_share: share of the fleet that overdue jobs may use ahead of all other jobs.
        allow_stops, allow_moves: whether running jobs may be stopped, or moved, for others at all.
    """

    round_s: float = 30.0
    gang_weight: float = 5.0
    hysteresis: float = 8.0
    run_min_s: float = 1800.0
    run_min_by_right_s: float = 60.0
    move_min_s: float | None = None
    stops_max: int = 64
    grow_min_s: float | None = None
    refit_s: float = 3600.0
    overdue_s: float = 259_200.0
    overdue_service_factor: float = 5.0
    overdue_load_factor: float = 2.0
    overdue_share: float = 0.125
    allow_stops: bool = True
    allow_moves: bool = True
