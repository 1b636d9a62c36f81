"""Which jobs hang together: who waits for whom, which live jobs share a name, which are elements of one array.

Told by `Change` of every job that is put, so that the end of one job finds those that waited for it without a search. Only live jobs are
in it; an empty entry is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.ids import JobId, UserId
from phalanx.core.work.dependency import Dependency, DependencyKind
from phalanx.core.work.job import Job, JobState

Together = dict[Any, dict[JobId, None]]
Name = tuple[UserId, str]


@dataclass(slots=True)
class Relations:
    """Live jobs by what they share.

    Attributes:
        dependents: those whose `unmet` holds this condition.
        singletons: those that wait for earlier jobs of their user and name.
        named: all, by user and name.
        elements: of each array.
        running: those of them that hold an allocation, leaving ones too.
    """

    dependents: dict[Dependency, dict[JobId, None]] = field(default_factory=dict)
    singletons: dict[Name, dict[JobId, None]] = field(default_factory=dict)
    named: dict[Name, dict[JobId, None]] = field(default_factory=dict)
    elements: dict[JobId, dict[JobId, None]] = field(default_factory=dict)
    running: dict[JobId, dict[JobId, None]] = field(default_factory=dict)

    def changed(
        self,
        before: Job | None,
        after: Job,
        enter: Callable[[Together, Any, JobId], None],
        leave: Callable[[Together, Any, JobId], None],
    ) -> None:
        """Take note of a job that is new or has changed. `enter` and `leave` do it, and remember how to undo it."""
        if before is None:
            for table, key in self._places(after):
                enter(table, key, after.id)
        elif (
            before.unmet is not after.unmet
            or before.spec is not after.spec
            or before.state.terminal is not after.state.terminal
            or (after.array is not None and before.state is not after.state)
        ):
            left, found = list(self._places(before)), list(self._places(after))
            for table, key in left:
                if not any(table is other and key == same for other, same in found):
                    leave(table, key, after.id)
            for table, key in found:
                if not any(table is other and key == same for other, same in left):
                    enter(table, key, after.id)

    def _places(self, job: Job) -> Iterator[tuple[Together, Any]]:
        if job.state.terminal:
            return
        name = (job.user, job.spec.name)
        yield self.named, name
        if job.array is not None:
            yield self.elements, job.array.array_id
            if job.state is JobState.RUNNING:
                yield self.running, job.array.array_id
        for one in job.unmet:
            if one.kind is DependencyKind.SINGLETON:
                yield self.singletons, name
            else:
                yield self.dependents, one
