"""Lease and fence in virtual time: nothing runs on without a lease, and nothing goes on that its peers have given up."""

import pytest

from phalanx.core.state.reports import MemberFrozen, MemberReady, MemberStopped, TaskExited
from phalanx.node.logic import actions as act
from phalanx.node.logic import events as hap
from phalanx.wire.rank import RankStopReason
from tests.scenario.supervisor_world import LEASE_S, World, forget, key_of, prepare, start, stop


def test_lease_counts_from_sending():
    world = World().running()
    world.wait(1).renew(sent_ago_s=0.8)
    assert world.pages[key_of()]["deadline_ns"] == world.now_ns + int((LEASE_S - 0.8) * 1e9)


def test_renewed_in_time_nobody_notices():
    world = World().running().wait(60, renewing=True)
    assert world.did(act.FreezeMember) == []


def test_lease_over_freezes_everything_at_its_end():
    world = World().running("1").running("2")
    world.wait(LEASE_S - 0.01)
    assert world.frozen == set()
    world.wait(0.02)
    assert world.frozen == {key_of("1"), key_of("2")}
    assert world.did(act.RenewLease)


def test_short_freeze_thaws_after_the_page_is_renewed():
    world = World().running(collective_timeout_s=10).wait(LEASE_S + 5)
    world.renew()
    assert world.frozen == set()
    froze = world.said(MemberFrozen)[0]
    assert (froze.thawed, froze.frozen_s) == (True, pytest.approx(5, abs=0.01))
    order = [a for a in world.actions if isinstance(a, (act.UpdateLeasePage, act.ThawMember))][-2:]
    assert [type(a) for a in order] == [act.UpdateLeasePage, act.ThawMember]


def test_long_freeze_restarts_the_gang_in_place():
    world = World().running(collective_timeout_s=10).wait(LEASE_S + 5.1)
    deadline_ns = world.pages[key_of()]["deadline_ns"]
    world.renew()
    assert not world.living()
    assert world.kinds()[2:] == ["MemberFrozen", "TaskExited", "TaskExited", "MemberStopped"]
    assert not world.said(MemberFrozen)[0].thawed
    assert all(r.exit.requested_by_phalanx for r in world.said(TaskExited))
    assert world.pages[key_of()]["deadline_ns"] == deadline_ns, "a page is renewed only with the decision to thaw"
    assert world.tell(prepare(generation=1), start(generation=1)).living() == [key_of(generation=1)]


def test_superseded_is_killed_cleaned_and_not_told_as_current():
    world = World().running().wait(LEASE_S + 1)
    world.renew(superseded=[("1", 1)])
    assert not world.living()
    assert world.said(TaskExited) == world.said(MemberFrozen) == []
    assert world.clean == [("1", 1)]
    assert world.pages[key_of()]["stop"] is RankStopReason.SUPERSEDED
    assert world.tell(prepare(), start()).carried == ()


def test_superseded_while_running_is_killed_at_once():
    world = World().running("1").running("2")
    world.renew(superseded=[("1", 1)])
    assert (world.living("1"), world.living("2")) == ([], [key_of("2")])


def test_superseded_epoch_spares_the_newer_one():
    world = World().running(epoch=2)
    world.renew(superseded=[("1", 1)])
    assert world.living() == [key_of(epoch=2)]


def test_late_answer_is_no_renewal():
    world = World().running().wait(LEASE_S + 1)
    world.renew(sent_ago_s=LEASE_S)
    assert world.frozen == {key_of()}


def test_answers_out_of_order_do_not_move_the_lease_back():
    world = World().running().wait(2).renew()
    deadline_ns = world.supervisor.lease.deadline_ns
    world.renew(sent_ago_s=1.0)
    assert world.supervisor.lease.deadline_ns == deadline_ns


def test_shorter_lease_counts_at_once():
    world = World().renew(lease_s=600, sent_ago_s=-0.001).running().wait(1).renew(lease_s=6)
    world.wait(6.1)
    assert world.frozen == {key_of()}


def test_answer_that_does_not_name_the_epoch_decides_nothing():
    world = World().running().wait(LEASE_S + 1)
    world.renew(asked=set())
    assert world.frozen == {key_of()}
    world.wait(0.5).renew()
    assert world.frozen == set()


def test_stop_of_frozen_ranks_takes_effect_when_thawed():
    world = World(deaf=False).running().wait(LEASE_S + 1).tell(stop(grace_s=5))
    assert world.living()
    assert world.frozen
    world.renew()
    assert not world.frozen


def test_stop_of_frozen_ranks_kills_at_the_end_of_the_grace():
    world = World().running().wait(LEASE_S + 1).tell(stop(grace_s=2)).wait(2.1)
    assert not world.living()
    assert len(world.said(MemberStopped)) == 1


def test_saving_ranks_are_frozen_too():
    world = World().running().tell(stop(grace_s=60)).wait(LEASE_S + 1)
    assert world.frozen == {key_of()}


def test_lease_over_while_starting_kills_instead():
    world = World(auto=False).tell(prepare()).do_work().wait(LEASE_S - 0.5).tell(start()).wait(1)
    assert world.did(act.KillMember)
    while world.work:
        world.do_work()
    assert not world.living()
    assert world.kinds() == ["MemberReady", "MemberFrozen", "MemberStopped"]


def test_barrier_without_a_lease_waits_for_one():
    world = World().tell(prepare()).wait(LEASE_S + 1).tell(start())
    assert world.opened == []
    world.renew()
    assert world.living() == [key_of()]


def test_preparing_is_frozen_and_goes_on_however_long_it_took():
    world = World(auto=False).tell(prepare(collective_timeout_s=1)).wait(LEASE_S + 100)
    assert world.frozen == {key_of()}
    world.renew()
    assert world.frozen == set()
    world.do_work()
    assert world.said(MemberReady)


def test_what_cannot_be_frozen_is_killed():
    world = World().running()
    world.unfreezable = True
    world.wait(LEASE_S + 0.1)
    assert not world.living()
    assert not world.said(MemberFrozen)[0].thawed
    assert world.said(MemberStopped)


def test_host_that_slept_past_its_lease_freezes_before_anything_else():
    world = World().running()
    world.now_ns += 3600 * 1_000_000_000
    world.hear(hap.MemberEmptied(key=key_of("7")))
    assert world.frozen == {key_of()}
    world.renew()
    assert not world.living(), "an hour is longer than any collective bears"


def test_time_limit_ends_frozen_ranks():
    world = World()
    world.tell(prepare(grace_s=1, deadline_s=world.now_ns / 1e9 + 10), start())
    world.wait(11.5)
    assert not world.living()


def test_forget_of_frozen_ranks_kills_them():
    world = World().running().wait(LEASE_S + 1).tell(forget())
    assert not world.living()
    assert world.clean == [("1", 1)]


def test_two_jobs_are_judged_by_their_own_timeouts():
    world = World().running("1", collective_timeout_s=4).running("2", collective_timeout_s=600).wait(LEASE_S + 3)
    world.renew()
    assert world.living("1") == []
    assert world.living("2") == [key_of("2")]
    assert [r.thawed for r in world.said(MemberFrozen, "1") + world.said(MemberFrozen, "2")] == [False, True]


def test_no_step_is_begun_past_the_lease_even_if_the_supervisor_slept():
    """The page alone stops phalanx.torch: its deadline is what the last answer allowed, whatever the supervisor does later."""
    world = World().running()
    allowed_ns = world.supervisor.lease.deadline_ns
    world.now_ns += 3600 * 1_000_000_000
    assert world.pages[key_of()]["deadline_ns"] == allowed_ns < world.now_ns
