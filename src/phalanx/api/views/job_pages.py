"""Pages of a sorted list of jobs: the cursor with which a caller continues."""

from __future__ import annotations

from phalanx.core.errors import BadRequest
from phalanx.core.work.job import Job
from phalanx.ports.store import JobFilter, JobOrder

_CURSOR_CHARACTERS_MAX = 1000
_NUMBER_DIGITS_MAX = 15


def cursor_behind(job: Job, wanted: JobFilter) -> str:
    """Return the cursor of the page behind a job: its number and the value that the list is sorted by, as "17:train"."""
    value, seq = wanted.order.key_of(job)
    return f"{seq}:{value}"


def read_job_cursor(text: str, order: JobOrder) -> tuple[str | int, int] | None:
    """Return the sort key in a cursor; None if it is empty.

    Raises:
        BadRequest: the text is no cursor of a list in this order.
    """
    if not text:
        return None
    number, colon, value = text.partition(":")
    numeric = order in (JobOrder.NUMBER, JobOrder.GPUS)
    if not colon or len(text) > _CURSOR_CHARACTERS_MAX or not _is_number(number) or (numeric and not _is_number(value)):
        raise BadRequest(
            f"after: {text[:60]!r} is not a cursor of a list sorted by {order.value}",
            hint="send `after` of the reply before, with the same sort, or none to read from the start",
        )
    return (int(value) if numeric else value), int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _NUMBER_DIGITS_MAX
