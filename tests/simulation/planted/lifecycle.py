"""Bugs of the job and attempt machines: gangs, restarts, checkpoints, dependencies."""

from dataclasses import replace

from phalanx.controller.step_context import StepContext
from phalanx.core.lifecycle import attempt as attempts
from phalanx.core.lifecycle import dependencies, gang_commands, settle
from phalanx.core.lifecycle.transitions import TransitionResult
from phalanx.core.state.commands import PrepareTasks
from phalanx.core.state.reports import CheckpointSaved, MemberStarted
from phalanx.core.work.dependency import DependencyKind
from phalanx.core.work.states import AttemptState
from tests.simulation.planted.bug import planted


@planted(10, seed=0)
def gang_ends_at_the_stop_request(patch):
    """An attempt ends, and other jobs get its devices, before its nodes have confirmed the stop."""

    def hasty(case, attempt, facts):
        if attempt.state is AttemptState.STOPPING:
            return settle.settle(replace(case, attempt=attempt), attempt, facts)
        return TransitionResult(job=case.job, attempt=attempt)

    patch.setattr(attempts, "_settle_when_whole", hasty)


@planted(5, seed=0)
def gang_is_running_with_its_first_node(patch):
    """An attempt counts as running when its first node has started, whatever the state of the others."""
    started = attempts._started

    def eager(case, attempt, happening, facts):
        outcome = started(case, attempt, happening, facts)
        if outcome.attempt is not None and outcome.attempt.state is AttemptState.STARTING:
            return replace(outcome, attempt=replace(outcome.attempt, state=AttemptState.RUNNING, running_s=facts.now_s))
        return outcome

    patch.setitem(attempts.TRANSITIONS, (AttemptState.STARTING, MemberStarted), eager)


@planted(7, seed=9, events=2000)
def failed_parent_starts_its_dependents(patch):
    """`afterok` is met when the parent has ended, also if it failed."""
    verdict = dependencies.condition_state

    def lax(kind, *, alive, failed):
        return verdict(kind, alive=alive, failed=failed and kind is not DependencyKind.AFTER_OK)

    patch.setattr(dependencies, "condition_state", lax)


@planted(7, seed=0)
def dependents_are_not_updated(patch):
    """When a job ends, the jobs that wait for it are not updated."""
    patch.setattr(StepContext, "settle_dependents", lambda self: (self.ended.clear(), self.renamed.clear()))


@planted(9, seed=0)
def job_resumes_from_an_older_checkpoint(patch):
    """The checkpoints from which a job may resume are sent oldest first."""
    prepare = gang_commands.prepare

    def backwards(job, attempt, facts, *, only=None):
        told = prepare(job, attempt, facts, only=only)
        return tuple(replace(one, candidates=one.candidates[::-1]) for one in told if isinstance(one, PrepareTasks))

    patch.setattr(gang_commands, "prepare", backwards)


@planted(9, seed=2)
def checkpoint_of_a_stop_is_dropped(patch):
    """A checkpoint saved while the gang stops is received and not recorded: the job resumes from the one before."""
    patch.setitem(
        attempts.TRANSITIONS,
        (AttemptState.STOPPING, CheckpointSaved),
        lambda case, attempt, _happening, _facts: TransitionResult(job=case.job, attempt=attempt),
    )


@planted(21, seed=0)
def retention_deletes_all_checkpoints(patch):
    """Together with the oldest checkpoint the newer ones are deleted."""
    drop = gang_commands.drop_checkpoints

    def greedy(job, attempt, paths):
        return drop(job, attempt, tuple(kept.path for kept in job.checkpoints) if paths else ())

    patch.setattr(gang_commands, "drop_checkpoints", greedy)


@planted(13, seed=0)
def restarts_are_not_counted(patch):
    """A job that crashes repeatedly without progress is restarted without end."""
    charged = settle._charged

    def forgetful(case, attempt, cause, facts):
        return charged(replace(case, job=replace(case.job, charged_restarts=0)), attempt, cause, facts)

    patch.setattr(settle, "_charged", forgetful)


@planted(13, seed=9)
def job_gets_one_retry_too_many(patch):
    """A job that fails by its own fault gets one retry more than requested."""
    failed = settle._failed

    def generous(case, attempt, facts):
        return failed(replace(case, job=replace(case.job, user_retries=case.job.user_retries - 1)), attempt, facts)

    patch.setattr(settle, "_failed", generous)
