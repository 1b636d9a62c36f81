"""Bugs of the loop: undoing, leases, time, requests."""

import random
from dataclasses import replace

from phalanx.controller import node_requests, reports, submits
from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.step_result import ControllerTime
from phalanx.core.lifecycle import attempt as attempts
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.transitions import TransitionResult, history_line
from phalanx.core.state import world
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.attempt import Attempt, AttemptState
from phalanx.core.work.job import JobState
from phalanx.store import commit_checks
from tests.simulation.planted.bug import planted


@planted(1, seed=6, events=2000)
def a_refused_commit_is_undone_in_part(patch):
    """The undo of a refused commit leaves in the books what nodes would have held."""
    undo = WorldChange.undo

    def forgetful(self):
        held = dict(self.world.usage)
        undo(self)
        self.world.usage.clear()
        self.world.usage.update(held)

    patch.setattr(WorldChange, "undo", forgetful)


@planted(1, seed=0)
def devices_are_free_when_the_stop_is_asked_for(patch):
    """An attempt that is stopping holds its devices no longer, though its ranks still run on them."""
    put_attempt = world._INDEXED[Attempt]

    def early(self, attempt):
        put_attempt(self, attempt)
        if attempt.state is AttemptState.STOPPING:
            for grant in attempt.allocation.grants:
                self._set(self.world.usage, grant.node_id, EMPTY_USAGE)

    patch.setitem(world._INDEXED, Attempt, early)


@planted(10, seed=1)
def a_lease_ends_early_at_the_head(patch):
    """The head takes a lease for over, and the node for lost, three seconds before its supervisor does."""
    close_ended = LeaseBook.expire
    patch.setattr(LeaseBook, "expire", lambda self, now_s: close_ended(self, now_s + 3.0))


@planted(10, seed=3)
def a_death_of_an_earlier_life_is_believed(patch):
    """An engine's word of a death counts for whoever speaks for the node by then."""
    dead = reports._node_dead
    patch.setattr(reports, "_node_dead", lambda context, told: dead(context, replace(told, supervisor_id=None)))


@planted(10, seed=1)
def nobody_is_told_that_he_is_superseded(patch):
    """A renewal's answer never names what counts no longer."""
    renew = LeaseBook.renew
    patch.setattr(LeaseBook, "renew", lambda *args, **kwargs: replace(renew(*args, **kwargs), superseded=[]))


@planted(15, seed=2, events=2000)
def leases_go_by_the_wall_clock(patch):
    """A clock that somebody sets a day ahead ends every lease."""
    let_leases_end = Controller._expire_leases

    def by_the_wall(self, context):
        now = context.now
        context.now = ControllerTime(wall_s=now.wall_s, boot_s=now.wall_s - self._steady_offset(now))
        let_leases_end(self, context)
        context.now = now

    patch.setattr(Controller, "_expire_leases", by_the_wall)


@planted(23, seed=0)
def the_story_quotes_the_whole_job(patch):
    """Where a job is placed or cancelled, the history tells its specification too, with its variables."""
    patch.setattr(
        jobs,
        "history_line",
        lambda case, facts, kind, text, **more: history_line(case, facts, kind, f"{text} {case.job.spec}", **more),
    )


@planted(11, seed=0)
def a_key_is_not_remembered(patch):
    """A submit that is repeated with the same key makes another job."""
    patch.setattr(submits, "_remember_key", lambda context, submission, first: None)


@planted(11, seed=0)
def a_drain_that_is_repeated_counts_anew(patch):
    """A node that is drained already is drained once more, and whoever reads its history finds it twice."""
    cordon = node_requests._cordon
    patch.setattr(
        node_requests,
        "_cordon",
        lambda context, node, submission: cordon(context, replace(node, cordon=None), submission),
    )


@planted(11, seed=2)
def a_cancel_that_is_repeated_counts_anew(patch):
    """A cancel writes into the record of a job that is stopping already, each time once more."""
    cancel = jobs.cancel

    def anew(case, by, why, facts):
        done = cancel(case, by, why, facts)
        return done if done.job.state.terminal else replace(done, job=replace(done.job, detail=f"{done.job.detail}!"))

    patch.setattr(jobs, "cancel", anew)


@planted(8, seed=0)
def a_cancel_ends_what_is_over(patch):
    """A cancel makes a CANCELLED job of one that has succeeded, and the store takes it."""
    cancel = jobs.cancel

    def late(case, by, why, facts):
        if not case.job.state.terminal:
            return cancel(case, by, why, facts)
        job = replace(case.job, state=JobState.CANCELLED, exit_code=143, cancelled_by=by)
        return TransitionResult(job=job, attempt=None)

    patch.setattr(jobs, "cancel", late)
    patch.setattr(commit_checks, "_check_job", lambda job, standings: None)


@planted(0, seed=0)
def a_cancel_hands_in_what_is_over(patch):
    """A cancel makes a CANCELLED job of one that has succeeded; the store refuses it, and whoever asked is told to try again."""
    cancel = jobs.cancel

    def late(case, by, why, facts):
        if not case.job.state.terminal:
            return cancel(case, by, why, facts)
        return TransitionResult(
            job=replace(case.job, state=JobState.CANCELLED, exit_code=143, cancelled_by=by), attempt=None
        )

    patch.setattr(jobs, "cancel", late)


@planted(25, seed=0)
def attempts_of_a_node_come_in_any_order(patch):
    """Which job of a lost node is dealt with first hangs on chance that no seed decides."""
    attempts_on = World.attempts_on
    dice = random.SystemRandom()

    def shuffled(self, node_id):
        found = attempts_on(self, node_id)
        return dice.sample(found, len(found))

    patch.setattr(World, "attempts_on", shuffled)


@planted(12, seed=48, events=2000)
def a_cancel_does_not_outrank_a_preemption(patch):
    """The first cause of a stop stays, and the job that was cancelled meanwhile waits and runs again."""
    cancel = jobs.cancel

    def meek(case, by, why, facts):
        done = cancel(case, by, why, facts)
        return replace(done, job=replace(done.job, cancelled_by=""))

    patch.setattr(jobs, "cancel", meek)
    patch.setattr(attempts, "_ending", lambda attempt, cause: attempt.stop_cause or cause)
