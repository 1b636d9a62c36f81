"""The attempt machine: every edge of its table, and that all the rest changes nothing.

The gang of these drawings: job 1 on n0 (ranks 0, 1) and n1 (ranks 2, 3), unless said otherwise.
"""

from dataclasses import replace

import pytest

from phalanx.core.ids import Epoch, Generation, NodeId, ServiceId
from phalanx.core.lifecycle import attempt as machine
from phalanx.core.lifecycle.attempt import TRANSITIONS
from phalanx.core.lifecycle.events import (
    DevicesRegained,
    MemberLost,
    ReminderDue,
    SleepRequested,
    StartOverdue,
    StopRequested,
    WakeDelayed,
    WakeRequested,
)
from phalanx.core.state.commands import (
    CleanUpAttempt,
    DeleteCheckpoints,
    PrepareTasks,
    RunSleepHook,
    StartTasks,
    StopTasks,
)
from phalanx.core.state.reports import (
    AttemptQueued,
    AttemptReclaimed,
    AttemptWithdrawn,
    CheckpointFailed,
    CheckpointSaved,
    MemberFrozen,
    MemberHung,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    ProgressReported,
    ReadinessChanged,
    SleepHookEnded,
    TaskExited,
)
from phalanx.core.work.attempt import EndCause, MemberState, Sleep, SleepPhase
from phalanx.core.work.pace import MeasuredPace, StepPace
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.states import AttemptState, JobState
from tests.builders import T, at, checkpoint, exited, facts, job, keyed, make_fleet, placed

S = AttemptState


def transition(case, happening, surroundings):
    """Untyped on purpose, as all drawings: they look at what they know is there."""
    return machine.transition(case, happening, surroundings)


N0, N1 = NodeId("n0"), NodeId("n1")


def one_of_each(attempt):
    """A happening of each kind, about n0, as it would come at this attempt."""
    key = keyed(attempt)
    saved = {name: key[name] for name in ("job_id", "generation")}
    return {
        MemberReady: MemberReady(**key, node_id=N0, port=29500),
        MemberRefused: MemberRefused(**key, node_id=N0, why="device 1 is sick", job_at_fault=False),
        MemberStarted: MemberStarted(**key, node_id=N0, at_s=T),
        ReadinessChanged: ReadinessChanged(**key, node_id=N0, ready=True),
        SleepRequested: SleepRequested(),
        WakeRequested: WakeRequested(),
        WakeDelayed: WakeDelayed(why="device 0 of n0 is in use by job 7"),
        DevicesRegained: DevicesRegained(),
        SleepHookEnded: SleepHookEnded(**key, node_id=N0, turn=attempt.sleep_turn, sleep=True),
        TaskExited: TaskExited(**key, exit=exited(0, "n0", 1)),
        MemberStopped: MemberStopped(**key, node_id=N0, at_s=T),
        MemberFrozen: MemberFrozen(**key, node_id=N0, frozen_s=400.0, thawed=False),
        MemberHung: MemberHung(**key, node_id=N0, silent_s=61.0, limit_s=30.0, step=7),
        CheckpointSaved: CheckpointSaved(**saved, node_id=N0, resume=checkpoint(10, attempt.epoch)),
        CheckpointFailed: CheckpointFailed(**key, step=5, error="no space left"),
        ProgressReported: ProgressReported(**key, step=5),
        MemberLost: MemberLost(node_id=N0, why="it died"),
        StopRequested: StopRequested(cause=EndCause.REQUEUED, why="requeued by ada"),
        StartOverdue: StartOverdue(silent=(N0,), waited_s=60.0),
        ReminderDue: ReminderDue(node_id=N0),
        AttemptWithdrawn: AttemptWithdrawn(
            job_id=key["job_id"], epoch=key["epoch"], why="others were faster", nodes=(N0,), cause=EndCause.CONTENDED
        ),
        AttemptQueued: AttemptQueued(job_id=key["job_id"], epoch=key["epoch"], why="2 before it"),
        AttemptReclaimed: AttemptReclaimed(job_id=key["job_id"], epoch=key["epoch"], why="a higher priority"),
    }


KINDS = list(one_of_each(placed().attempt))

