"""Which state each part of a device has, as a table; and when a level of activity begins."""

from dataclasses import replace

import pytest

from phalanx.core.accounting.activity import Activity, ActivityLevel, ActivityWindow
from phalanx.core.accounting.state_changes import StateBegin, state_begin
from phalanx.core.accounting.usage_states import (
    FOREIGN_USE,
    PROGRESS_UNKNOWN,
    STARTING_MAX_S,
    UNOBSERVED,
    AttemptPhase,
    FreeCapacity,
    NodeCondition,
    NodeRequest,
    PartState,
    StepActivity,
    UsageState,
    attempt_phase,
    free_state,
    held_state,
    node_condition,
)
from phalanx.core.fleet.node import Cordon, NodeState
from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.ids import NodeId
from phalanx.core.work.attempt import EndCause, Member, MemberState
from phalanx.core.work.states import AttemptState
from tests.builders import make_node, placed
from tests.contract.records import pool_node

IN_SERVICE, BROKEN, DRAINING = NodeCondition.IN_SERVICE, NodeCondition.BROKEN, NodeCondition.DRAINING
RUNNING, FAILED, HUNG, PREEMPTED = (
    AttemptPhase.RUNNING,
    AttemptPhase.FAILED,
    AttemptPhase.HUNG,
    AttemptPhase.PREEMPTED,
)
BUSY = Activity(level=ActivityLevel.ACTIVE)
WEAK = Activity(level=ActivityLevel.LOW)
QUIET = Activity(level=ActivityLevel.NONE)
NEW = Activity(level=ActivityLevel.NONE, began=False)
EMPTY = Activity(level=ActivityLevel.NONE, empty=True)
STEPS = StepActivity(silent_s=1.0, gap_s=2.0)
STOPPED = StepActivity(silent_s=61.0, gap_s=2.0)
SAVING = replace(STEPS, saving=True)
NO_STEP_YET = replace(STEPS, stepped=False)

HELD = [
    # condition, phase, activity, steps, running_s, state, note
    (IN_SERVICE, RUNNING, BUSY, STEPS, 500, "computing", ""),
    (IN_SERVICE, RUNNING, BUSY, None, 500, "computing", PROGRESS_UNKNOWN),
    (IN_SERVICE, RUNNING, WEAK, None, 500, "low", ""),
    (IN_SERVICE, RUNNING, WEAK, STEPS, 500, "low", ""),
    (IN_SERVICE, RUNNING, QUIET, STEPS, 500, "low", ""),  # it makes steps: never idle
    (IN_SERVICE, RUNNING, None, STEPS, 500, "computing", UNOBSERVED),
    (IN_SERVICE, RUNNING, None, None, 500, "computing", UNOBSERVED),
    (IN_SERVICE, RUNNING, None, None, 9, "starting", ""),  # the first sample has not come yet
    (IN_SERVICE, RUNNING, QUIET, None, 500, "idle", ""),
    (IN_SERVICE, RUNNING, EMPTY, None, 500, "unoccupied", ""),
    (IN_SERVICE, RUNNING, EMPTY, None, 5, "unoccupied", ""),
    (IN_SERVICE, RUNNING, BUSY, replace(STEPS, data_share=0.51), 500, "data_bound", ""),
    (IN_SERVICE, RUNNING, BUSY, replace(STEPS, data_share=0.5), 500, "computing", ""),
    (IN_SERVICE, RUNNING, QUIET, replace(STEPS, data_share=0.9), 500, "data_bound", ""),
    (IN_SERVICE, RUNNING, BUSY, replace(STEPS, communication_share=0.6), 500, "communicating", ""),
    (IN_SERVICE, RUNNING, BUSY, SAVING, 500, "checkpointing", ""),
    (IN_SERVICE, AttemptPhase.STARTING, None, None, 0, "starting", ""),
    (IN_SERVICE, RUNNING, NEW, None, STARTING_MAX_S - 1, "starting", ""),
    (IN_SERVICE, RUNNING, NEW, None, STARTING_MAX_S, "idle", ""),
    (IN_SERVICE, RUNNING, BUSY, None, 5, "computing", PROGRESS_UNKNOWN),
    (IN_SERVICE, RUNNING, BUSY, NO_STEP_YET, 5000, "starting", ""),
    (IN_SERVICE, RUNNING, QUIET, replace(NO_STEP_YET, announced=True), 500, "idle", ""),
    (IN_SERVICE, RUNNING, BUSY, STOPPED, 500, "hung", ""),  # a collective that spins
    (IN_SERVICE, RUNNING, QUIET, STOPPED, 500, "hung", ""),
    (IN_SERVICE, RUNNING, BUSY, replace(STOPPED, gap_s=7.0), 500, "computing", ""),  # less than ten gaps
    (IN_SERVICE, RUNNING, BUSY, replace(STOPPED, announced=True), 500, "computing", ""),  # an evaluation
    (IN_SERVICE, RUNNING, QUIET, replace(STOPPED, saving=True), 500, "checkpointing", ""),
    (IN_SERVICE, HUNG, BUSY, STEPS, 500, "hung", ""),
    (IN_SERVICE, HUNG, BUSY, SAVING, 500, "hung", ""),
    (IN_SERVICE, FAILED, BUSY, SAVING, 500, "lost", ""),
    (IN_SERVICE, FAILED, QUIET, STOPPED, 500, "lost", ""),
    (IN_SERVICE, PREEMPTED, BUSY, None, 500, "preempted", ""),
    (IN_SERVICE, PREEMPTED, BUSY, SAVING, 500, "checkpointing", ""),
    (DRAINING, RUNNING, BUSY, STEPS, 500, "computing", ""),
    (DRAINING, AttemptPhase.DRAINED, BUSY, STEPS, 500, "draining", ""),
    (IN_SERVICE, AttemptPhase.ENDING, EMPTY, None, 500, "unoccupied", ""),
    (BROKEN, FAILED, BUSY, STEPS, 500, "broken", ""),
    (BROKEN, RUNNING, BUSY, SAVING, 500, "broken", ""),
]


