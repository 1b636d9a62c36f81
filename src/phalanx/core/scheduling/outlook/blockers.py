"""Finds the running jobs whose end would let a waiting job start: as few as possible, those that end soonest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.outlook.forecast import BlockingLimit, Forecast

JOBS_EXAMINED_MAX: Final = 2000  # running jobs tried, soonest end first; each costs a look-up on the board


def find_blockers(forecast: Forecast, entry: JobEntry | None) -> list[JobId]:
    """The jobs that count against the limit that blocks the job; else the jobs on the devices it needs.

    One job if one suffices; else those that end first, without unnecessary ones. Empty for a job that is not on the board, that starts
    anyway, or that no job's end would help. The board is unchanged afterwards.
    """
    scheduler = forecast.trial.scheduler
    if entry is None or entry.started_s >= 0.0:
        return []
    limit = forecast.blocking_limit(entry)
    if limit is not None:
        found = [] if limit.impossible else _until_freed(forecast, limit)
    else:
        found = _on_needed_devices(forecast, scheduler.board, entry)
    return [scheduler.job_id_by_seq[other.seq] for other in found]


def _on_needed_devices(forecast: Forecast, board: Board, entry: JobEntry) -> list[JobEntry]:
    if not entry.job_class.milli or board.find(entry) is not None:
        return []
    kinds = {kind for need in entry.job_class.needs for role in need.roles for kind in role.kinds}
    usable = (
        other
        for other in board.running.values()
        if any(board.pool_of_node[number] in kinds for number, _ in other.places)
    )
    running = _by_end(forecast, usable)
    for other in running:
        board.free_devices(other)
        fits = board.find(entry) is not None
        board.retake_devices(other)
        if fits:
            return [other]
    removed: list[JobEntry] = []
    for other in running:
        board.free_devices(other)
        removed.append(other)
        if board.find(entry) is not None:
            return _needed(board, entry, removed)
    for other in removed:
        board.retake_devices(other)
    return []


def _needed(board: Board, entry: JobEntry, removed: list[JobEntry]) -> list[JobEntry]:
    """Put unnecessary jobs back, those that end last first, so that the wait is short; then the others."""
    needed: list[JobEntry] = []
    for other in reversed(removed):
        board.retake_devices(other)
        if board.find(entry) is None:
            board.free_devices(other)
            needed.append(other)
    for other in needed:
        board.retake_devices(other)
    return needed[::-1]


def _until_freed(forecast: Forecast, limit: BlockingLimit) -> list[JobEntry]:
    """The first to end that together free the excess over the limit; empty if all of them do not."""
    freed = 0.0
    ending: list[JobEntry] = []
    for entry in _by_end(forecast, limit.holders):
        if freed >= limit.excess:
            break
        ending.append(entry)
        freed += limit.share_of(entry)
    return ending if freed >= limit.excess else []


def _by_end(forecast: Forecast, entries: Iterable[JobEntry]) -> list[JobEntry]:
    """Those that end first, first; unknown ends by seq."""

    def key(entry: JobEntry) -> tuple[float, float, int]:
        left = forecast.remaining_time(entry)
        return left.high_s, left.low_s, entry.seq

    return sorted(entries, key=key)[:JOBS_EXAMINED_MAX]