# What follows, and which commands go out (P prepare, S start, K stop); "." for nothing at all. With n1 as the state has it.
EDGES = {
    #               PLACED          STARTING        RUNNING         STOPPING
    MemberReady: ("PLACED -", ".", ".", "."),
    MemberRefused: ("STOPPING K1", "STOPPING K1", ".", "."),
    MemberStarted: (".", "STARTING -", ".", "."),
    ReadinessChanged: (".", "STARTING -", "RUNNING -", "."),
    **dict.fromkeys(
        (SleepRequested, WakeRequested, WakeDelayed, DevicesRegained, SleepHookEnded), (".", ".", "RUNNING -", ".")
    ),  # of a job that does not sleep; TABLE_OF_SLEEP has the others
    TaskExited: (".", "STOPPING K0K1", "STOPPING K0K1", "STOPPING -"),
    MemberStopped: ("STOPPING K1", "STOPPING K1", "STOPPING K1", "STOPPING -"),
    MemberFrozen: ("STOPPING K0K1", "STOPPING K0K1", "STOPPING K0K1", "."),
    MemberHung: (".", ".", "STOPPING K0K1", "."),
    CheckpointSaved: ("PLACED -", "STARTING -", "RUNNING -", "STOPPING -"),
    ProgressReported: ("PLACED -", "STARTING -", "RUNNING -", "STOPPING -"),
    CheckpointFailed: ("PLACED -", "STARTING -", "RUNNING -", "STOPPING -"),
    MemberLost: ("STOPPING K1", "STOPPING K1", "STOPPING K1", "STOPPING K1"),
    StopRequested: ("STOPPING K0K1", "STOPPING K0K1", "STOPPING K0K1", "STOPPING K0K1"),
    StartOverdue: ("STOPPING K0K1", ".", ".", "."),
    ReminderDue: ("PLACED P0", "STARTING S0", "RUNNING -", "STOPPING K0"),
    AttemptWithdrawn: ("ENDED F0F1", ".", ".", "ENDED F0F1"),
    AttemptQueued: ("PLACED -", ".", ".", "."),
    AttemptReclaimed: (".", "STOPPING K0K1", "STOPPING K0K1", "STOPPING K0K1"),
}
LETTER = {
    PrepareTasks: "P",
    StartTasks: "S",
    RunSleepHook: "H",
    StopTasks: "K",
    CleanUpAttempt: "F",
    DeleteCheckpoints: "D",
}


def commands(outcome):
    return "".join(LETTER[type(one)] + one.node_id[1:] for one in outcome.commands) or "-"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", [S.PLACED, S.STARTING, S.RUNNING, S.STOPPING])
def test_edge_of_the_table(state, kind):
    case = at(placed(), state)
    outcome = transition(case, one_of_each(case.attempt)[kind], facts(1))
    expected = EDGES[kind][list(S).index(state)]
    assert ((state, kind) in TRANSITIONS) == (expected != ".")
    if expected == ".":
        assert outcome.job is case.job
        assert outcome.attempt is case.attempt
        assert not outcome.commands
        assert not outcome.history
    else:
        assert f"{outcome.attempt.state.name} {commands(outcome)}" == expected


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_happens_to_a_job_without_an_attempt_or_with_an_ended_one(kind):
    case = placed()
    happening = one_of_each(case.attempt)[kind]
    ended = replace(case, attempt=replace(case.attempt, state=S.ENDED))
    for none in (replace(case, attempt=None), ended):
        outcome = transition(none, happening, facts(1))
        assert (outcome.job, outcome.attempt, outcome.commands, outcome.history) == (none.job, none.attempt, (), ())


