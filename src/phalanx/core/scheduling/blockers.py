"""Who is in the way of a waiting job: running jobs whose end would let it start, as few as are found, those that end soonest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry
from phalanx.core.scheduling.forecast import Forecast, Limit

LOOKED_AT_MAX: Final = 2000  # running jobs tried, those that end soonest; one costs a look-up on the board


def in_the_way(forecast: Forecast, entry: Entry | None) -> list[JobId]:
    """Who counts against the limit that keeps the job back; else who holds the room it needs.

    One job if one would do; else those that end first, without the ones that do not matter. Empty for a job that is not on the board,
    that starts anyway, or that nobody's end would help. The board is afterwards as before.
    """
    scheduler = forecast.trial.scheduler
    if entry is None or entry.since_s >= 0.0:
        return []
    limit = forecast.holders(entry)
    if limit is not None:
        found = [] if limit.never else _until_freed(forecast, limit)
    else:
        found = _holding_room(forecast, scheduler.board, entry)
    return [scheduler.ids[other.seq] for other in found]


def _holding_room(forecast: Forecast, board: Board, entry: Entry) -> list[Entry]:
    if not entry.klass.needs[0].devices or board.find(entry) is not None:
        return []
    kinds = {kind for need in entry.klass.needs for kind in need.kinds}
    usable = (
        other for other in board.running.values() if any(board.kind[number] in kinds for number, _ in other.places)
    )
    running = _by_end(forecast, usable)
    for other in running:
        board.give(other)
        fits = board.find(entry) is not None
        board.take(other)
        if fits:
            return [other]
    given: list[Entry] = []
    for other in running:
        board.give(other)
        given.append(other)
        if board.find(entry) is not None:
            return _needed(board, entry, given)
    for other in given:
        board.take(other)
    return []


def _needed(board: Board, entry: Entry, given: list[Entry]) -> list[Entry]:
    """Take back what the job can do without, those that end last first: the wait shall be short; and then the others."""
    needed: list[Entry] = []
    for other in reversed(given):
        board.take(other)
        if board.find(entry) is None:
            board.give(other)
            needed.append(other)
    for other in needed:
        board.take(other)
    return needed[::-1]


def _until_freed(forecast: Forecast, limit: Limit) -> list[Entry]:
    """The first to end that together free what the limit is passed by; none if all of them do not."""
    freed = 0.0
    gone: list[Entry] = []
    for entry in _by_end(forecast, limit.holders):
        if freed >= limit.over:
            break
        gone.append(entry)
        freed += 1 if limit.jobs else entry.gpus
    return gone if freed >= limit.over else []


def _by_end(forecast: Forecast, entries: Iterable[Entry]) -> list[Entry]:
    """Those that end first, first; by seq where nobody knows."""

    def key(entry: Entry) -> tuple[float, float, int]:
        left = forecast.left_of(entry)
        return left.high_s, left.low_s, entry.seq

    return sorted(entries, key=key)[:LOOKED_AT_MAX]
