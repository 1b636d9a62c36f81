"""Results of one sweep over the waiting jobs: capacity and quota only shrink within it, so similar and larger jobs need not be tried."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry, Klass


class Sweep:
    """Needs that did not fit and classes that were not admitted. A new sweep starts after a displacement."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.closed: set[int] = set()  # classes that cannot start
        self.exact: set[tuple[object, ...]] = set()
        self.least: dict[tuple[object, ...], int] = {}
        self.refused: dict[tuple[int, str], int] = {}  # fewest GPUs rejected, by queue and user

    def hopeless(self, entry: Entry) -> bool:
        """Whether the job cannot start, by earlier attempts of this sweep, or is not admitted."""
        klass = entry.klass
        if klass.number in self.closed:
            return True
        if self._known_to_fail(entry):
            if not entry.avoid:
                self.closed.add(klass.number)
            return True
        return not self.admits(klass)

    def admits(self, klass: Klass) -> bool:
        """Like `Board.admits`; after a rejection, requests of the same queue and user for at least as many GPUs are rejected without a check."""
        key = (klass.queue, klass.user)
        if klass.gpus >= self.refused.get(key, 1 << 62):
            self.closed.add(klass.number)
            return False
        if self.board.admits(klass):
            return True
        if klass.throttle is None:
            self.refused[key] = klass.gpus
        self.closed.add(klass.number)
        return False

    def failed(self, entry: Entry) -> None:
        """The job did not fit."""
        key = self._size_key(entry)
        if key is None:
            self.exact.add((entry.klass.needs, entry.klass.shut, entry.avoid))
        else:
            self.least[key] = min(self.least.get(key, entry.gpus), entry.gpus)

    def _known_to_fail(self, entry: Entry) -> bool:
        key = self._size_key(entry)
        if key is None:
            return (entry.klass.needs, entry.klass.shut, entry.avoid) in self.exact
        return entry.gpus >= self.least.get(key, 1 << 62)

    def _size_key(self, entry: Entry) -> tuple[object, ...] | None:
        """Key of needs that fit on one node or on whole nodes: more devices never fit if fewer did not. None: of another shape."""
        klass = entry.klass
        need = klass.needs[0]
        packed = need.nodes == 1 or need.devices == self.board.pools[need.kinds[0]].unit
        if len(klass.needs) > 1 or not packed or not need.plain or entry.avoid or not need.devices or need.nodes_max:
            return None
        return (need.kinds, klass.shut)
