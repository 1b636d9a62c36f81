"""Indexes of related live jobs: dependents, jobs with the same name, elements of one array, replicas of one service.

`Change` updates them at every job that it puts, so that the end of a job finds its dependents without a search. They contain only live
jobs; empty entries are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.ids import JobId, ServiceId, UserId
from phalanx.core.work.dependency import Dependency, DependencyKind
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState

JobIndex = dict[Any, dict[JobId, None]]
UserJobName = tuple[UserId, str]


@dataclass(slots=True)
class JobRelations:
    """Indexes of live jobs.

    Attributes:
        dependents: jobs by each condition in their `unmet`.
        singletons: jobs that wait for earlier jobs of the same user and name.
        named: all jobs, by user and name.
        elements: elements of each array.
        replicas: replicas of each service.
        running: elements of each array that hold an allocation, including those that are stopping.
    """

    dependents: dict[Dependency, dict[JobId, None]] = field(default_factory=dict)
    singletons: dict[UserJobName, dict[JobId, None]] = field(default_factory=dict)
    named: dict[UserJobName, dict[JobId, None]] = field(default_factory=dict)
    elements: dict[JobId, dict[JobId, None]] = field(default_factory=dict)
    running: dict[JobId, dict[JobId, None]] = field(default_factory=dict)
    replicas: dict[ServiceId, dict[JobId, None]] = field(default_factory=dict)

    def update(
        self,
        before: Job | None,
        after: Job,
        enter: Callable[[JobIndex, Any, JobId], None],
        leave: Callable[[JobIndex, Any, JobId], None],
    ) -> None:
        """Update the indexes for a new or changed job, through `enter` and `leave`, which record how to undo it."""
        if before is None:
            for table, key in self._entries(after):
                enter(table, key, after.id)
        elif (
            before.unmet_dependencies is not after.unmet_dependencies
            or before.spec is not after.spec
            or before.state.terminal is not after.state.terminal
            or (after.array is not None and before.state is not after.state)
        ):
            old, new = list(self._entries(before)), list(self._entries(after))
            for table, key in old:
                if not any(table is other and key == same for other, same in new):
                    leave(table, key, after.id)
            for table, key in new:
                if not any(table is other and key == same for other, same in old):
                    enter(table, key, after.id)

    def _entries(self, job: Job) -> Iterator[tuple[JobIndex, Any]]:
        if job.state.terminal:
            return
        name = (job.user, job.spec.name)
        yield self.named, name
        if job.replica is not None:
            yield self.replicas, job.replica.service
        if job.array is not None:
            yield self.elements, job.array.array_id
            if job.state is JobState.RUNNING:
                yield self.running, job.array.array_id
        for one in job.unmet_dependencies:
            if one.kind is DependencyKind.SINGLETON:
                yield self.singletons, name
            else:
                yield self.dependents, one
