"""Bugs of the loop: undoing, leases, time, requests."""

import random
from dataclasses import replace

from phalanx.controller import reports
from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.requests import node_requests, submits
from phalanx.controller.step_result import ControllerTime
from phalanx.core.lifecycle import attempt as attempts
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.transitions import TransitionResult, history_line
from phalanx.core.state import world
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.states import AttemptState, JobState
from phalanx.store import commit_checks
from tests.simulation.planted.bug import planted


@planted(1, seed=6, events=2000)
def refused_commit_is_undone_in_part(patch):
    """The undo of a refused commit keeps the device usage that the commit would have caused."""
    undo = WorldChange.undo

    def forgetful(self):
        held = dict(self.world.usage)
        undo(self)
        self.world.usage.clear()
        self.world.usage.update(held)

    patch.setattr(WorldChange, "undo", forgetful)


@planted(1, seed=0)
def devices_are_freed_at_the_stop_request(patch):
    """A stopping attempt no longer holds its devices, although its ranks still run on them."""
    put_attempt = world._INDEXED[Attempt]

    def early(self, attempt):
        put_attempt(self, attempt)
        if attempt.state is AttemptState.STOPPING:
            for grant in attempt.allocation.grants:
                self._set(self.world.usage, grant.node_id, EMPTY_USAGE)

    patch.setitem(world._INDEXED, Attempt, early)


@planted(1, seed=0)
def share_is_not_given_back_at_a_restart(patch):
    """An attempt with a part of a device ends, its job will start again, and the part stays in use."""
    put_attempt = world._INDEXED[Attempt]
    again = {EndCause.PREEMPTED, EndCause.REQUEUED, EndCause.DRAINED, EndCause.NODE_FAIL, EndCause.START_FAIL}

    def greedy(self, attempt):
        used = {one.node_id: self.world.usage.get(one.node_id) for one in attempt.allocation.grants if one.share}
        put_attempt(self, attempt)
        if not attempt.holds_allocation and set(attempt.causes[-1:]) <= again:
            for node_id, usage in used.items():
                self._set(self.world.usage, node_id, usage)

    patch.setitem(world._INDEXED, Attempt, greedy)


@planted(10, seed=2)
def lease_expires_early_at_the_head(patch):
    """The head expires a lease, and marks the node down, three seconds before the supervisor does."""
    close_ended = LeaseBook.expire
    patch.setattr(LeaseBook, "expire", lambda self, now_s: close_ended(self, now_s + 3.0))


@planted(10, seed=14)
def death_of_an_earlier_incarnation_is_accepted(patch):
    """An engine's report of a dead supervisor is applied to the current incarnation of the node's supervisor."""
    dead = reports._node_dead
    patch.setattr(reports, "_node_dead", lambda context, told: dead(context, replace(told, supervisor_id=None)))


@planted(10, seed=57)
def superseded_attempts_are_not_reported(patch):
    """A lease renewal's reply never lists the superseded attempts."""
    renew = LeaseBook.renew
    patch.setattr(LeaseBook, "renew", lambda *args, **kwargs: replace(renew(*args, **kwargs), superseded=[]))


@planted(15, seed=2, events=2000)
def leases_use_the_wall_clock(patch):
    """A clock set one day ahead expires every lease."""
    let_leases_end = Controller._expire_leases

    def by_the_wall(self, context):
        now = context.now
        context.now = ControllerTime(wall_s=now.wall_s, boot_s=now.wall_s - self._steady_offset(now))
        let_leases_end(self, context)
        context.now = now

    patch.setattr(Controller, "_expire_leases", by_the_wall)


@planted(23, seed=0)
def history_quotes_the_job_specification(patch):
    """History lines of placement and cancellation contain the job's specification, with its variables."""
    patch.setattr(
        jobs,
        "history_line",
        lambda case, facts, kind, text, **more: history_line(case, facts, kind, f"{text} {case.job.spec}", **more),
    )


@planted(11, seed=0)
def idempotency_key_is_not_stored(patch):
    """A submit repeated with the same key creates another job."""
    patch.setattr(submits, "_remember_key", lambda context, submission, first: None)


@planted(11, seed=1)
def repeated_drain_is_applied_twice(patch):
    """A drain of a drained node is applied again, and the history records it twice."""
    cordon = node_requests._cordon
    patch.setattr(
        node_requests,
        "_cordon",
        lambda context, node, submission: cordon(context, replace(node, cordon=None), submission),
    )


@planted(11, seed=2)
def repeated_cancel_is_applied_twice(patch):
    """Each further cancel of a stopping job changes the job's record again."""
    cancel = jobs.cancel

    def anew(case, by, why, facts):
        done = cancel(case, by, why, facts)
        return done if done.job.state.terminal else replace(done, job=replace(done.job, detail=f"{done.job.detail}!"))

    patch.setattr(jobs, "cancel", anew)


@planted(8, seed=1)
def cancel_of_an_ended_job_is_stored(patch):
    """A cancel sets a succeeded job to CANCELLED, and the store accepts it."""
    cancel = jobs.cancel

    def late(case, by, why, facts):
        if not case.job.state.terminal:
            return cancel(case, by, why, facts)
        job = replace(case.job, state=JobState.CANCELLED, exit_code=143, cancelled_by=by)
        return TransitionResult(job=job, attempt=None)

    patch.setattr(jobs, "cancel", late)
    patch.setattr(commit_checks, "_check_job", lambda job, standings: None)


@planted(0, seed=1)
def cancel_of_an_ended_job_is_refused_by_the_store(patch):
    """A cancel sets a succeeded job to CANCELLED; the store refuses the commit, and the caller gets a request to retry."""
    cancel = jobs.cancel

    def late(case, by, why, facts):
        if not case.job.state.terminal:
            return cancel(case, by, why, facts)
        return TransitionResult(
            job=replace(case.job, state=JobState.CANCELLED, exit_code=143, cancelled_by=by), attempt=None
        )

    patch.setattr(jobs, "cancel", late)


@planted(25, seed=0)
def attempts_of_a_lost_node_have_no_order(patch):
    """The order in which jobs of a lost node are handled depends on randomness outside the seed."""
    attempts_on = World.attempts_on
    dice = random.SystemRandom()

    def shuffled(self, node_id):
        found = attempts_on(self, node_id)
        return dice.sample(found, len(found))

    patch.setattr(World, "attempts_on", shuffled)


@planted(12, seed=14, events=2000)
def cancel_does_not_replace_a_preemption(patch):
    """The first cause of a stop remains, so a job cancelled meanwhile waits and runs again."""
    cancel = jobs.cancel

    def meek(case, by, why, facts):
        done = cancel(case, by, why, facts)
        return replace(done, job=replace(done.job, cancelled_by=""))

    patch.setattr(jobs, "cancel", meek)
    patch.setattr(attempts, "cause_of_end", lambda attempt, cause: attempt.stop_cause or cause)
