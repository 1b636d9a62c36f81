"""What a job states of its own end: true statements are read, false ones gain for a bounded time."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, union-attr, index"

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.policies.default import OVERDUE_CHECK_S, DefaultPolicy
from phalanx.core.scheduling.policies.job_values import PROGRESS_MIN_S
from phalanx.core.scheduling.policies.parameters import PolicyParameters
from phalanx.core.work.pace import PACE_STEPS_MIN, TRUST_RESTS, StatedEnd, StepPace, with_stated_end
from phalanx.simulator.board_replay import replay_board
from phalanx.simulator.fleet import equal_nodes
from phalanx.simulator.trace import TraceJob
from tests.builders import job, make_fleet
from tests.cell import Cell

GPUS = 8
statements = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.floats(0.0, 1e5)), max_size=12
)


@given(statements)
def test_a_job_is_trusted_once_for_as_long_as_its_first_statement_allows(stated):
    """Whatever it states, in any order: epoch, steps, steps left, and seconds of a step."""
    known, served_s, until_s = None, 0.0, None
    for epoch, steps, left, step_s in stated:
        known = with_stated_end(known, StepPace(steps=steps, step_s=step_s, steps_left=left), epoch, served_s)
        if known is not None:
            until_s = served_s + TRUST_RESTS * known.left_s if until_s is None else until_s
            assert known.trusted_until_s == until_s
            assert known.rest_s(until_s) is None
            assert known.rest_s(2 * until_s + 1.0) is None
        served_s += 1000.0


def test_a_statement_is_replaced_when_its_steps_double_or_by_a_new_attempt():
    first = with_stated_end(None, StepPace(steps=PACE_STEPS_MIN, step_s=2.0, steps_left=100), 1, 50.0)
    assert first == StatedEnd(epoch=1, steps=20, served_s=50.0, left_s=200.0, trusted_until_s=350.0)
    assert with_stated_end(first, StepPace(steps=39, step_s=3.0, steps_left=80), 1, 90.0) is first
    assert with_stated_end(first, StepPace(steps=40, step_s=3.0), 1, 90.0) is first  # it reports no total any more
    later = with_stated_end(first, StepPace(steps=40, step_s=3.0, steps_left=80), 1, 90.0)
    assert (later.served_s, later.left_s, later.trusted_until_s) == (90.0, 240.0, 350.0)
    again = with_stated_end(later, StepPace(steps=20, step_s=1.0, steps_left=70), 2, 80.0)
    assert (again.epoch, again.left_s, again.trusted_until_s) == (2, 70.0, 350.0)
    assert again.rest_s(80.0) == 77.0  # widened
    assert again.rest_s(158.0) is None


def test_a_job_that_states_a_near_end_is_worth_more_until_that_has_passed():
    policy, board = DefaultPolicy(), Board([GPUS])
    policy.attach(board)
    entry = JobEntry(seq=0, job_class=board.job_class((board.need_of(2),)), submit_s=0.0)
    board.add_waiting(entry)
    for n in range(1, 200):
        policy.learn(0, 2, 0.0, 1000.0 * n)
    entry.attained_s = PROGRESS_MIN_S
    by_history = policy.values.value(entry, 0.0)
    for left_s, is_more in ((300.0, True), (3e8, False)):
        entry.stated_end = with_stated_end(
            None, StepPace(steps=20, step_s=left_s / 100, steps_left=100), 1, PROGRESS_MIN_S
        )
        assert (policy.values.value(entry, 0.0) > by_history) is is_more
    entry.stated_end = with_stated_end(None, StepPace(steps=20, step_s=3.0, steps_left=100), 1, PROGRESS_MIN_S)
    entry.attained_s += 331.0
    passed = policy.values.value(entry, 0.0)
    entry.stated_end = None
    assert policy.values.value(entry, 0.0) == passed


def test_the_policy_has_what_a_job_stated_also_on_a_new_board():
    cell = Cell(make_fleet("n0=4"))
    cell.submit(job("a", gpus="2", saves_on_stop=True))
    cell.go_on(60.0)
    stated = StatedEnd(epoch=1, steps=20, served_s=30.0, left_s=600.0, trusted_until_s=930.0)
    cell.put(replace(cell.world.jobs["a"], stated_end=stated))
    cell.go_on(60.0)
    entry = cell.scheduler.entries["a"]
    assert entry.stated_end == stated
    cell.scheduler.stale = True
    cell.go_on(60.0)
    assert cell.scheduler.entries["a"] is not entry
    assert cell.scheduler.entries["a"].stated_end == stated


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from((1900.0, 5000.0, 20_000.0)), st.sampled_from((None, 60.0, 900.0, 5000.0, 1e6))),
        min_size=40,
        max_size=40,
    )
)
def test_jobs_that_lie_cannot_delay_another_past_the_limit_on_waits(young):
    """Each later gang states what it likes. The old one waits at most its limit, and until the gangs are protected no more."""
    knobs = PolicyParameters(overdue_s=20_000.0, overdue_service_factor=0.0, hysteresis=1.0)
    jobs = [TraceJob(id="old", submit_s=0.0, duration_s=40_000.0, gpus=GPUS)]
    jobs += [
        TraceJob(id=f"y{n}", submit_s=2400.0 * (1 + n), duration_s=duration_s, gpus=GPUS, stated_s=stated_s)
        for n, (duration_s, stated_s) in enumerate(young)
    ]
    first = replay_board(jobs, equal_nodes(1, GPUS), lambda: DefaultPolicy(knobs)).jobs[0]
    assert first.wait_s <= knobs.overdue_s + OVERDUE_CHECK_S + knobs.run_min_s + 2 * knobs.round_s + 60.0


def test_gangs_that_lie_wait_for_the_old_one_in_the_end():
    """The case that the bound is for: without a limit, the old gang waits until no other comes."""
    jobs = [TraceJob(id="old", submit_s=0.0, duration_s=40_000.0, gpus=GPUS)]
    jobs += [
        TraceJob(id=f"y{n}", submit_s=2400.0 * (1 + n), duration_s=5000.0, gpus=GPUS, stated_s=900.0) for n in range(40)
    ]

    def wait_s(overdue_s: float) -> float:
        knobs = PolicyParameters(overdue_s=overdue_s, overdue_service_factor=0.0, hysteresis=1.0)
        return replay_board(jobs, equal_nodes(1, GPUS), lambda: DefaultPolicy(knobs)).jobs[0].wait_s

    assert wait_s(float("inf")) > 40_000.0 > wait_s(20_000.0)
