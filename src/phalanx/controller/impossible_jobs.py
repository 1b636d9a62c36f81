"""Waiting jobs that a request makes impossible: found by judging them before and after it, and recorded in their history."""

from __future__ import annotations

from typing import Final

from phalanx.controller.step_context import StepContext
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker, newly_impossible
from phalanx.core.state.events import ImpossibleJob
from phalanx.core.state.history import HistoryLine

STORIES_MAX: Final = 1000  # jobs whose history gets a line; a step with 100,000 lines would take seconds


def record_impossible_jobs(context: StepContext, before: FeasibilityChecker, cause: str) -> tuple[ImpossibleJob, ...]:
    """Return the waiting jobs that can never start since `before` was created, in submit order, and add a line to their history."""
    waiting = sorted(context.world.pending.values(), key=lambda job: job.seq)
    found = newly_impossible(waiting, before, context.feasibility)
    for job, outlook in found[:STORIES_MAX]:
        text = f"can never start since {cause}: {outlook.detail}"
        context.change.add_history(HistoryLine(seq=0, at_s=context.now.wall_s, kind="never", text=text, job_id=job.id))
    return tuple(ImpossibleJob(job_id=job.id, why=outlook.detail) for job, outlook in found)
