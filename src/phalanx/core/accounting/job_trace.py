"""The trace of an ended job: spans of its waits and attempts, computed from its records and history only.

The same records give the same spans with the same ids, so that an export can be repeated. Children lie within their parent, do not overlap,
and cover it without gaps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

from phalanx.core.state.history import HistoryLine
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState

AttributeValue = str | int | float | bool | Sequence[str]
EVENTS_MAX: Final = 100  # of one span; the newest are left out, and counted in an attribute
TEXT_MAX: Final = 500  # characters
_NS: Final = 1_000_000_000
_FAILED: Final = frozenset({JobState.FAILED, JobState.TIMEOUT})
_UNFAILED_ENDS: Final = frozenset(
    {
        EndCause.SUCCEEDED,
        EndCause.PREEMPTED,
        EndCause.IDLE,
        EndCause.PARKED,
        EndCause.MOVED,
        EndCause.DRAINED,
        EndCause.CANCELLED,
        EndCause.REQUEUED,
    }
)
# Lines that begin a phase of an attempt. Any other cause of a stop begins the phase "stopping".
_PHASES: Final = {
    "starting": "starting",
    "running": "running",
    "restart": "preparing",
    "asleep": "asleep",
    "awake": "running",
    "stopping": "stopping",
    "task_failed": "stopping",
    "node_lost": "stopping",
    "port_in_use": "stopping",
    "froze": "stopping",
    "overdue": "stopping",
    "refused": "stopping",
    "unfit": "stopping",
    "withdrawn": "stopping",
    "wake_failed": "stopping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened at one time. `at_ns`: Unix nanoseconds."""

    at_ns: int
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """One span. Times are Unix nanoseconds.

    Attributes:
        parent_id: 0 for the root.
        failure: why it failed; empty if it did not.
    """

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a span's time that becomes a child of it."""

    begin_ns: int
    end_ns: int
    name: str
    reason: str = ""


def trace_id_of(job: Job) -> int:
    """Return the id of a job's trace. The folder has a random key, so no other job has it, also of another cluster or after a restore."""
    return _number(16, job.folder, job.id)


def job_trace(job: Job, attempts: Sequence[Attempt], lines: Sequence[HistoryLine]) -> list[JobSpan]:
    """Return the spans of an ended job, the root first.

    Args:
        job: ended.
        attempts: all of it, oldest first.
        lines: its history, oldest first.
    """
    begin_ns = _ns(job.submit_s)
    end_ns = max(begin_ns, _ns(job.submit_s if job.ended_s is None else job.ended_s))
    trace_id = trace_id_of(job)
    root = JobSpan(
        trace_id=trace_id,
        span_id=_number(8, job.folder, job.id, "job"),
        parent_id=0,
        name="job",
        begin_ns=begin_ns,
        end_ns=end_ns,
        attributes=_job_attributes(job, attempts),
        failure=f"job {job.state.value}" if job.state in _FAILED else "",
    )
    spans = [_with_events(root, (line for line in lines if line.epoch is None))]
    waited_since, cause = begin_ns, ""
    for attempt in attempts:
        placed_ns = _within(_ns(attempt.placed_s), waited_since, end_ns)
        ended_ns = end_ns if attempt.ended_s is None else _within(_ns(attempt.ended_s), placed_ns, end_ns)
        spans += _wait_spans(root, job, lines, _Part(waited_since, placed_ns, "waiting", cause))
        own = [line for line in lines if line.epoch == attempt.epoch]
        spans += _attempt_spans(root, job, attempt, own, (placed_ns, ended_ns))
        waited_since, cause = ended_ns, attempt.causes[-1].value if attempt.causes else ""
    spans += _wait_spans(root, job, lines, _Part(waited_since, end_ns, "waiting", cause))
    waited_ns = sum(span.end_ns - span.begin_ns for span in spans if span.name == "waiting")
    return [_with_share(span, waited_ns) if span.name == "waiting" else span for span in spans]


def _job_attributes(job: Job, attempts: Sequence[Attempt]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "phalanx.job.id": job.id,
        "phalanx.job.name": job.name,
        "phalanx.job.state": job.state.value,
        "phalanx.job.gpus": job.gpu_milli / 1000,
        "phalanx.job.attempts": len(attempts),
        "phalanx.job.preemptions": job.preemptions,
        "phalanx.project": job.project,
        "phalanx.queue": job.queue,
        "user.name": job.user,
    }
    if job.exit_code is not None:
        found["process.exit.code"] = job.exit_code
    if job.array is not None:
        found["phalanx.job.array_index"] = job.array.index
    if job.cancelled_by:
        found["phalanx.job.cancelled_by"] = job.cancelled_by
    return found


def _wait_spans(root: JobSpan, job: Job, lines: Sequence[HistoryLine], wait: _Part) -> list[JobSpan]:
    """The spans of one wait: one for each reason that the records contain."""
    return [
        JobSpan(
            trace_id=root.trace_id,
            span_id=_number(8, job.folder, job.id, part.name, part.reason, str(part.begin_ns)),
            parent_id=root.span_id,
            name=part.name,
            begin_ns=part.begin_ns,
            end_ns=part.end_ns,
            attributes={"phalanx.wait.reason": part.reason}
            | ({"phalanx.wait.after": wait.reason} if wait.reason else {}),
        )
        for part in _wait_parts(job, lines, wait)
    ]


