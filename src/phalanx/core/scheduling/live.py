"""How a live head schedules: which policies it takes, and the constants of the default one that an operator may turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.policies import POLICIES, Knobs
from phalanx.core.scheduling.policy import Policy
from phalanx.core.units import format_duration

YARDSTICKS: Final = ("sjf", "srtf")  # they order by exact durations, which only a replayed trace knows
LIVE: Final = tuple(name for name in POLICIES if name not in YARDSTICKS)
MIN_TIME_MAX_S: Final = (
    7 * 86400.0
)  # a guarantee for longer than a week is a job that is never stopped: `--no-preemption`
GROW_PER_MOVE: Final = Knobs().grow_min_s / Knobs().move_min_s  # an elastic job that shrank shall not grow back at once


def check_live(name: str) -> None:
    """Whether a live head can follow the policy.

    Raises:
        BadRequest: no such policy, or one that needs to know how long jobs take.
    """
    if name in YARDSTICKS:
        raise BadRequest(
            f"--policy {name} orders jobs by how long they will take, and of live jobs nobody knows that",
            hint=f"it is a yardstick for phalanx simulate; live take one of: {', '.join(LIVE)}",
        )
    if name not in LIVE:
        raise BadRequest(f"there is no policy {name!r}", hint=f"one of: {', '.join(LIVE)}")


def live_policy(
    name: str = "default", *, min_run_s: float | None = None, min_run_by_right_s: float | None = None, min_stay_s: float | None = None,
    preemption: bool = True,
) -> Policy:  # fmt: skip
    """The policy of a head.

    Args:
        name: one of LIVE.
        min_run_s: guaranteed run after a start against equals; None: as the policy has it, here and below.
        min_run_by_right_s: the same against a higher priority and against the owner of what was borrowed.
        min_stay_s: least time between two moves of a job; growing takes twice as long.
        preemption: whether running jobs may be stopped or moved for others at all.

    Raises:
        BadRequest: no live policy has this name, or a time is out of bounds.
    """
    check_live(name)
    knobs = Knobs()
    for flag, seconds in (("--min-run", min_run_s), ("--min-run-by-right", min_run_by_right_s), ("--min-stay", min_stay_s)):  # fmt: skip
        if seconds is not None and not 1.0 <= seconds <= MIN_TIME_MAX_S:
            raise BadRequest(f"{flag} {format_duration(seconds)}: must lie between 1 s and {format_duration(MIN_TIME_MAX_S)}")  # fmt: skip
    if min_run_s is not None:
        knobs = replace(knobs, run_min_s=min_run_s)
    if min_run_by_right_s is not None:
        knobs = replace(knobs, right_min_s=min_run_by_right_s)
    if min_stay_s is not None:
        knobs = replace(knobs, move_min_s=min_stay_s, grow_min_s=GROW_PER_MOVE * min_stay_s)
    return Policy(name=name, knobs=replace(knobs, stops=preemption, moves=preemption))
