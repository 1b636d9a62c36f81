"""What gateways count of one revision of a service while two revisions are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.core.work.services.log_histogram import LogHistogram, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionFigures:
    """Requests of one revision since the figures before, by one gateway or several. Requests whose client left are not among them.

    Attributes:
        begun: requests that a replica of it got.
        answered: of those that have ended, with or without an error.
        errors: answered ones with a status from 500, or whose replica failed.
        failing_sessions: sessions with their first error. Repeated errors of one session are no further evidence.
        first_tokens: times to the first token in seconds, of sessions that began.
        speeds: tokens per second of their answers.
        unanswered: ages in seconds of such streams that have no first token now.
    """

    begun: int = 0
    answered: int = 0
    errors: int = 0
    failing_sessions: int = 0
    first_tokens: LogHistogram = field(default_factory=dict)
    speeds: LogHistogram = field(default_factory=dict)
    unanswered: LogHistogram = field(default_factory=dict)


def sum_figures(figures: Sequence[RevisionFigures]) -> RevisionFigures:
    """The figures of one revision over several reports."""
    return RevisionFigures(
        begun=sum(one.begun for one in figures),
        answered=sum(one.answered for one in figures),
        errors=sum(one.errors for one in figures),
        failing_sessions=sum(one.failing_sessions for one in figures),
        first_tokens=merged(one.first_tokens for one in figures),
        speeds=merged(one.speeds for one in figures),
        unanswered=merged(one.unanswered for one in figures),
    )
