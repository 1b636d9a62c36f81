"""Overdue jobs: a job that has waited past its limit goes before all other jobs, within a small reserved share of the fleet.

docs/scheduling.md states and proves the resulting bound on waiting times.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.entry import Entry, by_submit
from phalanx.core.scheduling.hazard import HazardTable
from phalanx.core.scheduling.policies.knobs import Knobs


class Lane:
    """The overdue jobs, and the GPUs that they use."""

    def __init__(self, board: Board, table: HazardTable, knobs: Knobs) -> None:
        self.board, self.table, self.knobs = board, table, knobs
        self.used = 0
        self.total = max(1, sum(size for size in board.size if size > 0))

    def leave(self, entry: Entry) -> None:
        """The job is no longer overdue: it ended, was stopped, or is gone."""
        if entry.overdue:
            self.used -= entry.gpus
            entry.overdue = False

    def promote(self, heads: Iterable[Entry], now_s: float) -> None:
        """Of the jobs next in line, mark those that waited past their limit as overdue, the longest wait first, while the share is not used up."""
        base_s = self._base_s()
        if base_s == inf:
            return
        late = {
            entry.seq: waited_s
            for entry in heads
            if not entry.overdue and (waited_s := self._waited_s(entry, now_s)) > base_s
        }
        if not late or self.used >= self.knobs.lane * self.total:
            return
        found: list[tuple[float, int, Entry]] = []
        older = 0  # GPUs of jobs submitted before: later jobs cannot postpone a job's limit
        for entry in by_submit(self.board.waiting.values()):
            waited = late.get(entry.seq)
            if waited is not None and waited > base_s * (1.0 + self.knobs.crowd * older / self.total):
                found.append((-waited, entry.seq, entry))
            older += entry.gpus
        for _, _, entry in sorted(
            found
        ):  # the last one may exceed the share, so that it is fully used while jobs wait for it
            if self.used < self.knobs.lane * self.total:
                self.used += entry.gpus
                entry.overdue = True

    def _base_s(self) -> float:
        """The wait after which a job that found no other waiting is overdue: it scales with the service times."""
        mean_s = self.table.served_s / max(1, self.table.events)
        return max(self.knobs.overdue_s, self.knobs.patience * mean_s)

    def _waited_s(self, entry: Entry, now_s: float) -> float:
        """Its total waiting time, and the cost of its stops and moves."""
        return entry.waited_s + now_s - entry.waits_from_s + self.board.restart_cost_s * (entry.stops + entry.moves)
