"""Requests about the files of ended jobs: the policy of their removal, and the note that they are removed."""

from __future__ import annotations

from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.errors import Conflict
from phalanx.core.state.events import PutRetention, RecordRemovedFiles, RemoveArchivedJobs
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import IDEMPOTENCY
from phalanx.core.units import format_duration
from phalanx.core.work.retention import RetainedFiles, RetentionPolicy
from phalanx.core.work.users import Action

FILES_REMOVED: Final = "files_removed"
handlers: Final = RequestHandlers()
_SUBJECTS: Final = {
    RetainedFiles.LOGS: "logs",
    RetainedFiles.OUTPUTS: "output files",
    RetainedFiles.CHECKPOINTS: "checkpoints before the newest",
    RetainedFiles.UPLOADS: "uploaded working directory",
    RetainedFiles.RECORDS: "records",
}


@handlers.add(PutRetention, Action.ADMINISTER, audit=lambda request, _: describe_policy(request.policy))
def put_retention(context: StepContext, request: PutRetention) -> None:
    """Replace the policy."""
    policy = request.policy
    context.change.put(policy)
    context.add_history("retention", f"retention: {describe_policy(policy)}", by=policy.by)


@handlers.add(RecordRemovedFiles, None, audit=lambda request, _: f"files of {len(request.jobs)} jobs: {request.why}")
def record_removed_files(context: StepContext, request: RecordRemovedFiles) -> None:
    """Add a line to the history of each job. The jobs have ended, most of them so long ago that the world no longer holds them."""
    for job_id, kind in request.jobs:
        text = f"its {_SUBJECTS[kind]} are removed: {request.why}"
        line = HistoryLine(
            seq=0, at_s=context.now.wall_s, kind=FILES_REMOVED, text=text, job_id=job_id, by=request.by,
            facts={"files": kind.value},
        )  # fmt: skip
        context.change.add_history(line)


@handlers.add(
    RemoveArchivedJobs, None, audit=lambda request, _: f"{len(request.jobs)} jobs into the archive {request.archive}"
)
def remove_archived_jobs(context: StepContext, request: RemoveArchivedJobs) -> None:
    """Remove jobs that the world no longer holds.

    Raises:
        Conflict: it holds one of them, or one has the newest submit number, which must not be assigned again.
    """
    held = next((job_id for job_id in request.jobs if job_id in context.world.jobs), None)
    if held is not None or request.newest_seq >= context.world.next_job_seq - 1:
        raise Conflict(f"job {held or request.jobs[-1]} is too new for the archive", hint="nothing was removed")
    archived = frozenset(request.jobs)
    for key in [key for key, one in context.world.table(IDEMPOTENCY).items() if one.job_id in archived]:
        context.change.remove(IDEMPOTENCY, key)
    context.change.archive_jobs(request.jobs)
    context.add_history(
        "archived", f"{len(request.jobs)} jobs are moved into the archive {request.archive}", by=request.by
    )


def describe_policy(policy: RetentionPolicy) -> str:
    """Describe a policy in one line."""
    kept = [f"{kind} for {format_duration(period_s)}" for kind, period_s in policy.periods]
    return f"keep {', '.join(kept)}" if kept else "keep all files"
