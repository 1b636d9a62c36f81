"""The diagnosis, once every member is accounted for: a lost node before a signal before an exit code, and who is charged for it.

Evidence is drawn in words: `0:1` rank 0 ended with code 1, `2:s9` by signal 9, a `!` behind it: we had asked. Two ranks a node.
"""

from dataclasses import replace

import pytest

from phalanx.core.errors import Conflict
from phalanx.core.ids import NodeId, ServiceId, UserId
from phalanx.core.lifecycle import attempt as machine
from phalanx.core.lifecycle import job as requests
from phalanx.core.lifecycle import settle as verdicts
from phalanx.core.lifecycle.events import MemberLost, StopRequested
from phalanx.core.lifecycle.transitions import (
    AVOID_MAX,
    BACKOFF_FIRST_S,
    NO_PROGRESS_BUDGET,
    PORT_TRIES,
)
from phalanx.core.state.commands import CleanUpAttempt, PrepareTasks
from phalanx.core.state.events import UpdateJob
from phalanx.core.state.reports import CheckpointSaved, MemberFrozen, MemberRefused, MemberStopped, TaskExited
from phalanx.core.work.attempt import TIME_LIMIT_NOTE, EndCause
from phalanx.core.work.job import BACKOFF_MAX_S
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import T, allocation, at, checkpoint, exited, facts, job, keyed, placed

S = AttemptState
judge = verdicts.determine_cause


# Untyped on purpose, as all drawings: they look at what they know is there.
def transition(case, happening, surroundings):
    return machine.transition(case, happening, surroundings)


def settle(case, attempt, surroundings):
    return verdicts.settle(case, attempt, surroundings)


def cancel(*wanted):
    return requests.cancel(*wanted)


def place(*wanted):
    return requests.place(*wanted)


def requeue(*wanted):
    return requests.requeue(*wanted)


def update(*wanted):
    return requests.update(*wanted)


N0, N1 = NodeId("n0"), NodeId("n1")


def evidence(words, ending=None, lost="", one=None):
    """A case that is about to be settled."""
    gone = dict.fromkeys(lost.split(), "lost")
    case = at(placed(one), S.STOPPING, **{"n0": "stopped", "n1": "stopped", **gone})
    exits = []
    for place_, word in enumerate(words.split()):
        rank, _, how = word.partition(":")
        by_us, how = how.endswith("!"), how.removesuffix("!")
        signal = int(how[1:]) if how.startswith("s") else None
        exits.append(
            exited(
                int(rank), f"n{int(rank) // 2}", None if signal else int(how), signal=signal, by_us=by_us, at_s=place_
            )
        )
    return replace(case, attempt=replace(case.attempt, exits=tuple(exits), stop_cause=ending, why="so it was"))


C = EndCause
VERDICTS = [
    # evidence                  wanted       lost   diagnosis
    ("0:0 1:0 2:0 3:0", None, "", C.SUCCEEDED),
    ("0:0 1:0 2:0 3:0", C.PREEMPTED, "", C.SUCCEEDED),  # all had finished by themselves
    ("0:0 1:0 2:0 3:0", C.TIMEOUT, "", C.SUCCEEDED),
    ("0:0 1:0 2:0 3:0", C.REQUEUED, "n1", C.SUCCEEDED),  # and were heard, before the node was lost
    ("0:0 1:0 2:0 3:0", C.CANCELLED, "", C.CANCELLED),  # acknowledged is acknowledged
    ("0:0 1:0 2:0", None, "n1", C.NODE_FAIL),
    ("0:0! 1:0! 2:0! 3:0!", C.PREEMPTED, "", C.PREEMPTED),  # saved and left because we asked
    ("0:0! 1:0 2:0 3:0", C.DRAINED, "", C.DRAINED),
    ("0:1 1:1", None, "n1", C.NODE_FAIL),  # the peers' echo
    ("0:1 1:s6", None, "n1", C.NODE_FAIL),
    ("0:1 1:1 2:1 3:s9", None, "", C.CRASH),
    ("0:1 1:1 2:1 3:s9!", None, "", C.FAILED),  # that signal was ours
    ("0:1", None, "", C.FAILED),
    ("0:0 1:0 2:3 3:0", None, "", C.FAILED),
    ("", None, "", C.START_FAIL),
    ("0:0 1:0", None, "", C.START_FAIL),
    ("", None, "n0", C.NODE_FAIL),
    ("0:1 1:1", C.CANCELLED, "n1", C.CANCELLED),
    ("0:s11", C.CANCELLED, "", C.CANCELLED),
    ("0:1", C.REQUEUED, "n1", C.REQUEUED),
    ("0:143!", C.TIMEOUT, "n1", C.TIMEOUT),
    ("0:s9!", C.FREEZE, "", C.FREEZE),
    ("0:s9!", C.FREEZE, "n1", C.NODE_FAIL),
    ("0:1", C.PORT_TAKEN, "", C.PORT_TAKEN),
    ("", C.START_FAIL, "", C.START_FAIL),
    ("2:143!", C.NODE_FAIL, "", C.NODE_FAIL),
    ("", C.FAILED, "", C.FAILED),  # a refusal that is the job's own fault
    ("", C.FAILED, "n1", C.NODE_FAIL),
]


