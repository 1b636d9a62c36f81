"""Assigns jobs to classes, and applies changes of waiting jobs to their lines.

Jobs in one class are equal for every rule, share run time statistics, and share limits. Called by the scheduler.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.calendar import Calendar, asker_of
from phalanx.core.scheduling.entry import Entry, Klass, Throttle
from phalanx.core.scheduling.fleet_index import Fit
from phalanx.core.scheduling.needs import Need
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

INFINITE = float("inf")
NAMES_MAX: Final = 10_000  # about 33 MB of statistics if every name occurs again


class Classes:
    """The classes of one board's jobs. Labels survive a new board, since run time statistics are keyed by them."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, ...], int] = {}
        self._free_labels: list[int] = []  # labels of dropped names, for reuse
        self._ended_names: dict[tuple[str, ...], None] = {}  # least recently ended first
        self._throttles: dict[JobId, Throttle] = {}

    def copy(self) -> Classes:
        """A copy with the same labels, for a trial that must not change them."""
        other = Classes()
        other._labels, other._ended_names, other._free_labels = (
            dict(self._labels),
            dict(self._ended_names),
            list(self._free_labels),
        )
        return other

    def begin(self) -> None:
        """Start a new board, on which nothing runs."""
        self._throttles.clear()

    def ended(self, job: Job) -> int | None:
        """Record that a job of this name ended by itself: from now on the name has its own statistics.

        Returns:
            The label that lost its name, if any: beyond `NAMES_MAX` the least recently ended name is dropped.
        """
        names = self._ended_names
        name = (job.user, job.spec.name)
        names.pop(name, None)
        names[name] = None
        if len(names) <= NAMES_MAX:
            return None
        oldest = next(iter(names))
        del names[oldest]
        label = self._labels.pop(oldest, None)
        if label is not None:
            self._free_labels.append(label)
        return label

    def label(self, job: Job) -> int:
        """The label of the job's statistics: its name's; until a job of that name has ended, its owner's, so that new names share one class."""
        name = (job.user, job.spec.name)
        key = name if name in self._ended_names else (job.user,)
        label = self._labels.get(key)
        if label is None:
            label = self._labels[key] = self._free_labels.pop() if self._free_labels else len(self._labels)
        return label

    def klass_of(
        self,
        job: Job,
        needs: tuple[Need, ...],
        board: Board,
        fit: Fit,
        calendar: Calendar,
        queue: Queue | None,
        wall_s: float,
    ) -> tuple[Klass, float]:
        """The job's class, and until when (Unix seconds) reservations leave it unchanged."""
        quotas = board.quotas
        shut, until_s = 0, INFINITE
        if calendar or job.spec.reservation:
            asker = asker_of(job)
            shut = fit.bits(calendar.closed_to(asker, wall_s).among(fit.numbers))
            until_s = calendar.until_s(asker, wall_s)
        if job.spec.nodelist:
            shut |= ((1 << len(fit.nodes)) - 1) & ~fit.bits(job.spec.nodelist)
        shut |= fit.bits(job.spec.exclude)
        throttle = None
        if job.array is not None and job.array.running_max is not None:
            throttle = self._throttles.setdefault(job.array.array_id, Throttle(running_max=job.array.running_max))
        klass = board.klass(
            needs,
            label=self.label(job),
            rank=job.spec.priority + (queue.priority if queue is not None else 0),
            user=job.user if quotas is not None else "",
            shut=shut,
            throttle=throttle,
            queue=quotas.number(job.queue) if quotas is not None and queue is not None else 0,
        )
        return klass, until_s


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
