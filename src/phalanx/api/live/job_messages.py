"""The texts of jobs' messages: what happened to which job, how long it ran, why it ended, what to do next, and where its page is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from phalanx.api.views.arrays import states_summary
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import JobId
from phalanx.core.state.history import HistoryLine
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.channel import LINES_MAX, Message
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.web.command_hints import render_hint

_NODES_MAX: Final = 8  # named in a message
_WHAT: Final[Mapping[str, str]] = {
    "running": "started",
    "never": "can never start",
    "hung": "makes no progress",
    "idle_warning": "is idle",
    "idle_notice": "is idle",
    "idle_ended": "is no longer idle",
    "requeued": "waits again",
    "restart": "restarts",
}
"""What happened, of kinds of history lines that are not a state."""
_STATE_TEXT: Final[Mapping[str, str]] = {"timeout": "reached its time limit", "cancelled": "was cancelled"}
_NEXT: Final[Mapping[str, HintCode]] = {
    "running": HintCode.FOLLOW_JOB,
    "failed": HintCode.READ_JOB_LOG,
    "timeout": HintCode.READ_JOB_LOG,
    "hung": HintCode.READ_JOB_LOG,
}
"""The next step after a kind of line; of other kinds to look at the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNote:
    """One thing that is sent. `seq`: of its history line; `at_s`: when it began to wait (CLOCK_BOOTTIME)."""

    seq: int
    job_id: JobId
    title: str
    body: str
    at_s: float = 0.0

    def at(self, now_s: float) -> JobNote:
        """The note, waiting since now."""
        return replace(self, at_s=now_s)


def job_note(job: Job, line: HistoryLine, attempt: Attempt | None, page: str) -> JobNote:
    """The note of a history line of a job."""
    what = _WHAT.get(line.kind) or _STATE_TEXT.get(line.kind, line.kind)
    facts = [f"{_subject(job)} {what}{_where_or_how_long(job, line, attempt)}."]
    if line.kind not in {"running", "succeeded"}:
        facts.append(f"Reason: {line.text}")
    return _note(
        job, line.seq, f"job {job.id} ({job.name}) {what}", facts, _NEXT.get(line.kind, HintCode.SHOW_JOB), page
    )


def first_failure_note(job: Job, line: HistoryLine, attempt: Attempt | None, page: str) -> JobNote:
    """The note of the first failed element of an array."""
    note = job_note(job, line, attempt, page)
    rest = "\nIt is the first failure of the array. The others are counted when the array has ended."
    return replace(note, body=note.body + rest)


def array_end_note(job: Job, states: Mapping[JobId, JobState], seq: int, page: str) -> JobNote:
    """The note of an array whose elements have all ended; `job` is one of them."""
    assert job.array is not None
    array_id = job.array.array_id
    facts = [f"Array {array_id} ({job.name}) of {job.user} in project {job.project} ended: {states_summary(states)}."]
    title = f"array {array_id} ({job.name}) ended: " + ", ".join(
        f"{count} {state.value}" for state, count in Counter(states.values()).most_common()
    )
    return _note(replace(job, id=array_id), seq, title, facts, HintCode.SHOW_JOB, page)


def joined_message(notes: Sequence[JobNote], dropped: int) -> Message:
    """One message of several notes, the oldest first; of more than LINES_MAX the newest, with the number of the others."""
    shown = notes[-LINES_MAX:]
    hidden = len(notes) - len(shown) + dropped
    left_out = [f"{hidden} earlier messages are left out."] if hidden else []
    title = notes[0].title if len(notes) == 1 and not hidden else f"{len(notes) + dropped} messages about your jobs"
    return Message(title=f"Phalanx: {title[:150]}", body="\n\n".join([*left_out, *(note.body for note in shown)]))


def _subject(job: Job) -> str:
    element = "" if job.array is None else f", element {job.array.index} of array {job.array.array_id}"
    return f"Job {job.id} ({job.name}{element}) of {job.user} in project {job.project}"


def _where_or_how_long(job: Job, line: HistoryLine, attempt: Attempt | None) -> str:
    if line.kind == "running":
        nodes = [] if attempt is None else [grant.node_id for grant in attempt.full_allocation.grants]
        more = f" and {len(nodes) - _NODES_MAX} more" if len(nodes) > _NODES_MAX else ""
        where = f" on {', '.join(nodes[:_NODES_MAX])}{more}" if nodes else ""
        return f"{where}, {format_duration(max(0.0, line.at_s - job.submit_s))} after it was submitted"
    if job.started_s is None:
        return ", it never ran" if line.kind in {"failed", "cancelled"} else ""
    return f" after {format_duration(max(0.0, line.at_s - job.started_s))}"


def _note(job: Job, seq: int, title: str, facts: Sequence[str], code: HintCode, page: str) -> JobNote:
    lines = [*facts, f"Next: {render_hint(Hint(code, job=job.id))}", *([page] if page else [])]
    return JobNote(seq=seq, job_id=job.id, title=title, body="\n".join(lines))