def test_readiness_counts_for_replicas_alone_and_from_their_first_node():
    """A node may report what it likes: a job has no port, and the second node of a replica does not serve."""
    one = at(placed(), S.RUNNING)
    ready = {**keyed(one.attempt), "ready": True}
    assert transition(one, ReadinessChanged(**ready, node_id=N0), facts(1)).attempt is one.attempt
    replica = replace(one.job, replica=ReplicaPosition(service=ServiceId("web"), revision=2))
    case = replace(one, job=replica, attempt=replace(one.attempt, service_port=8000))
    assert transition(case, ReadinessChanged(**ready, node_id=N1), facts(1)).attempt is case.attempt
    outcome = transition(case, ReadinessChanged(**ready, node_id=N0), facts(1))
    assert outcome.attempt.serving
    (line,) = outcome.history
    assert line.facts == {"service": "web", "revision": 2, "address": "127.0.0.1", "port": 8000, "ready": 1}
    again = replace(case, attempt=outcome.attempt)
    assert transition(again, ReadinessChanged(**ready, node_id=N0), facts(2)).history == ()
    stopped = transition(again, StopRequested(cause=EndCause.CANCELLED, why="revision 3 replaces it"), facts(2))
    assert [line.facts.get("ready") for line in stopped.history] == [None, 0]
    assert not stopped.attempt.serving


P = SleepPhase
AWAKE = None
# What follows in each phase, whose devices are held then ("2" both nodes', "0" none), and which commands go out.
TABLE_OF_SLEEP = {
    #             awake               FALLING_ASLEEP      ASLEEP       WAITING      WAKING
    "sleep": ("FALLING_ASLEEP 2 H0", ".", ".", "ASLEEP 0 -", "."),
    "wake": (".", ".", "WAITING 0 -", ".", "."),
    "delay": (".", ".", ".", "WAITING 0 -", "."),
    "devices": (".", ".", ".", "WAKING 2 H0", "."),
    "slept": (".", "ASLEEP 0 -", ".", ".", "."),
    "did not sleep": (".", "WAKING 2 H0", ".", ".", "."),
    "woke": (".", ".", ".", ".", "AWAKE 2 -"),
    "did not wake": (".", ".", ".", ".", "STOPPING 2 K0K1"),
    "late answer": (".", ".", ".", ".", "."),
    "answer of n1": (".", ".", ".", ".", "."),
    "remind": (".", "FALLING_ASLEEP 2 H0", ".", ".", "WAKING 2 H0"),
    "stop": ("STOPPING 2 K0K1", "STOPPING 2 K0K1", "STOPPING 0 K0K1", "STOPPING 0 K0K1", "STOPPING 2 K0K1"),
}
PHASES = (AWAKE, P.FALLING_ASLEEP, P.ASLEEP, P.WAITING, P.WAKING)


def replica_in(phase):
    """A ready replica on both nodes that has come to this phase by the table itself."""
    case = at(placed(), S.RUNNING)
    place = ReplicaPosition(service=ServiceId("web"), revision=2)
    case = replace(
        case, job=replace(case.job, replica=place), attempt=replace(case.attempt, service_port=8000, ready=True)
    )
    for name in {
        AWAKE: (),
        P.FALLING_ASLEEP: ("sleep",),
        P.ASLEEP: ("sleep", "slept"),
        P.WAITING: ("sleep", "slept", "wake"),
        P.WAKING: ("sleep", "slept", "wake", "devices"),
    }[phase]:
        case = replace(case, attempt=transition(case, sleep_event(name, case.attempt), facts(5)).attempt)
    return case


def sleep_event(name, attempt):
    answer = {**keyed(attempt), "node_id": N0, "turn": attempt.sleep_turn}
    falls = attempt.sleep is not None and attempt.sleep.phase is P.FALLING_ASLEEP
    return {
        "sleep": SleepRequested(),
        "wake": WakeRequested(),
        "delay": WakeDelayed(why="device 0 of n0 is in use by job 7"),
        "devices": DevicesRegained(),
        "slept": SleepHookEnded(**answer, sleep=True),
        "did not sleep": SleepHookEnded(**answer, sleep=True, why="POST /sleep answered 500"),
        "woke": SleepHookEnded(**answer, sleep=False),
        "did not wake": SleepHookEnded(**answer, sleep=False, why="POST /wake_up answered 500"),
        "late answer": SleepHookEnded(**{**answer, "turn": attempt.sleep_turn - 1}, sleep=falls),
        "answer of n1": SleepHookEnded(**{**answer, "node_id": N1}, sleep=falls),
        "remind": ReminderDue(node_id=N0),
        "stop": StopRequested(cause=EndCause.REQUEUED, why="requeued by ada"),
    }[name]