@pytest.mark.parametrize(("condition", "phase", "activity", "steps", "running_s", "state", "note"), HELD)
def test_state_of_a_part_that_a_job_holds(condition, phase, activity, steps, running_s, state, note):
    found = held_state(condition, phase, activity, steps, running_s=running_s)
    assert found == PartState(UsageState(state), note)


def test_part_of_an_unhealthy_device_is_broken():
    assert held_state(IN_SERVICE, RUNNING, BUSY, STEPS, running_s=500, healthy=False).state is UsageState.BROKEN


FOUR_FREE = FreeCapacity(model="h100-80gb", size=8, whole=4, cpus=16, memory_bytes=1 << 36, node_id=NodeId("n0"))
ONE, EIGHT = NodeRequest(devices=1, cpus=4), NodeRequest(devices=8)
FREE = [
    # condition, milli, what waits, what is usual, more, state, note
    (IN_SERVICE, 1000, {}, {ONE}, {}, "free", ""),
    (IN_SERVICE, 1000, {ONE: "quota"}, {ONE}, {}, "free_demand", "quota"),
    (IN_SERVICE, 1000, {EIGHT: "resources"}, {ONE, EIGHT}, {}, "free", ""),  # too large for what is free here
    (IN_SERVICE, 1000, {EIGHT: "resources"}, {EIGHT}, {}, "fragmented", ""),
    (IN_SERVICE, 1000, {replace(EIGHT, devices=16, total=True): "resources"}, set(), {}, "fragmented", ""),
    (IN_SERVICE, 1000, {replace(EIGHT, devices=4, total=True): "priority"}, set(), {}, "free_demand", "priority"),
    (IN_SERVICE, 1000, {replace(ONE, cpus=17): "resources"}, {replace(ONE, cpus=17)}, {}, "fragmented", ""),
    (IN_SERVICE, 1000, {replace(ONE, models=frozenset({"a100"})): "resources"}, {ONE}, {}, "free", ""),
    (IN_SERVICE, 1000, {replace(ONE, models=frozenset({"h100"})): "quota"}, {ONE}, {}, "free_demand", "quota"),
    (IN_SERVICE, 400, {ONE: "resources"}, {ONE}, {}, "fragmented", ""),  # the rest of a shared device
    (
        IN_SERVICE,
        1000,
        {replace(ONE, nodes=frozenset({NodeId("n0"), NodeId("n1")})): "quota"},
        {ONE},
        {},
        "free_demand",
        "quota",
    ),
    (IN_SERVICE, 1000, {replace(ONE, nodes=frozenset({NodeId("n1")})): "quota"}, {ONE}, {}, "free", ""),
    (IN_SERVICE, 1000, {replace(ONE, excluded=frozenset({NodeId("n0")})): "quota"}, {ONE}, {}, "free", ""),
    (IN_SERVICE, 400, {NodeRequest(devices=0, share_milli=400): "priority"}, {ONE}, {}, "free_demand", "priority"),
    (IN_SERVICE, 400, {NodeRequest(devices=0, share_milli=401): "priority"}, {ONE}, {}, "fragmented", ""),
    (IN_SERVICE, 1000, {ONE: "reservation"}, {ONE}, {"reserved": True}, "reserved", ""),
    (IN_SERVICE, 1000, {ONE: "resources"}, {ONE}, {"foreign": True}, "fragmented", FOREIGN_USE),
    (IN_SERVICE, 1000, {ONE: "resources"}, {ONE}, {"healthy": False}, "broken", ""),
    (NodeCondition.PROVISIONING, 1000, {ONE: "resources"}, {ONE}, {}, "provisioning", ""),
    (DRAINING, 1000, {ONE: "nodes_down"}, {ONE}, {}, "draining", ""),
    (BROKEN, 1000, {ONE: "nodes_down"}, {ONE}, {"reserved": True}, "broken", ""),
]


