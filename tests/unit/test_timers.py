"""Deadlines: asked for what is due, not looked through."""

from phalanx.controller.timers import SWEEP_LEAST, DeadlineKind, Timers
from phalanx.core.ids import Epoch, Generation, JobId

A, B = JobId("1"), JobId("2")


def armed(*deadlines):
    timers = Timers()
    for at_s, due, job_id in deadlines:
        timers.arm(at_s, due, job_id, Epoch(1), Generation(0))
    return timers


def test_what_is_due_comes_earliest_first_and_the_limit_before_the_rest():
    timers = armed(
        (5.0, DeadlineKind.REMIND, A),
        (3.0, DeadlineKind.START, B),
        (5.0, DeadlineKind.LIMIT, B),
        (9.0, DeadlineKind.REMIND, B),
    )
    assert [(each.at_s, each.kind) for each in timers.take(5.0)] == [
        (3.0, DeadlineKind.START),
        (5.0, DeadlineKind.LIMIT),
        (5.0, DeadlineKind.REMIND),
    ]
    assert timers.take(8.9) == []


def test_what_fired_in_a_step_that_never_happened_is_due_again():
    timers = armed((5.0, DeadlineKind.LIMIT, A))
    first = timers.take(6.0)
    timers.undo()
    assert timers.take(6.0) == first
    assert timers.settle() == first
    timers.undo()
    assert timers.take(6.0) == []


def test_next_is_the_first_that_stands():
    timers = armed((5.0, DeadlineKind.START, A), (7.0, DeadlineKind.REMIND, B))
    assert timers.next_s(lambda deadline: deadline.job_id == B) == 7.0
    assert timers.next_s(lambda _: False) == float("inf")
    assert timers.take(100.0) == []


def test_deadlines_of_ten_thousand_short_jobs_with_limits_of_a_week_do_not_stay_for_the_week():
    timers, live = Timers(), {JobId("9999")}
    for number in range(10_000):
        timers.arm(604_800.0 + number, DeadlineKind.LIMIT, JobId(str(number)), Epoch(1), Generation(0))
        timers.sweep(lambda deadline: deadline.job_id in live)
    assert len(timers._heap) <= SWEEP_LEAST
    assert [deadline.job_id for deadline in timers.take(1e9)][-1] == "9999"


def test_sweep_loses_nothing_that_stands():
    timers = Timers()
    for number in range(3 * SWEEP_LEAST):
        timers.arm(float(number), DeadlineKind.LIMIT, A, Epoch(1), Generation(0))
        timers.sweep(lambda _: True)
    assert [deadline.at_s for deadline in timers.take(1e9)] == [float(number) for number in range(3 * SWEEP_LEAST)]