@pytest.mark.parametrize("name", TABLE_OF_SLEEP)
@pytest.mark.parametrize("phase", PHASES)
def test_edge_of_the_table_of_sleep(phase, name):
    case = replica_in(phase)
    outcome = transition(case, sleep_event(name, case.attempt), facts(9))
    expected = TABLE_OF_SLEEP[name][PHASES.index(phase)]
    if expected == ".":
        assert (outcome.attempt, outcome.commands, outcome.history) == (case.attempt, (), ())
        return
    after = outcome.attempt
    word = "STOPPING" if after.state is S.STOPPING else "AWAKE" if after.sleep is None else after.sleep.phase.name
    held = sum(bool(grant.devices) for grant in after.allocation.grants)
    assert f"{word} {held} {commands(outcome)}" == expected
    assert after.full_allocation == placed().attempt.allocation
    assert after.allocation.resources.besides_gpus() == case.attempt.allocation.resources.besides_gpus()
    assert after.serving == (word == "AWAKE")
    assert sum(line.facts.get("ready", 1) == 0 for line in outcome.history) == (
        case.attempt.serving and word != "AWAKE"
    )


def test_sleeping_attempt_that_ends_is_billed_for_all_its_devices_without_the_time_asleep():
    case = replica_in(P.ASLEEP)
    assert case.attempt.sleep == Sleep(phase=P.ASLEEP, devices=((0, 1), (0, 1)), since_s=facts(5).now_s)
    case = replace(case, attempt=transition(case, sleep_event("stop", case.attempt), facts(9)).attempt)
    for node in (N0, N1):
        stopped = MemberStopped(**keyed(case.attempt), node_id=node, at_s=T)
        case = replace(case, attempt=transition(case, stopped, facts(25)).attempt)
    assert case.attempt.state is S.ENDED
    assert (case.attempt.allocation, case.attempt.sleep) == (placed().attempt.allocation, None)
    assert case.attempt.asleep_s == 20.0
    assert case.attempt.device_s(facts(99).now_s) == 5.0


REPORTS = [
    kind
    for kind in KINDS
    if kind
    not in (
        MemberLost,
        StopRequested,
        StartOverdue,
        ReminderDue,
        SleepRequested,
        WakeRequested,
        WakeDelayed,
        DevicesRegained,
    )
]


@pytest.mark.parametrize("kind", REPORTS)
@pytest.mark.parametrize("state", [S.PLACED, S.STARTING, S.RUNNING, S.STOPPING])
@pytest.mark.parametrize("epoch", [1, 3])
def test_report_of_another_epoch_changes_nothing(state, kind, epoch):
    case = at(placed(job("1", gpus="2x2", epoch=1)), state)
    assert case.attempt.epoch == 2
    other = replace(case.attempt, epoch=Epoch(epoch))
    outcome = transition(case, one_of_each(other)[kind], facts(1))
    assert outcome.attempt is case.attempt
    assert outcome.job is case.job


@pytest.mark.parametrize(
    "kind",
    [kind for kind in REPORTS if kind not in (CheckpointSaved, CheckpointFailed, ProgressReported, AttemptReclaimed)],
)
@pytest.mark.parametrize("generation", [0, 2])
def test_report_of_another_generation_changes_nothing(kind, generation):
    case = at(placed(), S.RUNNING)
    case = replace(case, attempt=replace(case.attempt, generation=Generation(1)))
    outcome = transition(case, one_of_each(replace(case.attempt, generation=Generation(generation)))[kind], facts(1))
    assert outcome.attempt is case.attempt


# ---- the way up -----------------------------------------------------------------------------------------------------


def test_barrier_opens_when_the_last_node_is_ready():
    case = at(placed(), S.PLACED, n1="ready")
    resume = checkpoint(7)
    outcome = transition(case, MemberReady(**keyed(case.attempt), node_id=N0, port=29777, resume=resume), facts(1))
    assert outcome.attempt.state is S.STARTING
    assert [(one.node_id, one.port, one.resume) for one in outcome.commands] == [
        (N0, 29777, resume),
        (N1, 29777, resume),
    ]


