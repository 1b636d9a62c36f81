"""Overdue jobs: a job that was not served for longer than its limit goes before all other jobs, within a reserved share of the fleet.

The time not served counts from the submit: every wait, and all work that stops and moves cost. docs/scheduling.md states and proves the
resulting bound; docs/decisions/0106 gives the source of the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry, sorted_by_submit
from phalanx.core.scheduling.estimates.hazard_table import HazardTable
from phalanx.core.scheduling.policies.parameters import PolicyParameters


class ReservedShare:
    """The overdue jobs, and the GPUs that they use."""

    def __init__(self, board: Board, table: HazardTable, parameters: PolicyParameters) -> None:
        self.board, self.table, self.parameters = board, table, parameters
        self.gpus_used = 0
        self.gpus_total = max(1, sum(map(board.devices_on_node, range(len(board.devices_of_node)))))

    def remove(self, entry: JobEntry) -> None:
        """The job is no longer overdue: it ended, was stopped, or is gone."""
        if entry.overdue:
            self.gpus_used -= entry.gpus
            entry.overdue = False

    def promote(self, heads: Iterable[JobEntry], now_s: float) -> list[JobEntry]:
        """Of the jobs next in line, mark those past their limit as overdue, the longest time not served first, while the share is not used up.

        Returns:
            Those.
        """
        base_s = self.base_s()
        promoted: list[JobEntry] = []
        if base_s == inf:
            return promoted
        late = {
            entry.seq: lost_s for entry in heads if not entry.overdue and (lost_s := unserved_s(entry, now_s)) > base_s
        }
        if not late or self.gpus_used >= self.parameters.overdue_share * self.gpus_total:
            return promoted
        found: list[tuple[float, int, JobEntry]] = []
        older = 0  # GPUs of jobs submitted before: later jobs cannot postpone a job's limit
        for entry in sorted_by_submit(self.board.waiting.values()):
            late_s = late.get(entry.seq)
            if late_s is not None and late_s > base_s * (
                1.0 + self.parameters.overdue_load_factor * older / self.gpus_total
            ):
                found.append((-late_s, entry.seq, entry))
            older += entry.gpus
        for _, _, entry in sorted(
            found
        ):  # the last one may exceed the share, so that it is fully used while jobs wait for it
            if self.gpus_used < self.parameters.overdue_share * self.gpus_total:
                self.gpus_used += entry.gpus
                entry.overdue = True
                promoted.append(entry)
        return promoted

    def base_s(self) -> float:
        """The time not served after which a job that found no other waiting is overdue: it scales with the service times."""
        mean_s = self.table.served_s / max(1, self.table.events)
        return max(self.parameters.overdue_s, self.parameters.overdue_service_factor * mean_s)


def unserved_s(entry: JobEntry, now_s: float) -> float:
    """The time since its submit in which nothing was done that is kept: waits, restarts and lost work.

    It follows from the records alone, so that a new board or head counts the earlier life of a job as well.
    """
    return now_s - entry.submit_s - entry.service_s(now_s)
