"""Pools with several offers, a cap and a list of machines: offers in turn, one at a time for certain, and no machine without a record."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type"

from dataclasses import replace

import pytest

from phalanx.controller.requests.machine_sweep import MISSING_LISTS, QUIET_S, STRAY_GRACE_S
from phalanx.controller.requests.pools import LIST_EVERY_S
from phalanx.core.fleet.node_pool import (
    REFUSAL_MEMORY_S,
    ChargedMachine,
    ListedMachine,
    NodeOffer,
    OfferRefusal,
    PoolNodeState,
)
from phalanx.core.ids import NodeId, PoolId
from phalanx.core.state.commands import ProviderAction
from phalanx.core.state.events import PutNodePool, RemoveNodePool
from phalanx.core.state.reports import MachinesListed, ProviderOutcome, ProviderReported
from tests.builders import T
from tests.scenario.test_node_pools import Steps, member, pool

START, STOP, LIST = ProviderAction.START, ProviderAction.STOP, ProviderAction.LIST
OFFERS = tuple(NodeOffer(text=f"{zone} spot", zone=zone, price_per_h=price) for zone, price in (("a", 2.0), ("b", 3.0)))
P0 = NodeId("p-0")


def cloud_pool(**fields):
    one = pool(**fields)
    return replace(one, template=replace(one.template, offers=OFFERS, listed=True))


class CloudSteps(Steps):
    """Steps that keep the whole calls, and know what a provider answers."""

    def step(self, *events, after_s=1.5):
        self.now_s += after_s
        done = self.controller.step(self.time(), events)
        assert not [answer for answer in done.answers if isinstance(answer, Exception)], done.answers
        self.controller.committed(done, self.time())
        self.calls = [(call.action, call.node_id, call.offer, call.machine) for call in done.provider_calls]
        return [call for call in self.calls if call[0] is not LIST]

    def member(self, name="p-0"):
        return self.world.pool_nodes[NodeId(name)]

    def answered(self, outcome, name="p-0", **fields):
        one = self.member(name)
        return ProviderReported(
            node_id=one.id, token=one.token, outcome=outcome, **{"offer": one.offer, "why": "", **fields}
        )

    def listed(self, *machines, why=""):
        return MachinesListed(pool=PoolId("p"), asked_boot_s=self.now_s, machines=machines, why=why)

    def started(self):
        self.step(PutNodePool(pool=cloud_pool()), self.submit(1))
        self.step(self.answered(ProviderOutcome.STARTED, machine="i-1", since_s=T + 5.0))
        return machine_of(self.member())


def machine_of(one, machine="i-1", **fields):
    return ListedMachine(**{"machine": machine, "node_id": one.id, "token": one.token, "offer": one.offer, **fields})


# ---- the pure part -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "held", "most", "places"),
    [
        (None, 0, 4, 4),
        (5.0, 0, 2, 2),
        (5.0, 1, 2, 1),
        (4.0, 2, 2, 0),
        (6.0, 0, 3, 3),
        (100.0, 3, 4, 1),
        (1.0, 0, 0, 0),
    ],
)
def test_a_cap_limits_the_nodes_by_the_cheapest_offer_and_what_the_others_cost(cap, held, most, places):
    one = cloud_pool(cap_per_h=cap)
    members = [replace(member(number), price_per_h=2.0) for number in range(held)]
    assert (one.most_nodes, one.places(members)) == (most, places)


def test_a_price_too_small_to_divide_by_leaves_the_maximum():
    """Found by hostile input: the quotient was infinite, and each read of the pool failed."""
    one = pool(price=5e-324, cap_per_h=40.0)
    assert (one.most_nodes, one.places(())) == (4, 4)


def test_the_first_offer_that_was_not_refused_of_late_and_is_within_the_cap_is_next():
    one = cloud_pool(cap_per_h=5.0)
    assert one.next_offer(0.0, T) == OFFERS[0]
    refused = one.after_refusal("a spot", "no room", T)
    assert refused.next_offer(0.0, T) == OFFERS[1]
    assert refused.next_offer(2.5, T) is None  # 2.5 and 3 are more than 5
    assert refused.next_offer(0.0, T + REFUSAL_MEMORY_S) == OFFERS[0]
    assert refused.next_offer(0.0, T - 3600.0) == OFFERS[0]  # the clock was set back: nothing is refused in the future
    again = refused.after_refusal("a spot", "still none", T + 1.0)
    assert again.refusals == (OfferRefusal(offer="a spot", why="still none", at_s=T + 1.0),)


# ---- the controller ----------------------------------------------------------------------------------------------------


def test_each_offer_is_recorded_before_it_is_tried_and_a_new_head_repeats_that_one():
    steps = CloudSteps()
    assert steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1)) == [(START, P0, "a spot", "")]
    refused = steps.answered(ProviderOutcome.REFUSED, why="no capacity in a")
    assert steps.step(refused) == [(START, P0, "b spot", "")]
    steps.start()  # the head died: the next one asks the same again
    assert steps.step() == [(START, P0, "b spot", "")]
    steps.step(refused)  # late: it is not about the offer that is tried now
    assert steps.member().offer == "b spot"
    steps.step(replace(refused, outcome=ProviderOutcome.STARTED, machine="i-9"))
    assert steps.member().state is PoolNodeState.REQUESTED
    steps.step(steps.answered(ProviderOutcome.STARTED, machine="i-1", since_s=T))
    assert (steps.member().state, steps.member().machine) == (PoolNodeState.PROVISIONING, "i-1")
    assert steps.member().price_per_h == 3.0


def test_an_order_of_an_earlier_head_never_goes_on_to_another_offer():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    steps.start()
    assert steps.step() == [(START, P0, "a spot", "")]
    calls = steps.step(steps.answered(ProviderOutcome.REFUSED, why="full"))  # the earlier head's call may still arrive
    assert (STOP, P0, "a spot", "") in calls
    assert steps.member().given_up


def test_a_pool_whose_offers_are_all_refused_waits_until_the_first_may_be_tried_again():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    at_s = steps.time().wall_s + 1.5
    steps.step(steps.answered(ProviderOutcome.REFUSED, why="none in a"))
    assert steps.step(steps.answered(ProviderOutcome.REFUSED, why="none in b")) == [(STOP, P0, "b spot", "")]
    one = steps.world.node_pools[PoolId("p")]
    assert one.retry_at_s == at_s + REFUSAL_MEMORY_S
    assert one.failure == "p-0: no offer is left to try, the last: b spot: none in b"
    steps.step(steps.answered(ProviderOutcome.STOPPED))
    assert steps.step(after_s=REFUSAL_MEMORY_S - 20.0) == []
    assert (START, NodeId("p-1"), "a spot", "") in steps.step(after_s=30.0)


def test_a_call_without_an_answer_is_repeated_with_the_same_offer_and_its_reason_is_kept():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    steps.step(steps.answered(ProviderOutcome.UNANSWERED, why="timed out"), after_s=0.1)
    assert steps.member().problem == "timed out"
    assert steps.step(after_s=1.0) == [(START, P0, "a spot", "")]
    for _ in range(9):
        steps.step(steps.answered(ProviderOutcome.UNANSWERED, why="throttled"), after_s=0.1)
    assert steps.step(after_s=10.0) == []
    assert steps.step(after_s=15.0) == [(START, P0, "a spot", "")]
    steps.step(steps.answered(ProviderOutcome.STARTED, machine="i-1"))
    assert (steps.member().unanswered, steps.member().problem) == (0, "")


def test_a_machine_without_a_record_is_stopped_after_a_grace():
    steps = CloudSteps()
    own = steps.started()
    late = ListedMachine(machine="i-2", node_id=NodeId("p-7"), token="p-7-lost", offer="a spot")
    double = replace(own, machine="i-3")
    elsewhere = ListedMachine(
        machine="i-4", node_id=NodeId("q-0"), token="q-0-x"
    )  # of a pool that has no record either
    found = (own, late, double, elsewhere)
    assert steps.step(steps.listed(*found)) == []
    assert steps.step(steps.listed(*found), after_s=STRAY_GRACE_S - 10.0) == []
    stops = steps.step(steps.listed(*found), after_s=20.0)
    assert stops == [
        (STOP, NodeId("p-7"), "a spot", "i-2"),
        (STOP, P0, "a spot", "i-3"),
        (STOP, NodeId("q-0"), "", "i-4"),
    ]
    stopped = ProviderReported(node_id=P0, token=own.token, outcome=ProviderOutcome.STOPPED, machine="i-3")
    steps.step(stopped, steps.listed(own, replace(late, ended=True)))
    assert steps.member().state is PoolNodeState.PROVISIONING  # the node itself is not released
    assert steps.step(steps.listed(own, replace(late, ended=True)), after_s=STRAY_GRACE_S + 1.0) == []


def test_machines_of_another_pool_are_left_to_its_own_list():
    steps = CloudSteps()
    own = steps.started()
    steps.step(PutNodePool(pool=replace(cloud_pool(name="q"), max_nodes=0)))
    other = ListedMachine(machine="i-2", node_id=NodeId("q-5"), token="q-5-x")
    steps.step(steps.listed(own, other))
    assert steps.step(steps.listed(own, other), after_s=STRAY_GRACE_S + 1.0) == []


def test_a_machine_that_may_be_the_one_of_an_unanswered_start_is_none_to_stop():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    own = machine_of(steps.member())
    steps.step(steps.listed(own))
    assert STOP not in [call[0] for call in steps.step(steps.listed(own), after_s=STRAY_GRACE_S + 1.0)]
    steps.step(steps.answered(ProviderOutcome.REFUSED, why="none"))  # so it is not of the offer that is tried now
    steps.step(steps.listed(own))
    assert (STOP, P0, "a spot", "i-1") in steps.step(steps.listed(own), after_s=STRAY_GRACE_S + 1.0)


@pytest.mark.parametrize("ended", [True, False])
def test_a_node_whose_machine_is_gone_is_lost(ended):
    steps = CloudSteps()
    own = steps.started()
    gone = [replace(own, ended=True)] if ended else []
    assert steps.step(steps.listed(own)) == []
    for _ in range(1 if ended else MISSING_LISTS):
        assert steps.member().state is PoolNodeState.PROVISIONING
        steps.step(steps.listed(*gone), after_s=LIST_EVERY_S)
    assert steps.member().given_up
    assert "i-1" in steps.member().why


def test_lists_are_asked_for_each_minute_and_a_failed_one_says_why_and_changes_nothing():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    assert (LIST, "", "", "") in steps.calls
    steps.step(steps.answered(ProviderOutcome.STARTED, machine="i-1"))
    assert steps.calls == []
    for _ in range(4):
        steps.step(steps.listed(why="no rights"), after_s=LIST_EVERY_S + 1.0)
        assert steps.calls == [(LIST, "", "", "")]
    assert steps.world.node_pools[PoolId("p")].list_problem == "no rights"
    assert steps.member().state is PoolNodeState.PROVISIONING
    steps.step(steps.listed(machine_of(steps.member())))
    assert steps.world.node_pools[PoolId("p")].list_problem == ""


def test_a_pool_ends_only_when_a_late_list_shows_no_machine_of_it():
    steps = CloudSteps()
    own = steps.started()
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by="op"))
    released = steps.answered(ProviderOutcome.STOPPED)
    steps.step(released)
    assert steps.world.pool_nodes == {}
    steps.step(steps.listed())
    assert PoolId("p") in steps.world.node_pools  # a create could still arrive
    steps.step(steps.listed(own), after_s=QUIET_S)
    steps.step(after_s=1.0)
    assert PoolId("p") in steps.world.node_pools
    steps.step(steps.listed(), after_s=1.0)
    steps.step(after_s=1.0)
    assert PoolId("p") not in steps.world.node_pools


def test_the_history_says_what_a_machine_is_charged_for():
    steps = CloudSteps()
    own = steps.started()
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by="op"))
    charged = ChargedMachine(machine="i-1", since_s=T + 5.0, until_s=T + 65.0)
    stray = replace(charged, machine="i-2")
    told = [
        ProviderReported(node_id=P0, token=own.token, outcome=ProviderOutcome.STOPPED, machine="i-2", stopped=(stray,)),
        steps.answered(ProviderOutcome.STOPPED, stopped=(charged,)),
    ]
    done = steps.controller.step(steps.time(), told)
    lines = [line for line in done.change.history if line.kind == "machine_ended"]
    facts = {"since_s": T + 5.0, "until_s": T + 65.0}
    assert [line.facts for line in lines] == [{"machine": "i-2", **facts}, {"machine": "i-1", **facts}]


def test_a_machine_that_its_provider_has_forgotten_has_a_line_with_an_unknown_end():
    steps = CloudSteps()
    own = steps.started()
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by="op"))
    done = steps.controller.step(steps.time(), [steps.answered(ProviderOutcome.STOPPED)])
    lines = [line for line in done.change.history if line.kind == "machine_ended"]
    assert [line.facts for line in lines] == [{"machine": own.machine, "since_s": T + 5.0, "until_s": 0.0}]


def test_an_order_that_was_stopped_with_the_head_is_over_and_is_charged():
    steps = CloudSteps()
    steps.started()
    charged = ChargedMachine(machine="i-1", since_s=T + 5.0, until_s=T + 65.0)
    reports = [
        steps.answered(ProviderOutcome.ENDED, why="it was stopped with the head"),
        steps.answered(ProviderOutcome.STOPPED, stopped=(charged,)),
    ]
    done = steps.controller.step(steps.time(), reports)
    steps.controller.committed(done, steps.time())
    assert NodeId("p-0") not in steps.world.pool_nodes
    lines = [line for line in done.change.history if line.kind == "machine_ended"]
    assert [line.facts["machine"] for line in lines] == ["i-1"]
    assert steps.world.node_pools[PoolId("p")].failures == 0


def test_an_order_with_an_unanswered_call_never_goes_on_to_another_offer():
    steps = CloudSteps()
    steps.step(PutNodePool(pool=cloud_pool()), steps.submit(1))
    steps.step(steps.answered(ProviderOutcome.UNANSWERED, why="timed out"))
    refused = steps.answered(ProviderOutcome.REFUSED, why="full")
    calls = steps.step(refused, after_s=0.1)
    assert (STOP, P0, "a spot", "") in calls  # the first call may have started one, or may still do so
    assert steps.member().given_up
    assert steps.world.node_pools[PoolId("p")].failures == 0
    assert (START, NodeId("p-1"), "b spot", "") in [*steps.step(steps.answered(ProviderOutcome.STOPPED)), *steps.step()]
