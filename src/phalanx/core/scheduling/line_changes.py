"""Waiting jobs that leave their lines, or go to others: noted one by one, carried out together. Called by the scheduler.

Whoever leaves alone makes his policy go through the whole line: ten thousand elements of an array, one by one, through a hundred million
places. So the scheduler notes all who leave while it looks at jobs, and has them taken out at the end of each such look. Nothing may be
left here when a policy decides.
"""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry, Klass


class LineChanges:
    """What is noted and not carried out yet, in the order in which it was noted. A job is noted once."""

    __slots__ = ("_gone", "_reclassed")

    def __init__(self) -> None:
        self._gone: list[Entry] = []
        self._reclassed: list[tuple[Entry, Klass]] = []

    def clear(self) -> None:
        """The board is another: nobody stands in its lines yet."""
        self._gone.clear()
        self._reclassed.clear()

    def goes(self, entry: Entry) -> None:
        """The waiting job is gone."""
        self._gone.append(entry)

    def becomes(self, entry: Entry, klass: Klass) -> None:
        """The waiting job is of this class from now on."""
        self._reclassed.append((entry, klass))

    def carry_out(self, board: Board) -> None:
        """All that is noted. Cost: each line that somebody leaves, once, and the jobs that join others."""
        if self._gone:
            gone, self._gone = self._gone, []
            board.withdraw_together(gone)
        self.reclass(board)

    def reclass(self, board: Board) -> None:
        """Only those of another class: before a new job joins, since a policy may tell bursts apart by who joined before whom."""
        if self._reclassed:
            changed, self._reclassed = self._reclassed, []
            board.reclass(changed)
