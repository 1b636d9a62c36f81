"""The progress of a job: its checkpoints, steps and pace, as a live attempt reports them. Called by the attempt machine."""

from __future__ import annotations

from typing import Final

from phalanx.core.lifecycle import gang_commands
from phalanx.core.lifecycle.stop_causes import CAUSES_WITH_SAVE
from phalanx.core.lifecycle.transitions import AttemptCase, TransitionContext, TransitionResult, history_line, unchanged
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.reports import CheckpointFailed, CheckpointSaved, ProgressReported
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.pace import MeasuredPace, StepPace, with_pace, with_stated_end

CHECKPOINTS_KEPT: Final = 2


def save_checkpoint(
    case: AttemptCase, attempt: Attempt, happening: CheckpointSaved, facts: TransitionContext
) -> TransitionResult:
    """Publish a checkpoint; the newest CHECKPOINTS_KEPT stay. A job that saves before a stop counts as one that does so whenever it is asked."""
    fresh = replace(happening.resume, saved_s=facts.now_s)
    if any(kept.digest == fresh.digest and kept.path == fresh.path for kept in case.job.checkpoints):
        return unchanged(case)
    # Sorted by epoch first: later steps of an earlier epoch failed verification, and must not displace valid checkpoints.
    others = (kept for kept in case.job.checkpoints if kept.path != fresh.path)  # a save into the same folder replaces
    known = sorted((*others, fresh), key=lambda kept: (kept.epoch, kept.step))
    kept, dropped = known[-CHECKPOINTS_KEPT:], known[:-CHECKPOINTS_KEPT]
    job = _with_step(replace(case.job, checkpoints=tuple(kept)), fresh.step)
    if attempt.stop_cause in CAUSES_WITH_SAVE and not job.spec.saves_on_stop:
        job = replace(job, spec=replace(job.spec, saves_on_stop=True))  # the scheduler prefers to preempt such jobs
    text = (
        f"checkpoint of step {fresh.step} published (stall {happening.stall_s:.2f} s, write {happening.write_s:.2f} s)"
    )
    entry = history_line(case, facts, "checkpoint", text)
    # The head deletes its own copies (`store.checkpoints`), and each node deletes its local ones later.
    own = attempt.head_stores_copies and not job.spec.checkpoint
    commands = () if own else gang_commands.drop_checkpoints(case.job, attempt, tuple(old.path for old in dropped))
    return TransitionResult(job=job, attempt=attempt, commands=commands, history=(entry,))


def note_failed_checkpoint(
    case: AttemptCase, attempt: Attempt, happening: CheckpointFailed, facts: TransitionContext
) -> TransitionResult:
    """Note in the history that a save failed; nothing else follows."""
    text = f"checkpoint of step {happening.step} failed, training continues: {happening.error}"
    return TransitionResult(
        job=case.job, attempt=attempt, history=(history_line(case, facts, "checkpoint_failed", text),)
    )


def record_progress(
    case: AttemptCase, attempt: Attempt, happening: ProgressReported, facts: TransitionContext
) -> TransitionResult:
    """Record the step, the pace and the stated end that a gang reports."""
    job = case.job
    if happening.pace is not None:
        paces = with_pace(job.paces, _measured_pace(attempt, happening.pace, facts))
        job = job if paces is job.paces else replace(job, paces=paces)
        began_s = facts.now_s if attempt.first_running_s is None else attempt.first_running_s
        served_s = job.attained_s + max(0.0, facts.now_s - began_s)
        stated = with_stated_end(job.stated_end, happening.pace, attempt.epoch, served_s)
        job = job if stated is job.stated_end else replace(job, stated_end=stated)
    # A step counts as progress for the budget only once a checkpoint contains it, or if the job never saves.
    return TransitionResult(job=job if job.checkpoints else _with_step(job, happening.step), attempt=attempt)


def _measured_pace(attempt: Attempt, pace: StepPace, facts: TransitionContext) -> MeasuredPace:
    """The pace with what the gang runs on; without devices, which measures nothing, if it has shares of devices or its node is gone."""
    grant, held = attempt.allocation.grants[0], attempt.allocation
    node = facts.nodes.get(grant.node_id)
    models = {} if node is None else {device.index: device.model for device in node.devices}
    model = models.get(grant.devices[0], "") if grant.devices and grant.share is None else ""
    return MeasuredPace(
        epoch=attempt.epoch, model=model, ranks=held.world_size, devices=held.gpus if model else 0, pace=pace
    )


def _with_step(job: Job, step: int) -> Job:
    """The job with this step as its progress, which clears the count of its failures; the same one if it was further already."""
    return (
        replace(job, progress_step=step, charged_restarts=0, hang_restarts=0, avoided_nodes=())
        if step > job.progress_step
        else job
    )
