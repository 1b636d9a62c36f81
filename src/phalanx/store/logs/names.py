"""Which streams there may be, and how they are ordered. A name becomes part of a path, so that nothing else may pass."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.ports.logs import StreamKey

STREAM: Final = re.compile(r"([a-z]{1,32})-(0|[1-9][0-9]{0,8})")
_JOB: Final = re.compile(r"[0-9]{1,19}(_[0-9]{1,9})?")  # 17, and 17_3 of an array
_EPOCH_MAX: Final = 2**31


def checked_job(job_id: JobId) -> JobId:
    """The id, if it is one.

    Raises:
        BadRequest: it is not a job's number.
    """
    if not _JOB.fullmatch(job_id):
        raise BadRequest(f"job id {job_id[:40]!r} is not a job's number")
    return job_id


def checked(key: StreamKey) -> StreamKey:
    """The key, if it can name a stream.

    Raises:
        BadRequest: job, epoch or stream are not of their form.
    """
    checked_job(key.job_id)
    if not 0 < key.epoch < _EPOCH_MAX:
        raise BadRequest(f"job {key.job_id}: epoch {key.epoch} is not one of an attempt")
    if not STREAM.fullmatch(key.stream):
        raise BadRequest(
            f"job {key.job_id}: {key.stream[:40]!r} is not a stream",
            hint="streams are named as in rank-3, steps-0, supervisor-0",
        )
    return key


def order(key: StreamKey) -> tuple[int, str, int]:
    """By epoch, then by word, then by number: rank-2 before rank-10."""
    word, _, number = key.stream.rpartition("-")
    return (key.epoch, word, int(number))
