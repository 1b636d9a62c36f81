"""Finds the ranks that caused a hang, from the position of each rank when its stacks were taken.

The culprit is the rank that is not where the others wait: they are in the collective that it did not enter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.core.work.attempt import TaskExit
from phalanx.core.work.failure import StuckPosition

_STOPPED = ("T", "t")  # by a signal, by a debugger
_NAMED_MAX = 3


def find_culprits(exits: Sequence[TaskExit]) -> tuple[tuple[TaskExit, ...], str]:
    """The ranks that blocked the others, by rank, and how they were found; or no rank, and why none could be found.

    Tried in this order: a stopped rank; a rank that waits in the kernel while others do not; a rank outside the collective in which
    others wait; a rank behind by a step; a rank in another place than most.
    """
    ranked = sorted(exits, key=lambda exit: exit.rank)
    known = [(exit, exit.evidence.stuck_position) for exit in ranked if exit.evidence is not None]
    stances = [(exit, position) for exit, position in known if position is not None]
    if not stances:
        return (), "no stack could be taken"
    if len(stances) == 1:
        return (stances[0][0],), _position(stances[0][1])
    stopped = [(exit, position) for exit, position in stances if position.state in _STOPPED]
    if stopped and len(stopped) < len(stances):
        return _culprits_with_reason(stopped, "stopped by a signal")
    asleep = [(exit, position) for exit, position in stances if position.state == "D"]
    if asleep and len(asleep) < len(stances):
        return _culprits_with_reason(asleep, "waits in the kernel")
    outside = [(exit, position) for exit, position in stances if not position.in_collective and position.frame]
    waiting = sum(position.in_collective for _, position in stances)
    if outside and waiting:
        return _culprits_with_reason(outside, f"is not in the collective in which {waiting} wait")
    behind = _behind(stances)
    if behind:
        return _culprits_with_reason(behind, "made the fewest steps")
    return _odd_one_out(stances)


def _behind(stances: Sequence[tuple[TaskExit, StuckPosition]]) -> list[tuple[TaskExit, StuckPosition]]:
    steps = [-1 if position.step is None else position.step for _, position in stances]
    least = min(steps)
    return [one for one, step in zip(stances, steps, strict=True) if step == least] if max(steps) > least else []


def _odd_one_out(stances: Sequence[tuple[TaskExit, StuckPosition]]) -> tuple[tuple[TaskExit, ...], str]:
    places = Counter(position.frame for _, position in stances)
    usual, count = max(places.items(), key=lambda item: (item[1], item[0]))
    odd = [(exit, position) for exit, position in stances if position.frame != usual]
    if odd and 2 * count > len(stances):
        return _culprits_with_reason(odd, f"is not where {count} others are")
    if len(places) == 1:
        return (), f"all ranks are in the same place: {_position(stances[0][1])}"
    return (), "the ranks are in different places"


def _culprits_with_reason(
    found: Sequence[tuple[TaskExit, StuckPosition]], why: str
) -> tuple[tuple[TaskExit, ...], str]:
    return tuple(exit for exit, _ in found), f"{why}: {_position(found[0][1])}"


def _position(position: StuckPosition) -> str:
    return position.frame or (f"state {position.state}" if position.state else "its position is unknown")


def explain_hang(exits: Sequence[TaskExit]) -> str:
    """`rank 1 on n0 is not in the collective in which 3 wait: sleep (train.py:12)`."""
    found, why = find_culprits(exits)
    if not found:
        return f"the rank that caused it is unknown: {why}"
    names = ", ".join(f"rank {exit.rank} on {exit.node_id}" for exit in found[:_NAMED_MAX])
    more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return f"{names}{more}: {why}"
