"""Leases: the head must never believe one over that a supervisor still holds."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.controller.leases import (
    LEASE_DEFAULT_S,
    MARGIN_S,
    RENEWALS_PER_S_MAX,
    LeaseBook,
    UnknownSupervisor,
)
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId

N0, N1 = NodeId("n0"), NodeId("n1")
A, B = SupervisorId("a"), SupervisorId("b")
J = JobId("7")


def book(**fields):
    leases = LeaseBook(**fields)
    leases.grant(N0, A, 100.0)
    return leases


def test_lease_ends_one_margin_after_its_length():
    leases = book()
    assert leases.expire(100.0 + LEASE_DEFAULT_S + MARGIN_S - 0.001) == []
    assert leases.expire(100.0 + LEASE_DEFAULT_S + MARGIN_S) == [N0]


def test_renewal_counts_from_its_answer():
    leases = book()
    renewal = leases.renew(N0, A, [], 105.0)
    assert (renewal.lease_s, renewal.renew_in_s) == (6.0, 1.5)
    assert leases.expire(111.9) == []
    assert leases.expire(112.0) == [N0]


@pytest.mark.parametrize("who", [B, SupervisorId("")])
def test_stranger_is_told_to_say_hello(who):
    with pytest.raises(UnknownSupervisor) as refused:
        book().renew(N0, who, [], 101.0)
    assert refused.value.code == "say_hello"
    assert refused.value.retry_helps


def test_node_without_a_lease_is_told_to_say_hello():
    with pytest.raises(UnknownSupervisor):
        book().renew(N1, A, [], 101.0)


def test_renewal_is_before_the_end_or_refused():
    late, early = book(), book()
    early.renew(N0, A, [], 106.9)
    assert early.expire(107.0) == []
    assert late.expire(107.0) == [N0]
    with pytest.raises(UnknownSupervisor):
        late.renew(N0, A, [], 107.0)
    with pytest.raises(UnknownSupervisor):
        late.renew(N0, A, [], 50.0)  # an ended lease stays ended, whatever the clock says


def test_ended_lease_is_named_until_its_loss_is_committed():
    leases = book()
    assert leases.expire(200.0) == leases.expire(201.0) == [N0]
    leases.drop([N0, N1])
    assert leases.expire(202.0) == []
    assert leases.next_check_s() == float("inf")


def test_what_is_not_current_is_superseded():
    leases = book()
    leases.set_current(N0, J, Epoch(2))
    carried = [(J, Epoch(2)), (J, Epoch(1)), (JobId("8"), Epoch(1))]
    assert leases.renew(N0, A, carried, 101.0).superseded == carried[1:]
    leases.set_current(N0, J, None)
    assert leases.renew(N0, A, carried[:1], 101.0).superseded == carried[:1]


def test_epoch_of_an_unknown_node_is_nobodys():
    leases = book()
    leases.set_current(N1, J, Epoch(1))
    leases.grant(N1, B, 100.0)
    assert leases.renew(N1, B, [(J, Epoch(1))], 101.0).superseded == [(J, Epoch(1))]


def test_hello_again_does_not_take_the_epochs_away_for_a_moment():
    """Found by reading: a renewal between the hello and the republishing of epochs had every rank killed as superseded."""
    leases = book()
    leases.set_current(N0, J, Epoch(1))
    leases.grant(N0, A, 103.0)
    assert leases.renew(N0, A, [(J, Epoch(1))], 103.0).superseded == []


def test_hello_of_another_supervisor_begins_with_nothing():
    leases = book()
    leases.set_current(N0, J, Epoch(1))
    leases.grant(N0, B, 103.0)
    assert leases.renew(N0, B, [(J, Epoch(1))], 103.0).superseded == [(J, Epoch(1))]


# ---- long leases ----------------------------------------------------------------------------------------------------


def test_planned_stop_is_ready_once_every_supervisor_holds_a_long_lease():
    leases = book()
    leases.grant(N1, B, 100.0)
    leases.grant_long(600.0, math.inf)
    assert not leases.all_long()
    assert leases.renew(N0, A, [], 101.0).lease_s == 600.0
    assert not leases.all_long()
    leases.renew(N1, B, [], 101.0)
    assert leases.all_long()


def test_planned_stop_does_not_wait_for_the_dead():
    leases = book()
    leases.grant_long(600.0, math.inf)
    leases.expire(300.0)
    assert leases.all_long()


def test_long_lease_is_presumed_live_at_the_start():
    leases = LeaseBook()
    leases.grant(N0, A, 100.0, until_s=650.0)
    leases.set_current(N0, J, Epoch(1))
    assert leases.expire(649.0) == []
    assert leases.expire(650.0) == [N0]


def test_hello_does_not_shorten_a_long_lease():
    """Found by reading: the hello to a new head made it believe the lease over after 7 s, while the supervisor held it for 10 minutes."""
    leases = LeaseBook()
    leases.grant(N0, A, 100.0, until_s=700.0)
    leases.set_current(N0, J, Epoch(1))
    leases.grant(N0, A, 101.0)
    assert leases.expire(699.0) == []


def test_long_lease_shrinks_once_the_supervisor_has_shown_that_it_took_the_shorter():
    leases = LeaseBook()
    leases.grant(N0, A, 100.0, until_s=700.0)
    leases.set_current(N0, J, Epoch(1))
    assert leases.renew(N0, A, [], 101.0, held_s=599.0).lease_s == 6.0
    assert leases.expire(699.9) == [], "the answer may be lost: the lease that it reported counts"
    leases.renew(N0, A, [], 102.5, held_s=4.5)
    assert leases.expire(109.4) == []
    assert leases.expire(109.5) == [N0]


def test_supervisor_that_does_not_say_what_it_holds_may_hold_all_of_it():
    leases = LeaseBook()
    leases.grant(N0, A, 100.0, until_s=700.0)
    leases.set_current(N0, J, Epoch(1))
    leases.renew(N0, A, [], 101.0)
    assert leases.expire(699.9) == []
    assert leases.expire(700.0) == [N0]


@pytest.mark.parametrize("held_s", [1e18, float("inf"), float("nan")])
def test_nobody_holds_more_than_was_granted(held_s):
    leases = book()
    leases.renew(N0, A, [], 101.0, held_s=held_s)
    assert leases.expire(107.9) == []
    assert leases.expire(108.0) == [N0]


def test_interval_grows_with_the_fleet():
    leases = LeaseBook()
    assert leases.terms_for(300) == (6.0, 1.5)
    lease_s, interval_s = leases.terms_for(12_500)
    assert 12_500 / interval_s == pytest.approx(RENEWALS_PER_S_MAX)
    assert lease_s == 4 * interval_s


def test_long_lease_of_a_node_without_jobs_ends_after_an_ordinary_one_in_silence():
    """Found by hand: after a restore, jobs were placed for ten minutes on servers that had left."""
    leases = LeaseBook(long_until_s=700.0)
    leases.grant(N0, A, 100.0, until_s=700.0)
    leases.grant(N1, B, 100.0, until_s=700.0)
    leases.set_current(N1, J, Epoch(1))
    assert leases.expire(106.9) == []
    assert leases.next_check_s() <= 107.0
    assert leases.expire(107.0) == [N0]
    leases.drop([N0])
    leases.set_current(N1, J, None)
    assert leases.next_check_s() <= 107.0
    assert leases.expire(107.0) == [N1]


def test_who_was_lost_early_and_is_back_may_still_hold_the_long_lease():
    leases = LeaseBook(long_until_s=700.0)
    leases.grant(N0, A, 100.0, until_s=700.0)
    leases.drop(leases.expire(107.0))
    leases.grant(N0, A, 110.0)
    leases.set_current(N0, J, Epoch(1))
    assert leases.expire(699.9) == []
    leases.renew(N0, A, [], 699.9, held_s=4.5)
    assert leases.expire(706.9) == [N0]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("renew", "lost answer", "lengthen", "hello", "silence", "job", "no job")),
            st.floats(0.01, 3.0),
            st.floats(0.0, 0.4),
        )
    )
)
def test_head_never_believes_over_what_the_supervisor_holds_while_a_job_runs(history):
    """Whatever answers are lost: the supervisor's deadline, counted from asking, lies before the head's, counted from answering."""
    leases, now, deadline, runs = book(), 100.0, 0.0, False
    for what, wait_s, way_s in history:
        now += wait_s
        lost = leases.expire(now)
        if runs and now <= deadline:
            assert lost == []
        if lost:
            leases.drop(lost)
            runs = False
        if what == "lengthen":
            leases.grant_long(50.0, now + 5.0)
        if what == "hello":
            leases.grant(N0, A, now)
        if what == "silence":
            now += 8.0
        if what in ("job", "no job") and N0 in leases._leases:
            runs = what == "job"
            leases.set_current(N0, J, Epoch(1) if runs else None)
        if what not in ("renew", "lost answer"):
            continue
        asked_s, now = now, now + way_s
        try:
            renewal = leases.renew(N0, A, [], now, held_s=max(0.0, deadline - asked_s))
        except UnknownSupervisor:
            continue
        if what == "renew" and asked_s + renewal.lease_s > now:
            deadline = asked_s + renewal.lease_s
        if runs:
            assert leases.expire(deadline) == []
