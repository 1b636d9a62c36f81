"""The waiting jobs that never ran, in lines, and the order in which a pass goes through them.

Jobs of one class and of one group of similar jobs form a line, by submit time; a pass looks at the head of each line. The lines of one class
differ only in the index of their group, so they are sorted within the class, again only if one of them changed. A pass compares the best
line of each class with those of other classes, and looks at no other line of a class that is closed. With 50,000 waiting jobs in 20,000
lines and 4,000 classes, the other lines are most of the work.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from phalanx.core.scheduling.board_records import JobClass, JobEntry
from phalanx.core.scheduling.estimates.hazard_table import SimilarJobs

Line = tuple[
    int, float, float, int, JobEntry
]  # negative rank, negative value per GPU, submit time, seq, job: ascending
Head = tuple[float, float, int, JobEntry]  # negative index, submit time, seq, job: ascending


class ClassLines:
    """The lines of one class.

    Attributes:
        by_group: heaps of (submit time, seq, job), none of them empty.
        heads: heads of the lines in order; empty if it must be sorted again.
        urgent: heads that are overdue, instead of in `heads`.
        oldest_s: no job in the lines was submitted earlier.
    """

    __slots__ = ("by_group", "heads", "oldest_s", "urgent")

    def __init__(self) -> None:
        self.by_group: dict[SimilarJobs, list[tuple[float, int, JobEntry]]] = {}
        self.heads: list[Head] = []
        self.urgent: list[JobEntry] = []
        self.oldest_s = float("inf")

    def invalidate(self) -> None:
        """A line, its index, or an overdue head changed."""
        self.heads, self.urgent = [], []

    def sort(self, index_of: Callable[[SimilarJobs], float]) -> None:
        """Sort the heads, if something changed; `index_of` a job that has not run."""
        if self.heads or self.urgent:
            return
        self.oldest_s = min(line[0][0] for line in self.by_group.values())
        for group, line in self.by_group.items():
            submit_s, seq, entry = line[0]
            if entry.overdue or entry.lost_nodes:
                self.urgent.append(entry)
            else:
                self.heads.append((-index_of(group), submit_s, seq, entry))
        self.heads.sort()


class WaitingLines:
    """The lines of all classes.

    Attributes:
        by_class: none of them without a line.
    """

    def __init__(self) -> None:
        self.by_class: dict[JobClass, ClassLines] = {}
        self._classes_of: dict[SimilarJobs, set[JobClass]] = {}  # classes with a line of the group

    def join(self, entry: JobEntry, group: SimilarJobs) -> None:
        """The job waits in the line of its class and group."""
        lines = self.by_class.get(entry.job_class)
        if lines is None:
            lines = self.by_class[entry.job_class] = ClassLines()
        heapq.heappush(lines.by_group.setdefault(group, []), (entry.submit_s, entry.seq, entry))
        self._classes_of.setdefault(group, set()).add(entry.job_class)
        lines.oldest_s = min(lines.oldest_s, entry.submit_s)
        lines.invalidate()

    def remove(self, leaving: Mapping[tuple[JobClass, SimilarJobs], set[int]]) -> None:
        """Remove jobs, by seq. Each line is scanned once, however many jobs leave it."""
        for (job_class, group), seqs in leaving.items():
            line = [item for item in self.by_class[job_class].by_group[group] if item[1] not in seqs]
            heapq.heapify(line)
            self.by_class[job_class].by_group[group] = line
            self._changed(job_class, group)

    def pop(self, job_class: JobClass, group: SimilarJobs) -> None:
        """Remove the head of the line."""
        heapq.heappop(self.by_class[job_class].by_group[group])
        self._changed(job_class, group)

    def head(self, job_class: JobClass, group: SimilarJobs) -> JobEntry | None:
        """The first job of the line; None if it is empty."""
        lines = self.by_class.get(job_class)
        line = None if lines is None else lines.by_group.get(group)
        return line[0][2] if line else None

    def heads_before(self, submit_s: float) -> Iterator[JobEntry]:
        """The first job of each line, if it was submitted earlier than this."""
        for lines in self.by_class.values():
            if lines.oldest_s < submit_s:
                yield from (line[0][2] for line in lines.by_group.values() if line[0][0] < submit_s)

    def invalidate_group(self, group: SimilarJobs) -> None:
        """The index of the group changed."""
        for job_class in self._classes_of.get(group, ()):
            self.by_class[job_class].invalidate()

    def invalidate(self) -> None:
        """All indexes changed."""
        for lines in self.by_class.values():
            lines.invalidate()

    def _changed(self, job_class: JobClass, group: SimilarJobs) -> None:
        lines = self.by_class[job_class]
        lines.invalidate()
        if lines.by_group[group]:
            return
        del lines.by_group[group]
        classes = self._classes_of[group]
        classes.discard(job_class)
        if not classes:
            del self._classes_of[group]
        if not lines.by_group:
            del self.by_class[job_class]


class ClassOrder:
    """The lines of one class in the order of one pass.

    Attributes:
        job_class: the class.
        first: the best line. The others are valued when they are asked for.
    """

    __slots__ = ("_heads", "_lines", "_weight", "first", "job_class")

    def __init__(
        self, job_class: JobClass, lines: Sequence[Line], heads: Sequence[Head] = (), weight: float = 0.0
    ) -> None:
        """Take the lines of a class, at least one.

        Args:
            job_class: the class.
            lines: lines with their value.
            heads: heads of further lines, ascending.
            weight: value of a job of this class with index 1.
        """
        self.job_class = job_class
        self._weight = weight
        self._heads = () if lines else heads
        self._lines = sorted([*lines, *map(self._line, heads)]) if lines else []
        self.first = self._lines[0] if lines else self._line(heads[0])

    def lines(self) -> list[Line]:
        """All lines, ascending."""
        if not self._lines:
            self._lines = [self.first, *map(self._line, self._heads[1:])]
        return self._lines

    def _line(self, head: Head) -> Line:
        index, submit_s, seq, entry = head
        return (-self.job_class.rank, self._weight * index / (self.job_class.gpus or 1), submit_s, seq, entry)


Order = list[ClassOrder]  # by their first lines


def ordered(classes: Iterable[ClassOrder]) -> Order:
    """The classes by their first lines."""
    return sorted(classes, key=attrgetter("first"))


class OrderedLines:
    """Yields the lines of an order one by one, the best of all classes first. The caller may skip the rest of a class on the way.

    Skipped lines cost nothing.
    """

    __slots__ = ("_ahead", "_order", "_skip", "_skipped")

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ahead: list[tuple[Line, int, ClassOrder]] = []  # heap of the next lines of classes that went on
        self._skip = False
        self._skipped: list[ClassOrder] = []

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines; once."""
        ahead = self._ahead
        for one in self._order:
            while ahead and ahead[0][0] < one.first:
                yield from self._follow(*heapq.heappop(ahead))
            yield from self._follow(one.first, 0, one)
        while ahead:
            yield from self._follow(*heapq.heappop(ahead))

    def skip_class(self) -> None:
        """Skip the other lines of the current line's class."""
        self._skip = True

    def resume_skipped(self, current: Line) -> None:
        """Yield the lines of skipped classes after all that come after the current line."""
        for one in self._skipped:
            lines = one.lines()
            at = bisect.bisect_right(lines, current)
            if at < len(lines):
                heapq.heappush(self._ahead, (lines[at], at, one))
        self._skipped.clear()

    def _follow(self, line: Line, at: int, one: ClassOrder) -> Iterator[Line]:
        self._skip = False
        yield line
        if self._skip:
            self._skipped.append(one)
            return
        lines = one.lines()
        if at + 1 < len(lines):
            heapq.heappush(self._ahead, (lines[at + 1], at + 1, one))
