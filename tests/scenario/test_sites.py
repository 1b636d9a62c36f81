"""Sites: nodes that share no fast network. A gang never spans two, not in a placement, a growth, an order of nodes, or a refusal."""

# mypy: disable-error-code="arg-type"

from dataclasses import replace

import pytest

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.node_pool import NodeOffer
from phalanx.core.ids import JobId, NodeId
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.state.events import PutNodePool
from phalanx.core.state.reports import ProviderOutcome, SupervisorRegistered
from phalanx.core.work.spec import Role
from tests.builders import drawn, gpu, job, make_fleet, make_node, plan_of
from tests.cell import Cell
from tests.scenario.test_node_pools import gang, member, ordered, pool
from tests.scenario.test_pool_offers import CloudSteps, cloud_pool


def at(fleet, site, *names):
    """The fleet with these nodes at a site."""
    return fleet._each(names, labels={"site": site})


def spread(plan, name):
    """The nodes of a placement."""
    return [part.partition(":")[0] for part in drawn(plan, name).split()]


TWO_AND_TWO = at(make_fleet("n0=8 n1=8 m0=8 m1=8"), "west", "m0", "m1")


def test_a_gang_is_placed_at_one_site_and_never_at_two():
    assert spread(plan_of(TWO_AND_TWO.with_jobs(job("a", gpus=16))), "a") == ["n0", "n1"]
    half = TWO_AND_TWO.held(n0=range(8))
    assert spread(plan_of(half.with_jobs(job("a", gpus=16))), "a") == ["m0", "m1"]
    plan = plan_of(half.held(m0=range(8)).with_jobs(job("a", gpus=16), job("b", gpus=8)))
    assert not any(one.job_id == "a" for one in plan.placements), "16 GPUs are free, 8 at each site"


def test_a_job_of_one_node_takes_any_site():
    full = TWO_AND_TWO.held(n0=range(8), n1=range(8))
    assert spread(plan_of(full.with_jobs(job("a", gpus=8))), "a") == ["m0"]


def test_a_gang_that_no_site_holds_can_never_fit():
    with pytest.raises(NeverFits, match="24 GPUs can never fit: the fleet at site home has 2 nodes"):
        acceptable_shapes(Role(gpus=gpu(24)), TWO_AND_TWO.nodes.values())
    assert [str(one) for one in acceptable_shapes(Role(gpus=gpu(16)), TWO_AND_TWO.nodes.values())] == [
        "2 nodes x 8 = 16 GPUs"
    ]


def test_the_roles_of_a_gang_are_at_one_site():
    one = job("a", gpus=8)
    two_roles = replace(one, spec=replace(one.spec, role=replace(one.spec.role, others=(Role(gpus=gpu(8)),))))
    split = TWO_AND_TWO.held(n0=range(8), m0=range(8))
    assert not plan_of(split.with_jobs(two_roles)).placements
    assert spread(plan_of(TWO_AND_TWO.held(n0=range(8)).with_jobs(two_roles)), "a") == ["m0", "m1"]


def test_an_elastic_job_grows_at_its_site_only():
    cell = Cell(at(make_fleet("n0=8 n1=8 n2=8 m0=8"), "west", "m0"))
    cell.submit(job("a", gpus="1..4x8", saves_on_stop=True))
    cell.go_on(7200.0)
    assert sorted(grant.node_id for grant in cell.world.attempts[JobId("a")].allocation.grants) == ["n0", "n1", "n2"]


# ---- pools --------------------------------------------------------------------------------------------------------------


def apart(name="p", **fields):
    one = pool(name, **fields)
    return replace(one, template=replace(one.template, apart=True))


def test_half_a_gang_at_home_is_no_reason_to_order_the_other_half_elsewhere():
    home = [make_node("n0", 8)]
    assert ordered([gang(2)], [pool()], nodes=home) == {"p": 1}
    assert ordered([gang(2)], [apart()], nodes=home) == {"p": 2}
    assert ordered([gang(1)], [apart()], nodes=home) == {}
    assert ordered([gang(4)], [apart("p", most=3), apart("q", most=3)]) == {}, "no gang over two clouds"
    assert ordered([gang(3)], [apart("p", most=2), apart("q", most=3)]) == {"q": 3}


def test_nodes_on_their_way_are_at_the_site_of_their_zone():
    one = cloud_pool(most=4)
    one = replace(one, template=replace(one.template, apart=True))
    coming = replace(member(0), offer="b spot")
    # Zone a is tried first, and a gang of two needs both nodes there.
    assert ordered([gang(2)], [one], members=[coming]) == {"p": 2}
    refused = one.after_refusal("a spot", "no capacity", 1_700_000_000.0)
    assert ordered([gang(2)], [refused], members=[coming]) == {"p": 1}


def test_a_node_of_such_a_pool_gets_its_site_when_it_registers():
    steps = CloudSteps()
    one = cloud_pool()
    steps.step(PutNodePool(pool=replace(one, template=replace(one.template, apart=True))), steps.submit(1))
    steps.step(steps.answered(ProviderOutcome.STARTED, machine="i-1"))
    node = make_node("p-0", 8)
    steps.step(SupervisorRegistered(node=node, supervisor_id="s"))
    assert steps.world.nodes[NodeId("p-0")].labels == {"zone": "a", "site": "p/a"}
    assert NodeOffer(text="a spot", zone="a", price_per_h=2.0) in one.offers
