"""Conditions on other jobs that must hold before a job starts. The lifecycle resolves them as jobs end; the scheduler sees only unmet ones."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.core.work.nearest_match import suggestion

DEPENDENCIES_MAX: Final = 1000  # per job; each is checked when the job is submitted
NO_JOB: Final = JobId("")  # the job id of `singleton`
_SHOWN_MAX: Final = 3  # conditions listed in one sentence
_JOB: Final = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
_HINT: Final = "write 17, afterok:17:18, afterany:17, afternotok:17, aftercorr:17 or singleton"


class DependencyKind(enum.StrEnum):
    """Slurm's kinds of dependency, with the same meaning; and DATA, which only Phalanx sets: the job has copied data, or has failed to."""

    AFTER_OK = "afterok"  # the job succeeded
    AFTER_ANY = "afterany"  # the job ended, with any result
    AFTER_NOT_OK = "afternotok"  # the job ended without success
    AFTER_CORR = "aftercorr"  # array elements: the element of the same index succeeded
    SINGLETON = "singleton"  # every earlier job of the same user and name has ended
    DATA = "data"


_KINDS: Final = tuple(kind.value for kind in DependencyKind if kind is not DependencyKind.DATA)
_WAITS_FOR: Final = {
    DependencyKind.AFTER_OK: "job {} to succeed",
    DependencyKind.AFTER_ANY: "job {} to end",
    DependencyKind.AFTER_NOT_OK: "job {} to end without success",
    DependencyKind.AFTER_CORR: "job {} to succeed",
    DependencyKind.DATA: "job {} to copy its data",
    DependencyKind.SINGLETON: "earlier jobs of its name and user to end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """One condition. `job_id` names a job or a whole array; empty for `singleton`."""

    kind: DependencyKind
    job_id: JobId = NO_JOB

    def __str__(self) -> str:
        """As a user writes it. DATA is fulfilled as AFTER_ANY is."""
        kind = DependencyKind.AFTER_ANY if self.kind is DependencyKind.DATA else self.kind
        return f"{kind.value}:{self.job_id}" if self.job_id else kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPosition:
    """An element's position in its array. One submit creates all elements; each is a job of its own.

    Attributes:
        array_id: the array's name for users: elements are named `<array_id>_<index>`.
        size: number of elements.
        running_max: how many may run at once; None for all (Slurm's `%8`).
        lowest, highest: the least and the greatest index of the array.
    """

    array_id: JobId
    index: int
    size: int
    running_max: int | None = None
    lowest: int = 0
    highest: int = 0


def array_element_id(array_id: JobId, index: int) -> JobId:
    """The id of an element: `17_3`."""
    return JobId(f"{array_id}_{index}")


def parse_dependencies(value: object) -> tuple[Dependency, ...]:
    """The conditions of `afterok:17,singleton`, of a list of such texts, or of a bare number, which means `afterok`; without duplicates.

    Raises:
        BadRequest: outside the grammar, or more than DEPENDENCIES_MAX.
    """
    words = [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else value
    if not isinstance(words, Sequence):
        raise BadRequest(f"depends_on: {value!r} is not a list of jobs", hint=_HINT)
    parts = [part.strip() for word in words for part in _text(word).split(",")]
    found = dict.fromkeys(one for part in parts if part for one in _conditions(part))
    if len(found) > DEPENDENCIES_MAX:
        raise BadRequest(
            f"depends_on: {len(found)} conditions are more than {DEPENDENCIES_MAX}",
            hint="submit those jobs as one array and depend on the array",
        )
    return tuple(found)


def describe_dependencies(unmet: Sequence[Dependency]) -> str:
    """The unmet dependencies in words: `waits for job 17 to succeed`; empty for none."""
    if not unmet:
        return ""
    shown = " and for ".join(_WAITS_FOR[one.kind].format(one.job_id) for one in unmet[:_SHOWN_MAX])
    left = len(unmet) - _SHOWN_MAX
    return f"waits for {shown}" + (f" and for {left} more" if left > 0 else "")


def _text(word: object) -> str:
    if isinstance(word, bool) or not isinstance(word, (str, int)):
        raise BadRequest(f"depends_on: {word!r} is not a dependency", hint=_HINT)
    return str(word)


def _conditions(part: str) -> list[Dependency]:
    kind, *ids = part.lower().split(":")
    if _JOB.fullmatch(kind) and not ids:
        return [Dependency(kind=DependencyKind.AFTER_OK, job_id=JobId(kind))]
    if kind not in _KINDS:
        raise BadRequest(f"depends_on: {part[:40]!r} is not a dependency", hint=suggestion(kind, _KINDS, _HINT))
    if kind == DependencyKind.SINGLETON:
        if ids:
            raise BadRequest(f"depends_on: {part[:40]!r}: singleton takes no job number", hint="write singleton alone")
        return [Dependency(kind=DependencyKind.SINGLETON)]
    if not ids:
        raise BadRequest(f"depends_on: {kind} needs a job number", hint=f"write {kind}:17, or {kind}:17:18 for several")
    for word in ids:
        if not _JOB.fullmatch(word):
            raise BadRequest(f"depends_on: {word[:40]!r} in {part[:40]!r} is not a job number", hint="write 17 or 17_3")
    return [Dependency(kind=DependencyKind(kind), job_id=JobId(word)) for word in ids]