@pytest.mark.parametrize(("words", "ending", "lost", "diagnosis"), VERDICTS)
def test_verdict(words, ending, lost, diagnosis):
    assert judge(evidence(words, ending, lost).attempt) is diagnosis


@pytest.mark.parametrize("ending", [C.PREEMPTED, C.MOVED, C.DRAINED, C.REQUEUED])
def test_a_replica_that_ends_by_itself_before_its_stop_reaches_it_is_stopped_all_the_same(ending):
    """It was started again in its place, which others waited for."""
    case = evidence("0:0 1:0 2:0 3:0", ending)
    case = replace(case, job=replace(case.job, replica=ReplicaPosition(service=ServiceId("chat"), revision=1)))
    outcome = settle(case, case.attempt, facts())
    assert (outcome.job.state, outcome.attempt.stop_cause) == (JobState.PENDING, ending)


# diagnosis -> the job's state, why it waits, and what it is charged
CONSEQUENCES = [
    ("0:0 1:0 2:0 3:0", None, "", JobState.SUCCEEDED, None, 0),
    ("", C.CANCELLED, "", JobState.CANCELLED, None, 0),
    ("", C.TIMEOUT, "", JobState.TIMEOUT, None, 0),
    ("0:3", None, "", JobState.FAILED, None, 0),
    ("", C.PREEMPTED, "", JobState.PENDING, WaitReasonCode.PREEMPTED, 0),
    ("", C.DRAINED, "", JobState.PENDING, WaitReasonCode.DRAINED, 0),
    ("", C.REQUEUED, "", JobState.PENDING, WaitReasonCode.REQUEUED, 0),
    ("", C.LIMITED, "", JobState.PENDING, WaitReasonCode.ENGINE_LIMIT, 0),
    ("0:1", None, "n1", JobState.PENDING, WaitReasonCode.NODE_FAIL, 1),
    ("", None, "", JobState.PENDING, WaitReasonCode.START_FAIL, 1),
    ("0:s9", None, "", JobState.RUNNING, None, 1),
    ("", C.FREEZE, "", JobState.RUNNING, None, 0),
    ("0:1", C.PORT_TAKEN, "", JobState.RUNNING, None, 0),
]


@pytest.mark.parametrize(("words", "ending", "lost", "state", "reason", "charged"), CONSEQUENCES)
def test_what_follows_from_the_verdict(words, ending, lost, state, reason, charged):
    case = evidence(words, ending, lost)
    outcome = settle(case, case.attempt, facts(10))
    assert outcome.job.state is state
    assert outcome.job.charged_restarts == charged
    if reason is not None:
        assert outcome.job.reason is reason
        assert outcome.job.detail == "so it was"
    if state is JobState.RUNNING:
        assert (outcome.attempt.state, outcome.attempt.generation) == (S.PLACED, 1)
        assert [type(one) for one in outcome.commands] == [PrepareTasks, PrepareTasks]
        assert {(one.epoch, one.generation, one.restarts) for one in outcome.commands} == {(1, 1, 1)}
    else:
        assert (outcome.attempt.state, outcome.attempt.ended_s) == (S.ENDED, T + 10)
        assert outcome.attempt.causes[-1] is judge(case.attempt)
        assert {one.node_id for one in outcome.commands if isinstance(one, CleanUpAttempt)} == {N0, N1} - {
            NodeId(n) for n in lost.split()
        }
    if state.terminal:
        assert outcome.job.ended_s == T + 10


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("0:3", 3),
        ("2:1 0:7", 1),  # the first to fail by itself
        ("0:143! 2:5", 5),  # what we stopped does not count
        ("3:s9 0:1", 137),
    ],
)
def test_exit_code_is_that_of_the_first_task_that_failed_by_itself(words, code):
    case = evidence(words, one=job("1", gpus="2x2", charged_restarts=NO_PROGRESS_BUDGET))
    assert settle(case, case.attempt, facts()).job.exit_code == code


