"""When MIG slices become free: running jobs are freed on the board in the order in which they end, until the request fits. The board is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.needs import Need, Places
from phalanx.core.scheduling.pool import HeldShare

NEVER_FREE: Final = float("inf")
_Held = tuple[Need, Places, tuple[HeldShare, ...]]


def slices_free_at_s(
    board: Board, needs: Sequence[Need], excluded: int, ahead: Sequence[JobEntry], ends_s: Callable[[JobEntry], float]
) -> float:
    """When the first of the needs fits, in seconds from now; infinite if it never does.

    Args:
        board: restored before the return.
        needs: of the job, for MIG slices.
        excluded: nodes that the job may not use, as a bitset.
        ahead: jobs that get slices first, in order. Each keeps them.
        ends_s: when a running job ends, in seconds from now.
    """
    kinds = {kind for need in needs for kind in need.kinds}
    running = [
        other for other in board.running.values() if any(board.pool_of_node[node] in kinds for node, _ in other.places)
    ]
    running.sort(key=lambda other: (ends_s(other), other.seq))
    line: list[tuple[Sequence[Need], int]] = [(one.job_class.needs, one.job_class.excluded) for one in ahead]
    line.append((needs, excluded))
    freed: list[JobEntry] = []
    taken: list[_Held] = []
    found_s = NEVER_FREE
    for other, at_s in [(None, 0.0), *((one, ends_s(one)) for one in running)]:
        if at_s == NEVER_FREE:
            break
        if other is not None:
            board.free_devices(other)
            freed.append(other)
        while line and _take_first(board, *line[0], taken):
            line.pop(0)
        if not line:
            found_s = at_s
            break
    for held in reversed(taken):
        board.vacate(*held)
    for other in reversed(freed):
        board.retake_devices(other)
    return found_s


def _take_first(board: Board, needs: Sequence[Need], excluded: int, taken: list[_Held]) -> bool:
    """Take the places of the first need that fits; returns whether one does."""
    for need in needs:
        places = board.find_need(need, excluded)
        if places is not None:
            taken.append((need, places, board.occupy(need, places)))
            return True
    return False
