"""Since when a held part has had its new state, where that becomes known only later, and which earlier states it then replaces. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from phalanx.core.accounting.activity import Activity
from phalanx.core.accounting.usage_states import PartState, StepActivity, UsageState

_ACTIVE: Final = frozenset({UsageState.COMPUTING, UsageState.LOW})
BY_ACTIVITY: Final = frozenset({UsageState.IDLE, UsageState.UNOCCUPIED, *_ACTIVE})
ANY_STATE: Final = frozenset(UsageState)
_WAITS: Final = frozenset({UsageState.DATA_BOUND, UsageState.COMMUNICATING})
_MAKING_STEPS: Final = _ACTIVE | _WAITS
# States that follow each other by activity alone, so that a change counts from the sample with which it began.
_FOLLOWING: Final = {**dict.fromkeys(BY_ACTIVITY, BY_ACTIVITY), UsageState.STARTING: _ACTIVE}
_FOLLOWING_BY_STEPS: Final = dict.fromkeys(_ACTIVE, _ACTIVE)


class StateBegin(NamedTuple):
    """When a state began, None for now, and the states that it replaces from then on."""

    since_ms: int | None = None
    replaces: frozenset[UsageState] = frozenset()


def state_begin(
    before: PartState | None,
    state: PartState,
    activity: Activity | None,
    steps: StepActivity | None,
    arrived_ms: int,
) -> StateBegin:
    """Find out when a state began that is recognized now.

    Args:
        before: what the part has been so far; None if it is new.
        state: what it is now.
        activity: of the device; None without samples.
        steps: of the job; None without reports.
        arrived_ms: when its newest step was reported.
    """
    if steps is not None and state.state is UsageState.HUNG:
        return StateBegin(arrived_ms + int(steps.gap_s * 1000), _MAKING_STEPS)
    if before is None or state == before:
        return StateBegin()
    both = {before.state, state.state}
    if steps is not None and not steps.announced and both <= _MAKING_STEPS and both & _WAITS:
        return StateBegin(arrived_ms - int(steps.share_s * 1000), _MAKING_STEPS)
    following = _FOLLOWING if steps is None else _FOLLOWING_BY_STEPS
    if activity is not None and state.state in following.get(before.state, ()):
        return StateBegin(activity.since_ms, BY_ACTIVITY)
    return StateBegin()
