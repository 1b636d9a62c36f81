"""Which nodes reservations shut to whom and until when, and who must leave as one begins."""

from math import inf

import pytest

from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, UserId
from phalanx.core.scheduling.reservation_calendar import (
    DEFAULT_HORIZON_S,
    NOTHING_CLOSED,
    ReservationCalendar,
    ReservationQuery,
    jobs_to_evict,
    reservation_query_of,
)
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import AttemptState
from tests.builders import T, at, job, placed

H = 3600.0


def window(name, nodes, start_h, for_h, *, users=(), queues=(), **more):
    """From `start_h` hours after the beginning, for `for_h` hours; for nobody unless users or queues are named."""
    return Reservation(
        id=ReservationId(name),
        nodes=tuple(NodeId(node) for node in nodes.split()),
        start_s=T + start_h * H,
        end_s=T + (start_h + for_h) * H,
        users=frozenset(map(UserId, users)),
        queues=frozenset(map(QueueId, queues)),
        **more,
    )


def ada(limit_h=None, queue="default", reservation="", user="ada"):
    limit_s = None if limit_h is None else limit_h * H
    return ReservationQuery(user=UserId(user), queue=QueueId(queue), limit_s=limit_s, reservation=reservation)


def excluded(calendar, asker, at_h=0.0):
    return " ".join(sorted(calendar.closed_nodes(asker, T + at_h * H).nodes))


# ---- who is kept off -------------------------------------------------------------------------------------------------


def test_nothing_reserved_shuts_nothing_and_costs_nothing():
    calendar = ReservationCalendar()
    assert not calendar
    assert calendar.closed_nodes(ada(), T) is NOTHING_CLOSED
    assert calendar.valid_until_s(ada(), T) == calendar.next_change_s(T) == inf


def test_while_it_holds_all_but_its_own_are_kept_off():
    calendar = ReservationCalendar([window("fans", "n0 n1", 0, 4, users=["bob"], queues=["nlp"])])
    assert excluded(calendar, ada(1)) == "n0 n1"
    assert excluded(calendar, ada(1, queue="nlp")) == ""
    assert excluded(calendar, ada(1, user="bob")) == ""
    assert excluded(calendar, ada(1), at_h=4) == "", "over at its end"


def test_maintenance_keeps_everybody_off():
    calendar = ReservationCalendar([window("fans", "n0", 0, 4)])
    assert excluded(calendar, ada(1, user="bob", queue="nlp")) == "n0"


@pytest.mark.parametrize(("limit_h", "expected"), [(1.0, ""), (2.0, ""), (2.1, "n0"), (100.0, "n0")])
def test_job_whose_limit_crosses_the_window_is_kept_off_before_it(limit_h, expected):
    calendar = ReservationCalendar([window("fans", "n0", 2, 4)])
    assert excluded(calendar, ada(limit_h)) == expected


def test_job_without_limit_is_kept_off_for_the_last_day_before():
    day_h = DEFAULT_HORIZON_S / H
    calendar = ReservationCalendar([window("fans", "n0", day_h + 1, 4)])
    assert excluded(calendar, ada()) == ""
    assert excluded(calendar, ada(), at_h=1.5) == "n0"


def test_windows_one_after_the_other_shut_as_one_reaches_them():
    calendar = ReservationCalendar([window("b", "n1", 5, 1), window("a", "n0", 2, 1), window("c", "n2", 0, 1)])
    assert excluded(calendar, ada(1)) == "n2"
    assert excluded(calendar, ada(3)) == "n0 n2"
    assert excluded(calendar, ada(6)) == "n0 n1 n2"
    assert excluded(calendar, ada(6), at_h=1) == "n0 n1"
    assert calendar.closed_nodes(ada(6), T).reservations == ("c", "a", "b"), "first to begin first"


def test_ended_early_it_shuts_nothing():
    assert not ReservationCalendar([window("fans", "n0", 0, 4, ended=True)])


# ---- inside one only -------------------------------------------------------------------------------------------------

FLEET = [NodeId("n0"), NodeId("n1"), NodeId("n2")]


def test_job_of_a_reservation_goes_to_its_nodes_only_and_only_while_it_holds():
    calendar = ReservationCalendar([window("exam", "n0 n1", 2, 4, users=["ada"])])
    inside = ada(1, reservation="exam")
    assert calendar.closed_nodes(inside, T).closed_in(FLEET) == set(FLEET)
    assert calendar.closed_nodes(inside, T + 2 * H).closed_in(FLEET) == {"n2"}
    assert calendar.closed_nodes(inside, T + 6 * H).closed_in(FLEET) == set(FLEET)


def test_long_job_of_a_reservation_is_let_in_when_it_begins_though_it_reached_it_before():
    calendar = ReservationCalendar([window("exam", "n0", 2, 4, users=["ada"])])
    inside = ada(3, reservation="exam")
    assert calendar.closed_nodes(inside, T).only == frozenset()
    assert calendar.closed_nodes(inside, T + 2 * H).only == frozenset({NodeId("n0")})


def test_job_of_a_reservation_for_others_or_of_none_goes_nowhere():
    assert ReservationCalendar().closed_nodes(ada(reservation="gone"), T).closed_in(FLEET) == set(FLEET)
    calendar = ReservationCalendar([window("exam", "n0", 0, 4, users=["bob"])])
    assert calendar.closed_nodes(ada(1, reservation="exam"), T).closed_in(FLEET) == set(FLEET)


