"""Validation and order of stream names. A name becomes part of a path, so only valid ones may pass."""

from __future__ import annotations

import re
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.ports.logs import StreamKey

STREAM: Final = re.compile(r"([a-z]{1,32})-(0|[1-9][0-9]{0,8})")
_JOB: Final = re.compile(r"[0-9]{1,19}(_[0-9]{1,9})?-[0-9a-z]{1,64}")  # of job 17, and of element 17_3 of an array
_ATTEMPT: Final = re.compile(rf"{_JOB.pattern}/epoch-[0-9]{{1,10}}-[0-9a-z]{{1,64}}")


def validated_job(folder: str) -> str:
    """Return the name of a job's folder if it is valid.

    Raises:
        BadRequest: no job has such a folder.
    """
    if not _JOB.fullmatch(folder):
        raise BadRequest(f"{folder[:60]!r} is not a job's folder")
    return folder


def validated(key: StreamKey) -> StreamKey:
    """Return the key if it is valid.

    Raises:
        BadRequest: invalid folder or stream name.
    """
    if not _ATTEMPT.fullmatch(key.folder):
        raise BadRequest(f"job {key.job_id}: {key.folder[:100]!r} is not an attempt's folder")
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