def test_signal_explains_codes_that_came_before_it():
    """A peer's exit code 1 may be heard before the signal that caused it."""
    case = evidence("0:1 1:1 2:s11", one=job("1", gpus="2x2", charged_restarts=NO_PROGRESS_BUDGET))
    assert settle(case, case.attempt, facts()).job.exit_code == 139


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_user_errors_are_retried_as_often_as_asked():
    one, causes = job("1", gpus="2x2", retry=2), []
    for _ in range(3):
        case = evidence("0:1", one=one)
        outcome = settle(case, case.attempt, facts())
        one = outcome.job
        causes.append((one.state, one.user_retries, one.charged_restarts))
    assert causes == [(JobState.RUNNING, 1, 0), (JobState.RUNNING, 2, 0), (JobState.FAILED, 2, 0)]


def test_refusal_that_is_the_jobs_own_fault_is_not_retried():
    case = evidence("", C.FAILED, one=job("1", gpus="2x2", retry=5))
    assert settle(case, case.attempt, facts()).job.state is JobState.FAILED


@pytest.mark.parametrize(("words", "lost"), [("0:s9", ""), ("0:1", "n1"), ("", "")])
def test_restarts_without_progress_share_one_budget(words, lost):
    last = evidence(words, None, lost, one=job("1", gpus="2x2", charged_restarts=NO_PROGRESS_BUDGET - 1))
    assert not settle(last, last.attempt, facts()).job.state.terminal
    over = evidence(words, None, lost, one=job("1", gpus="2x2", charged_restarts=NO_PROGRESS_BUDGET))
    outcome = settle(over, over.attempt, facts())
    assert outcome.job.state is JobState.FAILED
    assert outcome.job.detail == f"{NO_PROGRESS_BUDGET} restarts without progress; the last: so it was"


def test_published_checkpoint_gives_the_whole_budget_back():
    case = at(placed(job("1", gpus="2x2", charged_restarts=NO_PROGRESS_BUDGET)), S.RUNNING)
    saved = CheckpointSaved(job_id=case.job.id, generation=case.attempt.generation, node_id=N0, resume=checkpoint(1))
    case = transition(case, saved, facts()).case
    assert case.job.charged_restarts == 0
    crashed = evidence("0:s9", one=case.job)
    assert settle(crashed, crashed.attempt, facts()).job.state is JobState.RUNNING


def test_backoff_of_failed_starts_doubles_up_to_its_bound():
    waits = []
    for stalls in range(NO_PROGRESS_BUDGET):
        case = evidence("", one=job("1", gpus="2x2", charged_restarts=stalls))
        waits.append(settle(case, case.attempt, facts()).job.not_before_s - T)
    assert waits == [BACKOFF_FIRST_S * 2**stalls for stalls in range(NO_PROGRESS_BUDGET)]
    assert max(waits) <= BACKOFF_MAX_S


def test_lost_node_is_avoided_and_the_newest_are_remembered():
    known = tuple(NodeId(f"x{number}") for number in range(AVOID_MAX - 1))
    case = evidence("0:1", None, "n1", one=job("1", gpus="2x2", avoided_nodes=(N1, *known)))
    members = tuple(replace(m, why="it died" if m.node_id == N1 else "") for m in case.attempt.members)
    outcome = settle(case, replace(case.attempt, members=members), facts())
    assert outcome.job.avoided_nodes == (*known, N1)