def test_job_of_a_reservation_heeds_the_window_after_it():
    calendar = ReservationCalendar([window("exam", "n0 n1", 0, 4, users=["ada"]), window("fans", "n0", 4, 1)])
    assert calendar.closed_nodes(ada(5, reservation="exam"), T).closed_in(FLEET) == {"n0", "n2"}


# ---- when to look again ----------------------------------------------------------------------------------------------


def test_answer_holds_until_it_says_and_no_longer():
    calendar = ReservationCalendar(
        [window("a", "n0", 2, 1), window("b", "n1", 5, 1), window("exam", "n2", 8, 1, users=["ada"])]
    )
    for asker in (ada(1), ada(2.5), ada(), ada(1, reservation="exam"), ada(9, reservation="exam")):
        now_s, until_s, seen = T, T, []
        for _ in range(30):
            until_s = calendar.valid_until_s(asker, now_s)
            assert until_s > now_s
            held = calendar.closed_nodes(asker, now_s)
            middle_s = min(now_s + 1.0, (now_s + min(until_s, now_s + H)) / 2)
            assert calendar.closed_nodes(asker, middle_s) == held
            seen.append((held.nodes, held.only))
            if until_s == inf:
                break
            now_s = until_s
        assert until_s == inf
        assert seen[-1] == (frozenset(), frozenset() if asker.reservation else None)
        assert len(seen) >= 3


def test_next_change_is_the_next_beginning_or_end():
    calendar = ReservationCalendar([window("a", "n0", 2, 4), window("b", "n1", 3, 1)])
    found, now_s = [], T
    while (now_s := calendar.next_change_s(now_s)) < inf:
        found.append((now_s - T) / H)
    assert found == [2, 3, 4, 6]


def test_equal_reservations_in_another_order_give_equal_answers():
    windows = [window(name, node, 1, 2) for name, node in (("a", "n0"), ("b", "n1"), ("c", "n2"))]
    assert ReservationCalendar(windows).closed_nodes(ada(), T) == ReservationCalendar(reversed(windows)).closed_nodes(
        ada(), T
    )


def test_jobs_alike_get_the_very_same_answer():
    calendar = ReservationCalendar([window("a", "n0", 2, 4)])
    assert calendar.closed_nodes(ada(3), T) is calendar.closed_nodes(ada(5, user="bob"), T + 60)


# ---- in words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reserved", "asker", "words"),
    [
        (window("fans", "n0 n1", 0, 4), ada(1), "2 nodes reserved for maintenance (fans) for another 4h00m"),
        (
            window("exam", "n0", 2, 4, users=["bob"], queues=["nlp"]),
            ada(3),
            "1 node reserved for bob and queue nlp (exam) in 2h00m, when it could still run: its time limit is 3h00m",
        ),
        (
            window("exam", "n0", 2, 4),
            ada(),
            "1 node reserved for maintenance (exam) in 2h00m, when it could still run: it has no time limit",
        ),
        (window("exam", "n0", 2, 4, users=["ada"]), ada(1, reservation="exam"), "reservation exam begins in 2h00m"),
        (window("exam", "n0", 2, 4, users=["bob"]), ada(1, reservation="exam"), "reservation exam is for bob"),
        (window("exam", "n0", 2, 4, users=["bob"]), ada(1, reservation="gone"), "reservation gone has ended"),
        (window("exam", "n0", 2, 4), ada(1), ""),
    ],
)
def test_why_nodes_are_shut_in_words(reserved, asker, words):
    calendar = ReservationCalendar([reserved])
    assert calendar.explain(calendar.closed_nodes(asker, T), asker, T) == words


# ---- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_h", "nodes", "shared"), [(4, "n0", ()), (3.9, "n2 n1 n0", ("n1", "n0")), (-1, "n0", ()), (0, "n2", ())]
)
def test_reservations_clash_over_a_node_at_one_time_only(start_h, nodes, shared):
    standing = window("a", "n0 n1", 0, 4)
    assert window("b", nodes, start_h, 1).conflicting_nodes(standing) == shared
    assert window("b", nodes, start_h, 1, ended=True).conflicting_nodes(standing) == ()


def test_a_jobs_class_is_who_asks_for_how_long_and_where():
    one = job("1", queue="nlp", time_limit_s=60.0, reservation="exam")
    assert reservation_query_of(one) == ReservationQuery(
        user=UserId("ada"), queue=QueueId("nlp"), limit_s=60.0, reservation="exam"
    )


def test_who_holds_something_there_and_is_not_admitted_must_leave_in_submit_order():
    cases = [
        at(placed(job(name, seq=seq, queue=queue, gpus="2x2"), on), AttemptState.RUNNING)
        for name, seq, queue, on in [
            ("late", 9, "default", "n0:0,1 n1:0,1"),
            ("early", 2, "default", "n1:2,3 n2:0,1"),
            ("own", 3, "nlp", "n0:2,3 n2:2,3"),
            ("elsewhere", 4, "default", "n2:4,5 n3:0,1"),
        ]
    ]
    jobs = {case.job.id: case.job for case in cases}
    on_node: dict[NodeId, dict[JobId, object]] = {}
    for case in cases:
        for grant in case.attempt.allocation.grants:
            on_node.setdefault(grant.node_id, {})[case.job.id] = case.attempt
    reserved = window("exam", "n0 n1 n9", 0, 1, queues=["nlp"])
    assert jobs_to_evict(reserved, on_node, jobs) == ("early", "late")  # type: ignore[arg-type]  # as it is drawn
