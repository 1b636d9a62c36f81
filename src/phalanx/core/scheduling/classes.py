"""Which jobs are alike for every rule: their class, whose history speaks for them, and the limits they share."""

from __future__ import annotations

from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.calendar import Calendar, asker_of
from phalanx.core.scheduling.entry import Klass, Throttle
from phalanx.core.scheduling.fit import Fit
from phalanx.core.scheduling.need import Need
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

INFINITE = float("inf")
NAMES_MAX: Final = 10_000  # some 33 MB of histories where each of these names came again


class Classes:
    """Sorts the jobs of one board. Labels outlive it: what was learned hangs on them."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, ...], int] = {}
        self._free: list[int] = []  # labels whose names were forgotten
        self._ended_names: dict[tuple[str, ...], None] = {}  # the one that ended last comes last
        self._throttles: dict[JobId, Throttle] = {}

    def copy(self) -> Classes:
        """The same labels, for a trial that must not add to them."""
        other = Classes()
        other._labels, other._ended_names, other._free = dict(self._labels), dict(self._ended_names), list(self._free)
        return other

    def begin(self) -> None:
        """A new board: nothing runs on it yet."""
        self._throttles.clear()

    def ended(self, job: Job) -> int | None:
        """A job of this name has come to its end: from now on the name has a history of its own.

        Returns:
            The label that lost its name, if one did: beyond `NAMES_MAX` the name that has not ended for longest is forgotten.
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
            self._free.append(label)
        return label

    def label(self, job: Job) -> int:
        """Whose history speaks for the job: its name's; until that has ended once, its owner's, so that a thousand new names are one class."""
        name = (job.user, job.spec.name)
        asked = name if name in self._ended_names else (job.user,)
        label = self._labels.get(asked)
        if label is None:
            label = self._labels[asked] = self._free.pop() if self._free else len(self._labels)
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
        """The job's class, and until when (Unix seconds) reservations leave it so."""
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
            needs, label=self.label(job), rank=job.spec.priority + (queue.priority if queue is not None else 0),
            user=job.user if quotas is not None else "", shut=shut, throttle=throttle,
            queue=quotas.number(job.queue) if quotas is not None and queue is not None else 0,
        )  # fmt: skip
        return klass, until_s