def test_port_taken_again_and_again_is_the_jobs_own():
    """Found by reading: a script that binds a taken port of its own was restarted for ever, uncharged."""
    case = evidence("0:1", C.PORT_TAKEN)
    for tries in range(1, PORT_TRIES + 1):
        outcome = settle(case, case.attempt, facts())
        assert outcome.attempt.causes == (C.PORT_TAKEN,) * tries
        attempt = replace(
            outcome.attempt, exits=case.attempt.exits, stop_cause=C.PORT_TAKEN, members=case.attempt.members
        )
        case = replace(case, job=outcome.job, attempt=attempt)
    outcome = settle(case, case.attempt, facts())
    assert (outcome.job.state, outcome.job.exit_code) == (JobState.FAILED, 1)
    assert "bind a fixed port" in outcome.job.detail


def test_freezes_have_no_bound():
    case = evidence("", C.FREEZE)
    case = replace(case, attempt=replace(case.attempt, causes=(C.FREEZE,) * 50))
    assert settle(case, case.attempt, facts()).job.state is JobState.RUNNING


# ---- short histories ------------------------------------------------------------------------------------------------


def run(case, *happenings):
    """The outcome of the last one."""
    *before, last = happenings
    for happening in before:
        case = transition(case, happening, facts(1)).case
    return transition(case, last, facts(1))


def exit_(case, rank, code=1, **how):
    return TaskExited(**keyed(case.attempt), exit=exited(rank, f"n{rank // 2}", code, **how))


def stopped(case, node, **how):
    return MemberStopped(**keyed(case.attempt), node_id=node, at_s=T, **how)


def test_peers_fail_with_code_1_before_the_node_is_known_to_be_lost():
    case = at(placed(), S.RUNNING)
    outcome = run(
        case, exit_(case, 0), exit_(case, 1), stopped(case, N0), MemberLost(node_id=N1, why="its lease is over")
    )
    assert (outcome.attempt.stop_cause, outcome.job.state, outcome.job.user_retries) == (
        C.NODE_FAIL,
        JobState.PENDING,
        0,
    )


def test_rendezvous_port_in_use_restarts_uncharged():
    case = at(placed(), S.RUNNING)
    outcome = run(case, exit_(case, 0), stopped(case, N0, port_in_use=True), stopped(case, N1))
    assert (outcome.attempt.generation, outcome.job.charged_restarts, outcome.job.user_retries) == (1, 0, 0)
    assert outcome.attempt.causes == (C.PORT_TAKEN,)


def test_long_freeze_restarts_in_place_uncharged():
    case = at(placed(), S.RUNNING)
    froze = MemberFrozen(**keyed(case.attempt), node_id=N1, frozen_s=400.0, thawed=False)
    outcome = run(
        case, froze, exit_(case, 2, None, signal=9, by_us=True), stopped(case, N1), exit_(case, 0), stopped(case, N0)
    )
    assert (outcome.attempt.generation, outcome.job.charged_restarts, outcome.attempt.causes) == (1, 0, (C.FREEZE,))


def test_cancel_during_a_crash_ends_cancelled():
    case = at(placed(), S.RUNNING)
    crashed = run(case, exit_(case, 0, None, signal=11)).case
    cancelled = cancel(crashed, "ada", "", facts(2)).case
    outcome = run(cancelled, stopped(case, N0), stopped(case, N1))
    assert (outcome.job.state, outcome.job.exit_code, outcome.job.cancelled_by) == (JobState.CANCELLED, 143, "ada")


def test_preempted_while_all_finished_by_themselves_is_a_success():
    case = at(placed(), S.RUNNING)
    wanted = StopRequested(cause=C.PREEMPTED, why="a job of higher priority")
    ends = [exit_(case, rank, 0) for rank in range(4)]
    outcome = run(case, *ends[:2], wanted, *ends[2:], stopped(case, N0), stopped(case, N1))
    assert outcome.job.state is JobState.SUCCEEDED


def test_refused_by_the_node_and_by_the_job():
    for charge, state in ((False, JobState.PENDING), (True, JobState.FAILED)):
        case = at(placed(), S.PLACED)
        refused = MemberRefused(**keyed(case.attempt), node_id=N0, why="no such file", job_at_fault=charge)
        outcome = run(case, refused, stopped(case, N1))
        assert outcome.job.state is state
        assert outcome.job.avoided_nodes == (() if charge else (N0,))