@pytest.mark.parametrize(("condition", "milli", "waiting", "usual", "more", "state", "note"), FREE)
def test_state_of_a_part_that_no_job_holds(condition, milli, waiting, usual, more, state, note):
    found = free_state(condition, FOUR_FREE, milli, waiting=waiting, usual=frozenset(usual), **more)
    assert found == PartState(UsageState(state), note)


def test_every_state_is_in_the_tables():
    assert {row[5] for row in (*HELD, *FREE)} == set(UsageState)


def test_condition_of_a_node():
    node = make_node("n0")
    cordoned = {
        by: replace(node, cordon=Cordon(by=by, why="", since_s=0.0)) for by in ("preflight", "full-disk", "ada")
    }
    assert node_condition(node, None) is IN_SERVICE
    assert node_condition(replace(node, state=NodeState.DOWN), None) is BROKEN
    assert [node_condition(one, None) for one in cordoned.values()] == [BROKEN, BROKEN, DRAINING]
    expected = {
        PoolNodeState.REQUESTED: NodeCondition.PROVISIONING,
        PoolNodeState.PROVISIONING: NodeCondition.PROVISIONING,
        PoolNodeState.UP: IN_SERVICE,
        PoolNodeState.DRAINING: DRAINING,
        PoolNodeState.DOWN: BROKEN,
    }
    assert {state: node_condition(None, replace(pool_node(), state=state)) for state in expected} == expected


def test_phase_of_an_attempt():
    attempt = placed().attempt
    lost = replace(attempt.members[0], state=MemberState.LOST)
    assert isinstance(lost, Member)
    assert attempt_phase(attempt) is AttemptPhase.STARTING
    assert attempt_phase(replace(attempt, state=AttemptState.RUNNING)) is RUNNING
    assert attempt_phase(replace(attempt, state=AttemptState.RUNNING, members=(lost,))) is FAILED
    stopping = {
        cause: attempt_phase(replace(attempt, state=AttemptState.STOPPING, stop_cause=cause)) for cause in EndCause
    }
    assert {cause for cause, phase in stopping.items() if phase is FAILED} == {
        EndCause.FAILED,
        EndCause.CRASH,
        EndCause.NODE_FAIL,
        EndCause.START_FAIL,
        EndCause.UNFIT,
        EndCause.FREEZE,
        EndCause.CONTENDED,
        EndCause.LIMITED,
        EndCause.FAULT,
        EndCause.PORT_TAKEN,
    }
    assert (stopping[EndCause.PREEMPTED], stopping[EndCause.MOVED], stopping[EndCause.HANG]) == (
        PREEMPTED,
        PREEMPTED,
        HUNG,
    )


