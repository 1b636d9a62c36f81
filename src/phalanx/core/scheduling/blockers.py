"""Finds the running jobs whose end would let a waiting job start: as few as possible, those that end soonest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry
from phalanx.core.scheduling.forecast import Forecast, Limit

LOOKED_AT_MAX: Final = 2000  # running jobs tried, soonest end first; each costs a look-up on the board


def in_the_way(forecast: Forecast, entry: Entry | None) -> list[JobId]:
    """The jobs that count against the limit that blocks the job; else the jobs on the devices it needs.

    One job if one suffices; else those that end first, without unnecessary ones. Empty for a job that is not on the board, that starts
    anyway, or that no job's end would help. The board is unchanged afterwards.
    """
    scheduler = forecast.trial.scheduler
    if entry is None or entry.since_s >= 0.0:
        return []
    limit = forecast.holders(entry)
    if limit is not None:
        found = [] if limit.never else _until_freed(forecast, limit)
    else:
        found = _on_needed_devices(forecast, scheduler.board, entry)
    return [scheduler.ids[other.seq] for other in found]


def _on_needed_devices(forecast: Forecast, board: Board, entry: Entry) -> list[Entry]:
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
    removed: list[Entry] = []
    for other in running:
        board.give(other)
        removed.append(other)
        if board.find(entry) is not None:
            return _needed(board, entry, removed)
    for other in removed:
        board.take(other)
    return []


def _needed(board: Board, entry: Entry, removed: list[Entry]) -> list[Entry]:
    """Put unnecessary jobs back, those that end last first, so that the wait is short; then the others."""
    needed: list[Entry] = []
    for other in reversed(removed):
        board.take(other)
        if board.find(entry) is None:
            board.give(other)
            needed.append(other)
    for other in needed:
        board.take(other)
    return needed[::-1]


def _until_freed(forecast: Forecast, limit: Limit) -> list[Entry]:
    """The first to end that together free the excess over the limit; empty if all of them do not."""
    freed = 0.0
    ending: list[Entry] = []
    for entry in _by_end(forecast, limit.holders):
        if freed >= limit.over:
            break
        ending.append(entry)
        freed += 1 if limit.jobs else entry.gpus
    return ending if freed >= limit.over else []


def _by_end(forecast: Forecast, entries: Iterable[Entry]) -> list[Entry]:
    """Those that end first, first; unknown ends by seq."""

    def key(entry: Entry) -> tuple[float, float, int]:
        left = forecast.left_of(entry)
        return left.high_s, left.low_s, entry.seq

    return sorted(entries, key=key)[:LOOKED_AT_MAX]