def test_the_code_of_a_refusal_is_the_jobs():
    for code, expected in ((127, 127), (126, 126), (4, 4), (0, 1)):
        case = at(placed(), S.PLACED)
        refused = MemberRefused(
            **keyed(case.attempt), node_id=N0, why="no such command", job_at_fault=True, exit_code=code
        )
        outcome = run(case, refused, stopped(case, N1))
        assert (outcome.job.exit_code, outcome.attempt.exit_code) == (expected, expected)


def test_gang_with_a_lost_member_never_restarts_in_place():
    case = evidence("0:s9", C.FREEZE)
    case = replace(case, attempt=replace(case.attempt, members=evidence("", None, "n1").attempt.members))
    outcome = settle(case, case.attempt, facts())
    assert outcome.job.state is JobState.PENDING


@pytest.mark.parametrize(
    ("ending", "diagnosis"),
    [(None, C.TIMEOUT), (C.NODE_FAIL, C.TIMEOUT), (C.CANCELLED, C.CANCELLED), (C.REQUEUED, C.REQUEUED)],
)
def test_limit_that_a_supervisor_kept_while_the_head_was_away_is_a_timeout(ending, diagnosis):
    case = evidence("0:143!", ending)
    exits = tuple(replace(exit, note=TIME_LIMIT_NOTE) for exit in case.attempt.exits)
    assert judge(replace(case.attempt, exits=exits)) is diagnosis


# ---- requests -------------------------------------------------------------------------------------------------------


def test_cancel_of_a_waiting_job_is_at_once_and_idempotent():
    case = replace(placed(), attempt=None, job=job("1", held=True))
    once = cancel(case, "ada", "no need", facts(3))
    assert (once.job.state, once.job.held, once.job.exit_code, once.job.ended_s) == (
        JobState.CANCELLED,
        False,
        143,
        T + 3,
    )
    twice = cancel(once.case, "bob", "", facts(4))
    assert twice.job is once.job
    assert not twice.history


def test_requeue_of_a_waiting_job_is_a_conflict():
    with pytest.raises(Conflict, match="only a running job can be requeued"):
        requeue(replace(placed(), attempt=None, job=job("1")), "ada", facts())


def test_placed_attempt_has_the_next_epoch_and_asks_every_node():
    outcome = place(
        job("7", gpus="2x2", epoch=3, time_limit_s=600.0, checkpoints=(checkpoint(1), checkpoint(2))),
        allocation("n0:0,1 n1:0,1"),
        facts(5),
    )
    assert (outcome.job.state, outcome.attempt.epoch) == (JobState.RUNNING, 4)
    first = outcome.commands[0]
    assert [one.step for one in first.candidates] == [2, 1]
    assert (first.checkpoint_dir, first.output_dir) == ("/ckpt/7-k/epoch-4-k", "/out/7-k")
    assert (first.deadline_s, first.restarts) == (T + 5 + 600, 3)


def test_deadline_of_a_restart_is_unmoved_by_a_clock_that_was_set():
    """Found by reading: after a jump of a day, an in-place restart was told a deadline long past, and its supervisor ended it."""
    case = evidence("0:s9", one=job("1", gpus="2x2", time_limit_s=600.0))
    after_a_day = facts(86_400 + 10, ages_s={case.job.id: 10.0})
    outcome = settle(case, case.attempt, after_a_day)
    assert outcome.commands[0].deadline_s == after_a_day.now_s + 590.0


@pytest.mark.parametrize(("limit_s", "refused"), [(300.0, False), (600.0, False), (900.0, True)])
def test_limit_of_a_running_job_can_only_be_shortened(limit_s, refused):
    """Its supervisors end the tasks one grace after the limit they were told at the start."""
    case = placed(job("1", gpus="2x2", time_limit_s=600.0))
    event = UpdateJob(job_id=case.job.id, by=UserId("ada"), time_limit_s=limit_s)
    if refused:
        with pytest.raises(Conflict, match="only be shortened"):
            update(case, event, facts())
    else:
        assert update(case, event, facts()).job.spec.time_limit_s == limit_s
    waiting = replace(case, attempt=None, job=replace(case.job, state=JobState.PENDING))
    assert update(waiting, event, facts()).job.spec.time_limit_s == limit_s
