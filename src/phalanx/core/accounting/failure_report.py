"""Adds up failed attempts by cause, node, user, project, queue or job, with what their lost work costs."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.accounting.cost_report import to_cents
from phalanx.core.work.attempt import EndCause

FAILURES: Final = frozenset(
    {
        EndCause.FAILED,
        EndCause.CRASH,
        EndCause.NODE_FAIL,
        EndCause.START_FAIL,
        EndCause.UNFIT,
        EndCause.TIMEOUT,
        EndCause.FREEZE,
        EndCause.FAULT,
        EndCause.HANG,
        EndCause.PORT_TAKEN,
    }
)
"""Ends that are failures; the others are successes, or decisions of people and of the scheduler."""


class FailureKey(enum.StrEnum):
    """By what a report of failures groups its rows."""

    CAUSE = "cause"
    NODE = "node"
    USER = "user"
    PROJECT = "project"
    QUEUE = "queue"
    JOB = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed, or was restarted in place after failures.

    Attributes:
        cause: the failure rule that explains it, or the word of its end.
        node: where its first failure was; "" if that is unknown.
        failures: of all its generations.
        held_us: GPU-microseconds that it held.
        lost_us: of it, work that is not part of the result.
        exact: cost of the lost work, in units of `cost_report.CENT`.
    """

    job: str
    cause: str
    node: str
    user: str
    project: str
    queue: str
    failures: int
    held_us: int
    lost_us: int
    exact: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSum:
    """One row; `merged` as in the other reports."""

    key: str
    failures: int
    jobs: int
    held_us: int
    lost_us: int
    cents: int
    merged: int = 0


def sum_failures(
    attempts: Iterable[FailedAttempt], by: FailureKey, *, rows_max: int
) -> tuple[list[FailureSum], FailureSum]:
    """The rows, those that lost most first, and the sum of all."""
    groups: dict[str, list[FailedAttempt]] = {}
    for attempt in attempts:
        groups.setdefault(getattr(attempt, by.value), []).append(attempt)
    rows = sorted(
        (_sum(key, each) for key, each in groups.items()),
        key=lambda row: (-row.cents, -row.lost_us, -row.failures, row.key),
    )
    shown, rest = rows[:rows_max], rows[rows_max:]
    if rest:
        shown.append(_sum("", [one for row in rest for one in groups[row.key]], merged=len(rest)))
    return shown, _sum("", [one for each in groups.values() for one in each])


def _sum(key: str, attempts: list[FailedAttempt], *, merged: int = 0) -> FailureSum:
    return FailureSum(
        key=key,
        failures=sum(one.failures for one in attempts),
        jobs=len({one.job for one in attempts}),
        held_us=sum(one.held_us for one in attempts),
        lost_us=sum(one.lost_us for one in attempts),
        cents=to_cents(sum(one.exact for one in attempts)),
        merged=merged,
    )