# ---- activity --------------------------------------------------------------------------------------------------------


def levels(*utilizations, every_ms=1000):
    window = ActivityWindow()
    return [window.add(at * every_ms, value, empty=False) for at, value in enumerate(utilizations, start=1)]


def test_level_that_falls_counts_from_the_first_quiet_second():
    found = levels(*[1.0] * 20, *[0.0] * 12)
    assert found[19].level is ActivityLevel.ACTIVE
    assert (found[-1].level, found[-1].since_ms) == (ActivityLevel.NONE, 20_000)


def test_level_that_rises_counts_from_the_first_busy_second():
    found = levels(*[0.0] * 20, *[1.0] * 5)
    assert (found[-1].level, found[-1].since_ms) == (ActivityLevel.ACTIVE, 20_000)


def test_level_that_rises_in_bursts_counts_from_the_first():
    found = levels(*[0.0] * 20, *[0.09, 0.0, 0.08, 0.0, 0.07, 0.0])
    assert (found[-1].level, found[-1].since_ms) == (ActivityLevel.LOW, 20_000)


def test_a_burst_long_before_is_not_the_begin_of_a_rise():
    found = levels(*[0.0] * 20, 0.5, *[0.0] * 5, *[0.3] * 3)
    assert (found[-1].level, found[-1].since_ms) == (ActivityLevel.ACTIVE, 26_000)


def test_activity_begins_after_the_pause_that_follows_the_start_of_a_program():
    found = levels(0.5, *[0.0] * 4, *[0.2] * 3)
    assert [one.began for one in found][-2:] == [True, True]
    assert (found[-1].level, found[-1].since_ms) == (ActivityLevel.ACTIVE, 5_000)


def test_samples_of_a_standstill_do_not_count_after_it():
    window = ActivityWindow()
    for second in range(1, 21):
        window.add(second * 1000, 0.5 if second <= 5 else 0.0, empty=False)
    window.restart()
    found = window.add(21_000, 0.5, empty=False)
    assert (found.level, found.since_ms) == (ActivityLevel.ACTIVE, 20_000)


def test_a_window_that_restarts_while_active_goes_on():
    window = ActivityWindow()
    for second in range(1, 5):
        window.add(second * 1000, 0.9, empty=False)
    window.restart()
    assert window.add(5_000, 0.9, empty=False).since_ms == 4_000
    assert window.add(6_000, 0.9, empty=False).level is ActivityLevel.ACTIVE


def test_work_that_is_announced_leaves_the_waits_of_the_steps_before_it():
    """The end of training, or an evaluation, says nothing about the steps that waited for data."""
    active = Activity(level=ActivityLevel.ACTIVE, since_ms=90_000)
    before, after = PartState(UsageState.DATA_BOUND), PartState(UsageState.COMPUTING)
    waited = StepActivity(silent_s=0.0, gap_s=0.5, data_share=0.8, share_s=14.0, stepped=True)
    assert state_begin(before, after, active, replace(waited, announced=True), 100_000) == StateBegin()
    assert state_begin(before, after, active, replace(waited, data_share=0.1, share_s=3.0), 100_000).since_ms == 97_000


def test_pauses_between_steps_are_not_idle():
    assert {one.level for one in levels(*[1.0, 0.0, 0.0, 0.0] * 10)[4:]} == {ActivityLevel.ACTIVE}


def test_rare_samples_still_have_a_level():
    found = levels(*[0.0] * 4, *[0.9] * 4, every_ms=30_000)
    assert (found[3].level, found[-1].level) == (ActivityLevel.NONE, ActivityLevel.ACTIVE)


def test_activity_is_remembered():
    found = levels(*[0.0] * 3, *[1.0] * 3, *[0.0] * 20)
    assert (found[4].began, found[-1].level, found[-1].began) == (False, ActivityLevel.NONE, True)


def test_the_start_of_a_program_alone_is_no_activity():
    assert not levels(0.9, 0.4, *[0.0] * 20)[-1].began
