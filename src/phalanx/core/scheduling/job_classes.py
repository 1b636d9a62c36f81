"""Assigns jobs to classes, and applies changes of waiting jobs to their lines.

Jobs in one class are equal for every rule, share run time statistics, and share limits. Called by the scheduler.
"""

from __future__ import annotations

from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import ArrayThrottle, JobClass, JobEntry
from phalanx.core.scheduling.estimates.device_speeds import NO_ESTIMATE, SpeedEstimate, fastest_first
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.reservation_calendar import ReservationCalendar, reservation_query_of
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

INFINITE = float("inf")
STATISTICS_NAMES_MAX: Final = 10_000  # about 33 MB of statistics if every name occurs again


class JobClassRegistry:
    """The classes of one board's jobs. Labels survive a new board, since run time statistics are keyed by them."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, ...], int] = {}
        self._free_labels: list[int] = []  # labels of dropped names, for reuse
        self._ended_names: dict[tuple[str, ...], None] = {}  # least recently ended first
        self._throttles: dict[JobId, ArrayThrottle] = {}

    def copy(self) -> JobClassRegistry:
        """A copy with the same labels, for a trial that must not change them."""
        other = JobClassRegistry()
        other._labels, other._ended_names, other._free_labels = (
            dict(self._labels),
            dict(self._ended_names),
            list(self._free_labels),
        )
        return other

    def clear_throttles(self) -> None:
        """Start a new board, on which nothing runs."""
        self._throttles.clear()

    def record_end(self, job: Job) -> int | None:
        """Record that a job of this name ended by itself: from now on the name has its own statistics.

        Returns:
            The label that lost its name, if any: beyond `STATISTICS_NAMES_MAX` the least recently ended name is dropped.
        """
        names = self._ended_names
        name = (job.user, job.spec.name)
        names.pop(name, None)
        names[name] = None
        if len(names) <= STATISTICS_NAMES_MAX:
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

    def class_of(
        self,
        job: Job,
        needs: tuple[Need, ...],
        board: Board,
        fit: FleetIndex,
        calendar: ReservationCalendar,
        queue: Queue | None,
        wall_s: float,
        estimate: SpeedEstimate = NO_ESTIMATE,
        kept_off: int = 0,
        min_stay_s: float | None = None,
    ) -> tuple[JobClass, float]:
        """The job's class, given its speeds, and until when (Unix seconds) reservations leave it unchanged. `kept_off`: bitset of further excluded nodes.

        `min_stay_s`: least time between two of its moves that its queue asks for.
        """
        quotas = board.quotas
        excluded, until_s = 0, INFINITE
        if calendar or job.spec.reservation:
            asker = reservation_query_of(job)
            excluded = fit.bitset_of(calendar.closed_nodes(asker, wall_s).closed_in(fit.numbers_of_node))
            until_s = calendar.valid_until_s(asker, wall_s)
        excluded |= fit.left_out_by(job.spec) | kept_off
        throttle = None
        if job.array is not None and job.array.running_max is not None:
            throttle = self._throttles.setdefault(job.array.array_id, ArrayThrottle(running_max=job.array.running_max))
        klass = board.job_class(
            fastest_first(needs, estimate.speeds if estimate.moves_jobs or not _is_ordered(job) else ()),
            label=self.label(job),
            rank=job.spec.priority + (queue.priority if queue is not None else 0),
            user=job.user if quotas is not None else "",
            excluded=excluded,
            throttle=throttle,
            queue=quotas.job_node(job.queue) if quotas is not None and queue is not None else 0,
            speeds=estimate.speeds if estimate.moves_jobs else (),
            guessed_kinds=estimate.guessed if estimate.sources else frozenset(range(len(fit.device_models))),
            min_stay_s=min_stay_s,
        )
        return klass, until_s


def _is_ordered(job: Job) -> bool:
    """Whether its request states an order of models: a guess does not change that."""
    gpus = job.spec.role.gpus
    return bool(gpus.alternatives or gpus.alternative_models or gpus.model is not None)


class WaitingChanges:
    """The collected changes, in order. Each job occurs once."""

    __slots__ = ("_gone", "_reclassed")

    def __init__(self) -> None:
        self._gone: list[JobEntry] = []
        self._reclassed: list[tuple[JobEntry, JobClass]] = []

    def clear(self) -> None:
        """The board is new: its lines are empty."""
        self._gone.clear()
        self._reclassed.clear()

    def remove(self, entry: JobEntry) -> None:
        """The waiting job is gone."""
        self._gone.append(entry)

    def change_class(self, entry: JobEntry, job_class: JobClass) -> None:
        """The waiting job belongs to this class from now on."""
        self._reclassed.append((entry, job_class))

    def apply(self, board: Board) -> None:
        """Apply all collected changes. Cost: one scan of each line that jobs leave, and the jobs that join other lines."""
        if self._gone:
            gone, self._gone = self._gone, []
            board.withdraw(gone)
        self.apply_class_changes(board)

    def apply_class_changes(self, board: Board) -> None:
        """Apply only changes of class: before a new job joins, since a policy may group jobs by the order in which they joined."""
        if self._reclassed:
            changed, self._reclassed = self._reclassed, []
            board.change_classes(changed)
