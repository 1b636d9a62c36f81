"""The causes for which an attempt is stopped, and which of two of them counts. Called by the attempt machine."""

from __future__ import annotations

from typing import Final

from phalanx.core.work.attempt import Attempt, EndCause

_REQUESTED: Final = (
    EndCause.CANCELLED,
    EndCause.REQUEUED,
    EndCause.TIMEOUT,
    EndCause.PREEMPTED,
    EndCause.MOVED,
    EndCause.DRAINED,
    EndCause.IDLE,
    EndCause.PARKED,
)
CAUSES_WITH_SAVE: Final = (  # stops with time to save
    EndCause.PREEMPTED,
    EndCause.MOVED,
    EndCause.REQUEUED,
    EndCause.DRAINED,
    EndCause.IDLE,
    EndCause.PARKED,
)
_FAILURES: Final = (
    EndCause.FREEZE,
    EndCause.HANG,
    EndCause.PORT_TAKEN,
    EndCause.CONTENDED,
    EndCause.LIMITED,
    EndCause.START_FAIL,
    EndCause.UNFIT,
    EndCause.NODE_FAIL,
)


def cause_of_end(attempt: Attempt, cause: EndCause | None) -> EndCause | None:
    """The cause of the end, given one more: a cancel overrides everything, a requested stop a failure, parking a requeue; else the first wins."""
    if (
        attempt.stop_cause is None
        or cause is EndCause.CANCELLED
        or (attempt.stop_cause in _FAILURES and cause in _REQUESTED)
        or (attempt.stop_cause in CAUSES_WITH_SAVE and cause is EndCause.PARKED)
    ):
        return cause
    return attempt.stop_cause