@pytest.mark.parametrize(
    ("used", "said"),
    [
        (None, "the checkpoints of steps 9, 7 are damaged or incomplete: the job starts again from the beginning"),
        (7, "the checkpoint of step 9 is damaged or incomplete: the job resumes from step 7"),
        (9, ""),
    ],
)
def test_a_checkpoint_that_could_not_be_used_is_in_the_history(used, said):
    case = at(placed(), S.PLACED, n1="ready")
    case = replace(case, job=replace(case.job, checkpoints=(checkpoint(7), checkpoint(9))))
    resume = None if used is None else checkpoint(used)
    outcome = transition(case, MemberReady(**keyed(case.attempt), node_id=N0, port=29777, resume=resume), facts(1))
    texts = [line.text for line in outcome.history if line.kind == "checkpoint_rejected"]
    assert texts == [said] * bool(said)


def test_only_node_rank_zero_chooses_port_and_checkpoint():
    case = placed()
    after = transition(case, MemberReady(**keyed(case.attempt), node_id=N1, port=1, resume=checkpoint(99)), facts(1))
    assert after.attempt.resume_from is None
    assert [member.port for member in after.attempt.members] == [None, None]


def test_attempt_runs_when_the_last_node_has_started():
    case = at(placed(), S.STARTING, n1="started")
    outcome = transition(case, MemberStarted(**keyed(case.attempt), node_id=N0, at_s=T), facts(3))
    assert outcome.attempt.state is S.RUNNING
    assert outcome.attempt.running_s == outcome.attempt.first_running_s == outcome.job.started_s == T + 3


def test_node_that_finished_before_the_others_started_does_not_hold_them_up():
    case = at(placed(), S.STARTING)
    for happening in (
        TaskExited(**keyed(case.attempt), exit=exited(0, "n0")),
        TaskExited(**keyed(case.attempt), exit=exited(1, "n0")),
        MemberStarted(**keyed(case.attempt), node_id=N0, at_s=T),
        MemberStopped(**keyed(case.attempt), node_id=N0, at_s=T),
        MemberStarted(**keyed(case.attempt), node_id=N1, at_s=T),
    ):
        case = transition(case, happening, facts(1)).case
    assert case.attempt.state is S.RUNNING


def test_restart_keeps_when_the_job_first_ran():
    case = at(placed(), S.STARTING, n1="started")
    case = replace(case, attempt=replace(case.attempt, first_running_s=T + 1), job=replace(case.job, started_s=T + 1))
    outcome = transition(case, MemberStarted(**keyed(case.attempt), node_id=N0, at_s=T), facts(9))
    assert (outcome.attempt.first_running_s, outcome.attempt.running_s, outcome.job.started_s) == (T + 1, T + 9, T + 1)


# ---- ends, doubled and out of order ---------------------------------------------------------------------------------


def test_exit_reported_twice_counts_once():
    case = at(placed(), S.RUNNING)
    once = transition(case, TaskExited(**keyed(case.attempt), exit=exited(0, "n0")), facts(1))
    twice = transition(once.case, TaskExited(**keyed(case.attempt), exit=exited(0, "n0", 1)), facts(2))
    assert twice.attempt is once.attempt


@pytest.mark.parametrize("order", ["0123", "3210", "2031", "0011223300"])
def test_exits_in_any_order_and_doubled_make_a_success(order):
    case = at(placed(), S.RUNNING)
    for rank in map(int, order):
        case = transition(case, TaskExited(**keyed(case.attempt), exit=exited(rank, f"n{rank // 2}")), facts(1)).case
        assert case.attempt.state is S.RUNNING
    for node in (N1, N1):
        case = transition(case, MemberStopped(**keyed(case.attempt), node_id=node, at_s=T), facts(2)).case
    outcome = transition(case, MemberStopped(**keyed(case.attempt), node_id=N0, at_s=T), facts(2))
    assert outcome.job.state is JobState.SUCCEEDED
    assert [type(one) for one in outcome.commands] == [CleanUpAttempt, CleanUpAttempt]


