"""Batches the changes of waiting jobs: jobs that leave their lines or change class are collected and removed together. Called by the scheduler.

Removing one job makes the policy scan its whole line: removing ten thousand array elements one by one would scan a hundred million
positions. So the scheduler collects them while it synchronises jobs, and removes them at the end. The batch must be empty when a policy
decides.
"""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry, Klass


class LineChanges:
    """The collected changes, in order. Each job occurs once."""

    __slots__ = ("_gone", "_reclassed")

    def __init__(self) -> None:
        self._gone: list[Entry] = []
        self._reclassed: list[tuple[Entry, Klass]] = []

    def clear(self) -> None:
        """The board is new: its lines are empty."""
        self._gone.clear()
        self._reclassed.clear()

    def goes(self, entry: Entry) -> None:
        """The waiting job is gone."""
        self._gone.append(entry)

    def becomes(self, entry: Entry, klass: Klass) -> None:
        """The waiting job belongs to this class from now on."""
        self._reclassed.append((entry, klass))

    def carry_out(self, board: Board) -> None:
        """Apply all collected changes. Cost: one scan of each line that jobs leave, and the jobs that join other lines."""
        if self._gone:
            gone, self._gone = self._gone, []
            board.withdraw_together(gone)
        self.reclass(board)

    def reclass(self, board: Board) -> None:
        """Apply only changes of class: before a new job joins, since a policy may group jobs by the order in which they joined."""
        if self._reclassed:
            changed, self._reclassed = self._reclassed, []
            board.reclass(changed)
