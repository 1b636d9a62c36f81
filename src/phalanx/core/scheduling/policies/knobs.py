"""The constants of the default policy; docs/decisions/0018 says where each comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """How the policy weighs and waits.

    Attributes:
        round_s: room is made by value for waiting jobs this often; what fits starts at once.
        boost: how much more a gang of a whole node or more counts.
        hysteresis: a stop must bring this many times what it takes.
        run_min_s: guaranteed run after a start, against equals.
        right_min_s: the same against a higher priority and against the owner of what was borrowed.
        move_min_s: least time between two moves of a job.
        stops_max: preemptions of one job; past that nobody stops it but its own quota.
        grow_min_s: an elastic job grows no sooner after it started or moved.
        refit_s: hazards are computed anew this often.
        overdue_s: least wait after which a job is overdue; never reached when infinite.
        patience: mean service times after which a job is overdue, where that is longer than `overdue_s`.
        crowd: how far the limit stretches for each fleet's worth of GPUs that waited before the job.
        lane: share of the fleet that overdue jobs may hold ahead of everyone.
    """

    round_s: float = 30.0
    boost: float = 5.0
    hysteresis: float = 8.0
    run_min_s: float = 1800.0
    right_min_s: float = 60.0
    move_min_s: float = 300.0
    stops_max: int = 64
    grow_min_s: float = 600.0
    refit_s: float = 3600.0
    overdue_s: float = 432_000.0
    patience: float = 25.0
    crowd: float = 12.0
    lane: float = 0.0625
    stops: bool = True
    moves: bool = True
