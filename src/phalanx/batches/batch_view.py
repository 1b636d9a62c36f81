"""A batch as OpenAI's API shows it, from its job and the progress that its driver wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from phalanx.batches.batch_job import (
    ENDPOINT_LABEL,
    LABEL,
    LINES_LABEL,
    METADATA_PREFIX,
    WINDOW_LABEL,
)
from phalanx.batches.input_check import InputError
from phalanx.core.work.services.service_use import BATCH_SERVICE_LABEL
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView

BATCH_PREFIX: Final = "batch_"
OUTPUT_PREFIX: Final = "file-output-"
ERRORS_PREFIX: Final = "file-errors-"
_TIMES: Final = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver wrote last. `state`: in_progress, finalizing, completed or expired; `at_s`: Unix time."""

    state: str = "in_progress"
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    at_s: float = 0.0


def batch_status(job: JobView, progress: BatchProgress | None) -> str:
    """Return the state of a batch, in OpenAI's words. A batch that waits for its first start is `validating`."""
    ended = "" if progress is None else progress.state
    if job.state is JobState.SUCCEEDED:
        return "expired" if ended == "expired" else "completed"
    if job.state is JobState.CANCELLED:
        return "cancelled"
    if job.state.terminal:
        return "failed"
    if job.cancelled_by:
        return "cancelling"
    if ended in ("finalizing", "completed", "expired"):
        return "finalizing"
    return "validating" if job.epoch == 0 else "in_progress"


def batch_view(job: JobView, progress: BatchProgress | None) -> dict[str, Any]:
    """Return the batch of a job that has the labels of one."""
    labels = job.labels
    status = batch_status(job, progress)
    found = progress or BatchProgress()
    over = job.state.terminal
    times: dict[str, int | None] = dict.fromkeys(_TIMES)
    times["in_progress_at"] = _whole(job.started_s)
    if progress is not None and found.state != "in_progress":
        times["finalizing_at"] = int(found.at_s)
    if over:
        times[f"{status}_at"] = _whole(job.ended_s)
    errors = (
        [InputError(code="job_failed", message=f"job {job.id}: {job.detail or 'it failed'}")]
        if status == "failed"
        else []
    )
    return {
        **_batch(BATCH_PREFIX + str(job.id), labels.get(LABEL, ""), labels.get(ENDPOINT_LABEL, ""), job.submit_s),
        "status": status,
        "model": labels.get(BATCH_SERVICE_LABEL, ""),
        "completion_window": "24h",
        "expires_at": int(job.submit_s + float(labels.get(WINDOW_LABEL, "0") or 0)),
        "errors": _errors(errors),
        "output_file_id": f"{OUTPUT_PREFIX}{job.id}" if over and found.completed else None,
        "error_file_id": f"{ERRORS_PREFIX}{job.id}" if over and found.failed else None,
        "request_counts": {
            "total": int(labels.get(LINES_LABEL, "0") or 0),
            "completed": found.completed,
            "failed": found.failed,
        },
        "usage": {
            "input_tokens": found.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": found.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found.input_tokens + found.output_tokens,
        },
        "metadata": metadata_of(labels) or None,
        **times,
    }


def refused_view(
    batch_id: str,
    file_id: str,
    endpoint: str,
    created_s: float,
    window_s: float,
    errors: Iterable[InputError],
    *,
    total: int,
    metadata: dict[str, str],
) -> dict[str, Any]:
    """Return a batch whose requests were refused by the check, so that it has no job."""
    return {
        **_batch(batch_id, file_id, endpoint, created_s),
        "status": "failed",
        "completion_window": "24h",
        "expires_at": int(created_s + window_s),
        "errors": _errors(errors),
        "output_file_id": None,
        "error_file_id": None,
        "request_counts": {"total": total, "completed": 0, "failed": 0},
        "metadata": metadata or None,
        **dict.fromkeys(_TIMES),
        "failed_at": int(created_s),
    }


def metadata_of(labels: dict[str, str]) -> dict[str, str]:
    """Return the metadata that labels have."""
    return {
        key.removeprefix(METADATA_PREFIX): value for key, value in labels.items() if key.startswith(METADATA_PREFIX)
    }


def _batch(batch_id: str, file_id: str, endpoint: str, created_s: float) -> dict[str, Any]:
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": endpoint,
        "input_file_id": file_id,
        "created_at": int(created_s),
    }


def _errors(errors: Iterable[InputError]) -> dict[str, Any] | None:
    found = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param or None} for one in errors]
    return {"object": "list", "data": found} if found else None


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
