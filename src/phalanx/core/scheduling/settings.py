"""The scheduler's configuration, and the options that a live head accepts for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.estimates.move_times import GROW_PER_MOVE
from phalanx.core.scheduling.policies import LEARNING_POLICIES, POLICIES, PolicyParameters, policy_named
from phalanx.core.scheduling.policy import Policy
from phalanx.core.units import format_duration
from phalanx.core.work.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The configuration of a scheduler.

    Attributes:
        name: one of `policies.POLICIES`, or `module:Class`.
        parameters: of the policies in `LEARNING_POLICIES`.
        make: constructor of a policy that is not built in.
        placements_max: most placements per cycle; the rest follows in the next.
        restart_cost_s: the cost of a preemption or move for a job that saves when asked: its restart.
        run_time_of: what policies may know of a job's total run time, in seconds; None: its time limit.
        demand_every_s: time between two looks at what waiting jobs need of pools, at least.
    """

    name: str = "default"
    parameters: PolicyParameters = field(default_factory=PolicyParameters)
    placements_max: int = 512
    restart_cost_s: float = 60.0
    run_time_of: Callable[[Job], float] | None = None
    make: Callable[[], Policy] | None = None
    demand_every_s: float = 1.0

    def create_policy(self) -> Policy:
        """Create the policy of a scheduler.

        Raises:
            BadRequest: no policy has this name.
        """
        if self.make is not None:
            return self.make()
        learning = LEARNING_POLICIES.get(self.name)
        return policy_named(self.name)() if learning is None else learning(self.parameters)


# They order by exact run times, which are only known in a replayed trace.
REFERENCE_POLICIES: Final = ("sjf", "srtf")
LIVE_POLICIES: Final = tuple(name for name in POLICIES if name not in REFERENCE_POLICIES)
MIN_TIME_MAX_S: Final = 7 * 86400.0  # a longer guarantee means never stopping a job: forbid preemption instead


def check_live_policy(name: str) -> None:
    """Check that a live head supports the policy.

    Raises:
        BadRequest: no such policy, or one that needs exact run times. A `module:Class` is not imported here.
    """
    if name in REFERENCE_POLICIES:
        raise BadRequest(
            f"policy {name} orders jobs by their exact run times, which are unknown for live jobs",
            hint=f"it is a reference for simulations; a head accepts: {', '.join(LIVE_POLICIES)}",
        )
    if name not in LIVE_POLICIES and ":" not in name:
        raise BadRequest(f"unknown policy {name!r}", hint=f"one of: {', '.join(LIVE_POLICIES)}")


def live_policy_settings(
    name: str = "default",
    *,
    min_run_s: float | None = None,
    min_run_by_right_s: float | None = None,
    min_stay_s: float | None = None,
    preemption: bool = True,
    make: Callable[[], Policy] | None = None,
) -> PolicySettings:
    """The policy of a head.

    Args:
        name: one of LIVE_POLICIES, or `module:Class`.
        min_run_s: guaranteed run after a start, against jobs of equal priority; None here and below: the policy's default.
        min_run_by_right_s: the same against a higher priority and against the owner of borrowed quota.
        min_stay_s: least time between two moves of a job whose queue sets none; growing takes twice as long. None: by what a move costs the job.
        preemption: whether running jobs may be stopped or moved for others at all.
        make: constructor of a policy that is not built in.

    Raises:
        BadRequest: no live policy has this name, or a time is out of bounds.
    """
    check_live_policy(name)
    knobs = PolicyParameters()
    for name_of_time, seconds in (
        ("min_run", min_run_s),
        ("min_run_by_right", min_run_by_right_s),
        ("min_stay", min_stay_s),
    ):
        if seconds is not None and not 1.0 <= seconds <= MIN_TIME_MAX_S:
            raise BadRequest(
                f"{name_of_time}: {format_duration(seconds)} is not between 1 s and {format_duration(MIN_TIME_MAX_S)}"
            )
    if min_run_s is not None:
        knobs = replace(knobs, run_min_s=min_run_s)
    if min_run_by_right_s is not None:
        knobs = replace(knobs, run_min_by_right_s=min_run_by_right_s)
    if min_stay_s is not None:
        knobs = replace(knobs, move_min_s=min_stay_s, grow_min_s=GROW_PER_MOVE * min_stay_s)
    return PolicySettings(
        name=name, parameters=replace(knobs, allow_stops=preemption, allow_moves=preemption), make=make
    )
