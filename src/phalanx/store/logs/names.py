"""Validation and order of stream names. A name becomes part of a path, so only valid ones may pass."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.ports.logs import StreamKey

STREAM: Final = re.compile(r"([a-z]{1,32})-(0|[1-9][0-9]{0,8})")
_JOB: Final = re.compile(r"[0-9]{1,19}(_[0-9]{1,9})?")  # 17, and 17_3 of an array
_EPOCH_MAX: Final = 2**31


def validated_job(job_id: JobId) -> JobId:
    """Return the id if it is valid.

    Raises:
        BadRequest: not a job id.
    """
    if not _JOB.fullmatch(job_id):
        raise BadRequest(f"{job_id[:40]!r} is not a job id")
    return job_id


def validated(key: StreamKey) -> StreamKey:
    """Return the key if it is valid.

    Raises:
        BadRequest: invalid job id, epoch or stream name.
    """
    validated_job(key.job_id)
    if not 0 < key.epoch < _EPOCH_MAX:
        raise BadRequest(f"job {key.job_id}: {key.epoch} is not a valid epoch")
    if not STREAM.fullmatch(key.stream):
        raise BadRequest(
            f"job {key.job_id}: {key.stream[:40]!r} is not a stream name",
            hint="use a name such as rank-3, steps-0, supervisor-0",
        )
    return key


def sort_key(key: StreamKey) -> tuple[int, str, int]:
    """Sort key: by epoch, then by name, then by number: rank-2 before rank-10."""
    name, _, number = key.stream.rpartition("-")
    return (key.epoch, name, int(number))