def _wait_parts(job: Job, lines: Sequence[HistoryLine], wait: _Part) -> Iterator[_Part]:
    """Divide a wait where its reason changes: held, unmet dependencies, begin time, else capacity."""
    holds = [(_ns(line.at_s), line.kind == "held") for line in lines if line.kind in ("held", "released")]
    met = [_ns(line.at_s) for line in lines if line.kind == "dependencies_met"]
    met_ns = met[0] if met else wait.end_ns if job.unmet_dependencies else 0
    begin_ns = _ns(job.spec.begin_s or 0.0)
    cuts = {wait.begin_ns, wait.end_ns, met_ns, begin_ns, *(at_ns for at_ns, _ in holds)}
    edges = sorted(cut for cut in cuts if wait.begin_ns <= cut <= wait.end_ns)
    open_part: _Part | None = None
    for begin, end in pairwise(edges):
        held = next((held for at_ns, held in reversed(holds) if at_ns <= begin), job.spec.hold)
        reason = (
            "held" if held else "dependency" if begin < met_ns else "begin_time" if begin < begin_ns else "capacity"
        )
        if open_part is not None and open_part.reason == reason:
            open_part = replace(open_part, end_ns=end)
            continue
        if open_part is not None:
            yield open_part
        open_part = _Part(begin, end, wait.name, reason)
    if open_part is not None:
        yield open_part


def _with_share(span: JobSpan, waited_ns: int) -> JobSpan:
    share = round((span.end_ns - span.begin_ns) / waited_ns, 4)
    return replace(span, attributes={**span.attributes, "phalanx.wait.share": share})


def _attempt_spans(
    root: JobSpan, job: Job, attempt: Attempt, lines: Sequence[HistoryLine], span_ns: tuple[int, int]
) -> list[JobSpan]:
    """The span of an attempt and its phases."""
    begin_ns, end_ns = span_ns
    cause = attempt.causes[-1] if attempt.causes else attempt.stop_cause
    attributes: dict[str, AttributeValue] = {
        "phalanx.attempt.epoch": attempt.epoch,
        "phalanx.attempt.nodes": [grant.node_id for grant in attempt.allocation.grants],
        "phalanx.attempt.gpus": attempt.full_allocation.milli / 1000,
        "phalanx.attempt.tasks": attempt.allocation.world_size,
        "phalanx.attempt.restarts_in_place": int(attempt.generation),
    }
    if cause is not None:
        attributes["phalanx.attempt.end_cause"] = cause.value
    if attempt.exit_code is not None:
        attributes["process.exit.code"] = attempt.exit_code
    if attempt.resume_from is not None:
        attributes["phalanx.attempt.resumed_from_step"] = attempt.resume_from.step
    failed = cause is not None and cause not in _UNFAILED_ENDS
    span = JobSpan(
        trace_id=root.trace_id,
        span_id=_number(8, job.folder, job.id, "attempt", str(attempt.epoch)),
        parent_id=root.span_id,
        name="attempt",
        begin_ns=begin_ns,
        end_ns=end_ns,
        attributes=attributes,
        failure=(attempt.why or cause.value)[:TEXT_MAX] if failed and cause is not None else "",
    )
    phases = [
        JobSpan(
            trace_id=root.trace_id,
            span_id=_number(8, job.folder, job.id, "phase", str(attempt.epoch), str(number)),
            parent_id=span.span_id,
            name=part.name,
            begin_ns=part.begin_ns,
            end_ns=part.end_ns,
            attributes={"phalanx.attempt.epoch": attempt.epoch},
        )
        for number, part in enumerate(_phases(lines, begin_ns, end_ns))
    ]
    return [_with_events(span, lines), *phases]


def _phases(lines: Sequence[HistoryLine], begin_ns: int, end_ns: int) -> Iterator[_Part]:
    """The phases of an attempt: preparing until all nodes are ready, starting until all ranks run, running, stopping, and again."""
    at_ns, name = begin_ns, "preparing"
    for line in lines:
        following = _PHASES.get(line.kind, name)
        if following == name:
            continue
        until_ns = _within(_ns(line.at_s), at_ns, end_ns)
        if until_ns > at_ns:
            yield _Part(at_ns, until_ns, name)
        at_ns, name = until_ns, following
    if end_ns > at_ns:
        yield _Part(at_ns, end_ns, name)


def _with_events(span: JobSpan, lines: Iterable[HistoryLine]) -> JobSpan:
    """Add lines of the history as events of the span."""
    events = [
        SpanEvent(at_ns=_within(_ns(line.at_s), span.begin_ns, span.end_ns), name=line.kind, text=line.text[:TEXT_MAX])
        for line in lines
    ]
    more = {"phalanx.events_left_out": len(events) - EVENTS_MAX} if len(events) > EVENTS_MAX else {}
    return replace(span, attributes={**span.attributes, **more}, events=tuple(events[:EVENTS_MAX]))


def _within(at_ns: int, begin_ns: int, end_ns: int) -> int:
    return min(max(at_ns, begin_ns), end_ns)


def _ns(at_s: float) -> int:
    return round(at_s * _NS)


def _number(size: int, *words: str) -> int:
    """A number of so many bytes that follows from the words; never 0, which is no id."""
    digest = hashlib.sha256("\0".join(words).encode(errors="replace")).digest()
    return int.from_bytes(digest[:size], "big") or 1
