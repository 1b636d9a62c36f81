"""When a job may be moved: after its queue's time, the cluster's, or what a move costs it; never while it would lose half an hour of work."""

import pytest

from phalanx.core.ids import QueueId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import NEVER_S, JobEntry
from phalanx.core.scheduling.estimates.move_times import LOSS_MAX_S, MoveTimes
from phalanx.core.work.queue import Queue, min_stay_s

RESTART = 60.0
PLACED = 1000.0


def entry(*, saved_s=NEVER_S, moves=0, own=None):
    job_class = Board([8]).job_class((Board([8]).need_of(1),), min_stay_s=own)
    return JobEntry(
        seq=1, job_class=job_class, submit_s=0.0, started_s=PLACED, placed_s=PLACED, saved_s=saved_s, moves=moves
    )


@pytest.mark.parametrize(
    ("told", "fields", "stays_s"),
    [
        (None, {}, RESTART),
        (None, {"moves": 1}, 5 * RESTART),
        (None, {"saved_s": 0.0}, 5 * RESTART),
        (45.0, {"moves": 3}, 45.0),
        (45.0, {"own": 7.0}, 7.0),
        (None, {"own": 900.0, "moves": 1}, 900.0),
    ],
)
def test_a_job_stays_for_what_is_set_or_for_what_a_move_costs_it(told, fields, stays_s):
    times, one = MoveTimes(RESTART, told), entry(**fields)
    assert times.from_s(one) == PLACED + stays_s
    assert [times.may_move(one, PLACED + stays_s + late_s) for late_s in (-1.0, 0.0)] == [False, True]


def test_who_does_not_save_when_it_is_stopped_moves_only_within_half_an_hour_of_its_last_save():
    times = MoveTimes(RESTART, 1.0)
    never, lately, asked = entry(saved_s=0.0), entry(saved_s=PLACED + 600.0), entry()
    moments = [PLACED + LOSS_MAX_S + late_s for late_s in (0.0, 1.0, 600.0, 601.0)]
    assert [times.may_move(never, at_s) for at_s in moments] == [True, False, False, False]
    assert [times.may_move(lately, at_s) for at_s in moments] == [True, True, True, False]
    assert all(times.may_move(asked, at_s + 1e6) for at_s in moments)


def test_a_queue_has_the_time_of_the_nearest_above_it():
    queues = [
        Queue(id=QueueId("top"), min_stay_s=60.0),
        Queue(id=QueueId("mid"), parent=QueueId("top")),
        Queue(id=QueueId("low"), parent=QueueId("mid"), min_stay_s=5.0),
    ]
    known = {queue.id: queue for queue in queues}
    assert [min_stay_s(known, queue.id) for queue in queues] == [60.0, 60.0, 5.0]
    assert min_stay_s(known, QueueId("other")) is None