def test_members_that_end_well_leave_the_others_alone():
    case = at(placed(), S.RUNNING)
    for rank in (0, 1):
        case = transition(case, TaskExited(**keyed(case.attempt), exit=exited(rank, "n0")), facts(1)).case
    outcome = transition(case, MemberStopped(**keyed(case.attempt), node_id=N0, at_s=T), facts(1))
    assert outcome.attempt.state is S.RUNNING
    assert not outcome.commands


def test_first_failing_task_stops_the_gang_at_a_short_grace():
    case = at(placed(), S.RUNNING)
    outcome = transition(case, TaskExited(**keyed(case.attempt), exit=exited(2, "n1", 1)), facts(1))
    assert [(one.reason, one.grace_s) for one in outcome.commands] == [("restart", 1.0), ("restart", 1.0)]


@pytest.mark.parametrize("code", [143, 0])
def test_node_whose_supervisor_leaves_takes_the_gang_down_and_the_job_elsewhere(code):
    """Found by reading: tasks that their own supervisor ended (it got SIGTERM) left the peers in a collective until its timeout,
    and their exit code 1 was then the user's fault."""
    case = at(placed(), S.RUNNING)
    outcome = transition(case, TaskExited(**keyed(case.attempt), exit=exited(2, "n1", code, by_us=True)), facts(1))
    assert outcome.attempt.state is S.STOPPING
    assert commands(outcome) == "K0K1"
    case = transition(outcome.case, TaskExited(**keyed(case.attempt), exit=exited(0, "n0", 1)), facts(2)).case
    case = transition(case, MemberStopped(**keyed(case.attempt), node_id=N1, at_s=T), facts(2)).case
    outcome = transition(case, MemberStopped(**keyed(case.attempt), node_id=N0, at_s=T), facts(2))
    assert (outcome.job.state, outcome.attempt.stop_cause, outcome.job.avoided_nodes) == (
        JobState.PENDING,
        EndCause.NODE_FAIL,
        (N1,),
    )


@pytest.mark.parametrize("state", [S.PLACED, S.STARTING, S.RUNNING])
def test_node_that_has_nothing_of_the_job_any_more_stops_the_gang(state):
    """Found by reading: a supervisor that had lost its Prepare said "stopped", and the others waited at the rendezvous."""
    case = at(placed(), state)
    outcome = transition(case, MemberStopped(**keyed(case.attempt), node_id=N1, at_s=T), facts(1))
    assert (outcome.attempt.state, outcome.attempt.stop_cause) == (S.STOPPING, EndCause.START_FAIL)
    assert commands(outcome) == "K0"


def test_lost_node_explains_what_its_peers_reported_before():
    case = at(placed(), S.RUNNING)
    case = transition(case, TaskExited(**keyed(case.attempt), exit=exited(0, "n0", 1)), facts(1)).case
    outcome = transition(case, MemberLost(node_id=N1, why="its lease is over"), facts(8))
    assert outcome.attempt.why == "n1: its lease is over"


def test_node_is_lost_once():
    case = at(placed(), S.RUNNING)
    once = transition(case, MemberLost(node_id=N1, why="it died"), facts(1))
    assert transition(once.case, MemberLost(node_id=N1, why="again"), facts(2)).attempt is once.attempt


def test_node_of_no_part_of_the_gang_changes_nothing():
    case = at(placed(), S.RUNNING)
    assert transition(case, MemberLost(node_id=NodeId("n9"), why="it died"), facts(1)).attempt is case.attempt


# ---- stops ----------------------------------------------------------------------------------------------------------

USERS = [EndCause.CANCELLED, EndCause.REQUEUED, EndCause.TIMEOUT, EndCause.PREEMPTED, EndCause.DRAINED]


@pytest.mark.parametrize("cause", USERS)
def test_orderly_stop_gives_the_grace_the_user_set(cause):
    case = at(placed(job("1", gpus="2x2", grace_s=45.0)), S.RUNNING)
    outcome = transition(case, StopRequested(cause=cause, why="because"), facts(1))
    assert {one.grace_s for one in outcome.commands} == {45.0}
    assert outcome.attempt.stop_cause is cause


