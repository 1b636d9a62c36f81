"""Waits for the end of a job, without its output."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from phalanx.cli.terminal import strip_control
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import WaitTimedOut
from phalanx.core.units import format_duration
from phalanx.core.work.exit_code import code_beside
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.jobs import JobView

_POLL_FIRST_S: Final = 0.05
_POLL_LAST_S: Final = 1.0
_KILLED: Final = 143  # 128 + SIGTERM, for a cancelled or timed-out job


class EndedJob(NamedTuple):
    """What is printed about a job that has ended: the attributes of a JobView of wire.api.jobs, read without its records."""

    id: str
    state: JobState
    detail: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    attempts: int = 0
    cancelled_by: str = ""
    states: Mapping[str, int] = {}
    on_end: str = ""


def ended_job(fields: Mapping[str, Any]) -> EndedJob:
    """Return the job with the fields of a reply."""
    found = {name: fields[name] for name in EndedJob._fields if name in fields}
    return EndedJob(**{**found, "state": JobState(fields["state"])})


def wait_for_end(head: Client, job_id: str, timeout_s: float | None) -> int:
    """Poll until the job has ended; print how on standard error and return its exit code.

    Raises:
        WaitTimedOut: the job has not ended within `timeout_s`.
        KeyboardInterrupt: Ctrl-C; a line says that only the wait has ended.
    """
    try:
        return _poll_until_end(head, job_id, timeout_s)
    except KeyboardInterrupt:
        print(f"\njob {job_id} continues; next: phalanx show {job_id}", file=sys.stderr)
        raise


def _poll_until_end(head: Client, job_id: str, timeout_s: float | None) -> int:
    until = None if timeout_s is None else time.monotonic() + timeout_s
    pause, printed = _POLL_FIRST_S, ""
    while True:
        job = head.job(job_id).job
        if job.state.terminal:
            print(end_summary(job), file=sys.stderr)
            return exit_code(job.state, job.exit_code)
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise WaitTimedOut(
                f"job {job_id} is still {job.state} after {format_duration(timeout_s or 0)}",
                hint=f"phalanx attach {job_id}",
            )
        line = (
            f"array {job_id}: {job.detail}"
            if job.states
            else f"waiting: {wait_text(job.reason, job.detail)}"
            if job.state is JobState.PENDING
            else f"job {job_id} runs on {', '.join(job.nodes)}"
        )
        if line != printed:
            print(strip_control(line), file=sys.stderr)
            printed = line
        time.sleep(pause if left is None else min(pause, left))
        pause = min(_POLL_LAST_S, pause * 1.5)


def end_summary(job: JobView | EndedJob) -> str:
    """Describe the end of a job in one line: `job 12 failed with exit code 3 after 2m10s (2 attempts)`."""
    word = {JobState.TIMEOUT: "exceeded its time limit", JobState.CANCELLED: "was cancelled"}.get(
        job.state, str(job.state)
    )
    named = code_beside(job.exit_code, job.detail) if job.state is JobState.FAILED else ""
    code = f" with {named}" if named else ""
    took = (
        "" if job.started_s is None or job.ended_s is None else f" after {format_duration(job.ended_s - job.started_s)}"
    )
    by = f" by {job.cancelled_by}" if job.state is JobState.CANCELLED and job.cancelled_by else ""
    why = f": {job.detail}" if job.detail and (job.states or job.state is not JobState.CANCELLED or not by) else ""
    attempts = f" ({job.attempts} attempts)" if job.attempts > 1 else ""
    on_end = ""
    if job.on_end and job.attempts and not job.states:
        from phalanx.core.work.job_file.on_end import END_NAME  # most jobs have no such command

        on_end = f"; its on_end command: phalanx logs {END_NAME}{job.id}"
    return strip_control(f"{'array' if job.states else 'job'} {job.id} {word}{by}{code}{took}{attempts}{why}{on_end}")


def exit_code(state: JobState, code: int | None) -> int:
    """Return the exit code of this command: that of the job. It is 0 only if the job succeeded."""
    if state is JobState.SUCCEEDED:
        return 0
    if code:
        return code
    return 1 if state is JobState.FAILED else _KILLED
