"""What one sweep over the waiting has learned: room and quota only shrink within it, so that likes and larger ones need not be tried."""

from __future__ import annotations

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry, Klass


class Sweep:
    """Needs that did not fit and classes that were not admitted. Begun anew when somebody makes way."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.closed: set[int] = set()  # classes of which none can start
        self.exact: set[tuple[object, ...]] = set()
        self.least: dict[tuple[object, ...], int] = {}
        self.refused: dict[tuple[int, str], int] = {}  # fewest GPUs that queue and user were refused

    def hopeless(self, entry: Entry) -> bool:
        """Whether the job cannot start, by what has been tried, or is not admitted."""
        klass = entry.klass
        if klass.number in self.closed:
            return True
        if self._like(entry):
            if not entry.avoid:
                self.closed.add(klass.number)
            return True
        return not self.admits(klass)

    def admits(self, klass: Klass) -> bool:
        """As `Board.admits`; of a queue and user that were refused so many GPUs, nobody who asks as many is asked about again."""
        who = (klass.queue, klass.user)
        if klass.gpus >= self.refused.get(who, 1 << 62):
            self.closed.add(klass.number)
            return False
        if self.board.admits(klass):
            return True
        if klass.throttle is None:
            self.refused[who] = klass.gpus
        self.closed.add(klass.number)
        return False

    def failed(self, entry: Entry) -> None:
        """The job did not fit."""
        key = self._size_key(entry)
        if key is None:
            self.exact.add((entry.klass.needs, entry.klass.shut, entry.avoid))
        else:
            self.least[key] = min(self.least.get(key, entry.gpus), entry.gpus)

    def _like(self, entry: Entry) -> bool:
        key = self._size_key(entry)
        if key is None:
            return (entry.klass.needs, entry.klass.shut, entry.avoid) in self.exact
        return entry.gpus >= self.least.get(key, 1 << 62)

    def _size_key(self, entry: Entry) -> tuple[object, ...] | None:
        """Of needs packed onto one node or onto whole nodes, more devices never fit where fewer did not. None: of another shape."""
        klass = entry.klass
        need = klass.needs[0]
        packed = need.nodes == 1 or need.devices == self.board.pools[need.kinds[0]].unit
        if len(klass.needs) > 1 or not packed or not need.plain or entry.avoid or not need.devices or need.nodes_max:
            return None
        return (need.kinds, klass.shut)