@pytest.mark.parametrize(
    "first", [*USERS, EndCause.FREEZE, EndCause.START_FAIL, EndCause.NODE_FAIL, EndCause.PORT_TAKEN, None]
)
@pytest.mark.parametrize("then", USERS)
def test_which_wish_counts_when_there_are_two(first, then):
    """A cancel goes before everything; else the first wish of a user; what merely befell the attempt gives way to any wish."""
    case = at(placed(), S.STOPPING)
    case = replace(case, attempt=replace(case.attempt, stop_cause=first))
    outcome = transition(case, StopRequested(cause=then, why="because"), facts(1))
    wins = then if then is EndCause.CANCELLED or first not in USERS else first
    assert outcome.attempt.stop_cause is wins


def test_stop_wanted_again_and_again_tells_one_line():
    """Found by reading: a time limit reached while a requeue was under way told a line and stopped anew at every step."""
    case = at(placed(), S.RUNNING)
    case = transition(case, StopRequested(cause=EndCause.REQUEUED, why="requeued by ada"), facts(1)).case
    for second in range(3):
        outcome = transition(case, StopRequested(cause=EndCause.TIMEOUT, why="time limit"), facts(second))
        assert not outcome.history
        assert not outcome.commands


def test_reminder_says_again_only_what_is_unanswered():
    waiting = at(placed(), S.PLACED, n1="ready")
    assert commands(transition(waiting, ReminderDue(node_id=N1), facts(1))) == "-"
    starting = at(placed(), S.STARTING, n1="started")
    assert commands(transition(starting, ReminderDue(node_id=N1), facts(1))) == "-"
    stopping = at(placed(), S.STOPPING, n1="stopped")
    assert commands(transition(stopping, ReminderDue(node_id=N1), facts(1))) == "-"
    lost = at(placed(), S.STOPPING, n1="lost")
    assert commands(transition(lost, ReminderDue(node_id=N1), facts(1))) == "-"


def test_overdue_start_blames_the_silent_nodes():
    case = at(placed(), S.PLACED, n1="ready")
    outcome = transition(case, StartOverdue(silent=(N0,), waited_s=60.0), facts(60))
    assert [member.why for member in outcome.attempt.members] == ["not ready in time", ""]
    assert outcome.attempt.stop_cause is EndCause.START_FAIL


def test_short_freeze_is_only_told():
    case = at(placed(), S.RUNNING)
    outcome = transition(case, MemberFrozen(**keyed(case.attempt), node_id=N0, frozen_s=2.0, thawed=True), facts(1))
    assert outcome.attempt is case.attempt
    assert [line.kind for line in outcome.history] == ["thawed"]


# ---- checkpoints and progress ---------------------------------------------------------------------------------------


def saving(case, *saved):
    """Report these checkpoints; answers the job and the paths that were dropped."""
    dropped = []
    for one in saved:
        event = CheckpointSaved(job_id=case.job.id, generation=case.attempt.generation, node_id=N0, resume=one)
        outcome = transition(case, event, facts(5))
        dropped += [path for command in outcome.commands for path in command.paths]
        case = outcome.case
    return case.job, dropped


def test_last_two_checkpoints_are_kept_and_the_older_deleted():
    kept, dropped = saving(at(placed(), S.RUNNING), checkpoint(10), checkpoint(20), checkpoint(30))
    assert [one.step for one in kept.checkpoints] == [20, 30]
    assert kept.checkpoints[-1].saved_s == T + 5
    assert dropped == [checkpoint(10).path]


def test_checkpoint_reported_twice_or_late_changes_nothing_kept():
    kept, dropped = saving(
        at(placed(), S.RUNNING), checkpoint(10), checkpoint(10), checkpoint(20), checkpoint(30), checkpoint(10)
    )
    assert [one.step for one in kept.checkpoints] == [20, 30]
    assert set(dropped) == {checkpoint(10).path}


def test_checkpoint_saved_anew_in_the_same_folder_is_never_deleted():
    """Found by reading: two entries for one folder, of which the older was dropped, and the folder with it."""
    again = replace(checkpoint(20), digest="sha-other")
    kept, dropped = saving(at(placed(), S.RUNNING), checkpoint(10), checkpoint(20), again, checkpoint(30))
    assert [one.digest for one in kept.checkpoints] == ["sha-other", "sha-1-30"]
    assert again.path not in dropped


