"""What must have happened before a job may start. Resolved by the lifecycle as jobs end; the scheduler only sees what is still unmet."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.core.ids import JobId


class DependencyKind(enum.StrEnum):
    """Slurm's words and meaning."""

    AFTER_OK = "afterok"  # the job succeeded
    AFTER_ANY = "afterany"  # the job is over, however
    AFTER_NOT_OK = "afternotok"  # the job is over and did not succeed
    AFTER_CORR = "aftercorr"  # array elements: the element of the same index succeeded
    SINGLETON = "singleton"  # no earlier job of the same user and name is still alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """One condition. `job_id` names a job or a whole array; empty for `singleton`."""

    kind: DependencyKind
    job_id: JobId = JobId("")

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.job_id}" if self.job_id else self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """An element's place in its array: one submit made them all, and each is a job of its own.

    Attributes:
        array_id: the array's name for people: elements are called `<array_id>_<index>`.
        size: elements in all.
        running_max: how many may run at once; None for all (Slurm's `%8`).
    """

    array_id: JobId
    index: int
    size: int
    running_max: int | None = None