def test_corrupt_checkpoint_of_an_earlier_epoch_does_not_push_out_valid_ones():
    """Found by reading: sorted by step, an unreadable step 100 stayed for ever and left room for a single valid checkpoint."""
    before = (checkpoint(90), checkpoint(100))
    case = at(placed(job("1", gpus="2x2", epoch=1, checkpoints=before)), S.RUNNING)
    kept, _ = saving(case, checkpoint(92, epoch=2), checkpoint(94, epoch=2))
    assert [(one.epoch, one.step) for one in kept.checkpoints] == [(2, 92), (2, 94)]


def test_checkpoint_of_a_superseded_epoch_is_not_published():
    case = at(placed(job("1", gpus="2x2", epoch=1)), S.RUNNING)
    job_after, _ = saving(case, checkpoint(500, epoch=1))
    assert job_after.checkpoints == ()


@pytest.mark.parametrize(("step", "stalls"), [(11, 0), (10, 3), (4, 3)])
def test_only_a_new_step_in_a_checkpoint_is_progress(step, stalls):
    case = at(
        placed(
            job(
                "1",
                gpus="2x2",
                charged_restarts=3,
                progress_step=10,
                avoided_nodes=(N1,),
                checkpoints=(checkpoint(10),),
            )
        ),
        S.RUNNING,
    )
    after, _ = saving(case, checkpoint(step, epoch=case.attempt.epoch))
    assert after.charged_restarts == stalls
    assert after.avoided_nodes == (() if stalls == 0 else (N1,))


def test_reported_steps_are_progress_only_for_a_job_that_never_saves():
    bare = at(placed(job("1", gpus="2x2", charged_restarts=3, progress_step=10)), S.RUNNING)
    saves = at(
        placed(job("1", gpus="2x2", charged_restarts=3, progress_step=10, checkpoints=(checkpoint(10),))), S.RUNNING
    )
    for case, stalls in ((bare, 0), (saves, 3)):
        outcome = transition(case, ProgressReported(**keyed(case.attempt), step=12), facts(1))
        assert outcome.job.charged_restarts == stalls


def test_the_pace_of_an_attempt_is_kept_on_its_job_with_what_it_ran_on():
    fleet = make_fleet("r: n0=h100:2 n1=h100:2")
    case = at(placed(job("1", gpus="2x2", checkpoints=(checkpoint(10),))), S.RUNNING)
    surroundings = facts(1, nodes=fleet.nodes)
    pace = StepPace(steps=40, step_s=0.25, tokens=512)
    told = ProgressReported(**keyed(case.attempt), step=40, pace=pace)
    outcome = transition(case, told, surroundings)
    assert outcome.job.paces == (MeasuredPace(epoch=Epoch(1), model="h100", ranks=4, devices=4, pace=pace),)
    again = transition(
        replace(case, job=outcome.job), replace(told, step=41, pace=replace(pace, steps=41)), surroundings
    )
    assert again.job is outcome.job
    assert transition(case, told, facts(1)).job.paces == ()  # its nodes are gone: nothing is known of them


def test_a_job_keeps_when_it_ends_by_its_own_progress_over_its_attempts():
    case = at(placed(job("1", gpus="2x2", attained_s=100.0)), S.RUNNING)
    case = replace(case, attempt=replace(case.attempt, first_running_s=T))
    pace = StepPace(steps=40, step_s=0.25, steps_left=400)
    told = ProgressReported(**keyed(case.attempt), step=40, pace=pace)
    stated = transition(case, told, facts(30)).job.stated_end
    assert (stated.served_s, stated.left_s, stated.epoch) == (130.0, 100.0, case.attempt.epoch)
    silent = transition(case, replace(told, pace=replace(pace, steps_left=None)), facts(30)).job
    assert silent.stated_end is None


def test_states_are_all_in_the_table_but_the_last():
    assert {state for state, _ in TRANSITIONS} == set(S) - {S.ENDED}
    assert {kind for _, kind in TRANSITIONS} == set(KINDS)
    assert MemberState.LOST not in {member.state for member in placed().attempt.members}
