"""Named extras: what nodes offer is counted on each node, licences are counted over the whole fleet; both are explained and given back."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, dict-item, index"

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest, Conflict, NotFound
from phalanx.core.ids import NodeId, UserId
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.resources import extras_of
from phalanx.core.scheduling.feasibility.answer import Outlook
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.state.events import PutLicence, RemoveLicence
from phalanx.core.state.plan import Placement
from phalanx.core.units import GIB
from phalanx.core.work.extras import Licence, parse_extras, parse_offers
from phalanx.core.work.states import JobState, WaitReasonCode
from tests.builders import allocation, drawn, job, lined, make_fleet, make_node, plan_of
from tests.cell import Cell
from tests.harness import Harness

TWO = "n0=4 n1=4"
OP = UserId("op")


def licence(name, seats):
    return Licence(id=name, total=seats)


def judged(fleet, **fields):
    return FeasibilityChecker(fleet.with_jobs(), fleet.now_s).check_job(job("x", **fields))


# ---- what nodes offer --------------------------------------------------------------------------------------------------

# what n0 and n1 offer, the jobs in order -> the placements
OFFERS = [
    ("scratch=1T", [("a", 1, "scratch:600G"), ("b", 1, "scratch:600G")], "a n0:0 | b n1:0"),
    ("scratch=1T", [("a", 1, "scratch:400G"), ("b", 1, "scratch:400G")], "a n0:0 | b n0:1"),
    ("nic=2", [("a", 1, "nic:2"), ("b", 1, "nic:2"), ("c", 1, "nic:2")], "a n0:0 | b n1:0 | c resources"),
    ("nic=2", [("a", "2x2", "nic:2")], "a n0:0,1 n1:0,1"),
    ("nic=2", [("a", 1, "nic:1"), ("b", "2x2", "nic:2")], "b n0:0,1 n1:0,1 | a resources"),
    ("nic=2", [("a", 0, "nic:2"), ("b", 0, "nic:2"), ("c", 0, "nic:1")], "a n0: | b n1: | c resources"),
    ("nic=2", [("a", "1/2", "nic:1"), ("b", "1/2", "nic:2")], "a n0:0 | b n1:0"),
    ("nic=2,scratch=1T", [("a", 1, "nic:2"), ("b", 1, "scratch:1T")], "a n0:0 | b n0:1"),
]


@pytest.mark.parametrize(("offers", "jobs", "drawing"), OFFERS)
def test_a_node_gives_no_more_than_it_offers(offers, jobs, drawing):
    fleet = make_fleet(TWO, offers=offers)
    waiting = [job(name, gpus=gpus, extras=asked) for name, gpus, asked in jobs]
    assert lined(plan_of(fleet.with_jobs(*waiting))) == drawing


def test_only_nodes_that_offer_it_are_used():
    fleet = make_fleet(TWO)
    offering = replace(fleet, nodes={**fleet.nodes, NodeId("n1"): make_node("n1", extras=parse_extras("nic=1"))})
    assert drawn(plan_of(offering.with_jobs(job("a", extras="nic:1"))), "a") == "n1:0"


def test_an_extra_that_no_node_has_enough_of_is_never():
    fleet = make_fleet(TWO, offers="scratch=1T")
    found = judged(fleet, extras="scratch:2T")
    assert (found.outlook, found.limit) == (Outlook.NEVER, "nodes")
    assert found.detail == (
        "the job needs 2 TiB of scratch on each node; no node offers more than 1 TiB, and no licence has that name"
    )
    assert judged(fleet, extras="nic:1").detail == (
        "the job needs 1 of nic on each node; no node offers any, and no licence has that name"
    )
    assert judged(fleet, extras="scratch:1T").outlook is Outlook.POSSIBLE


def test_a_shortage_of_an_extra_is_explained_with_what_is_free():
    fleet = make_fleet("n0=4", offers="scratch=1T").runs(job("a", extras="scratch:900G"), "n0:0")
    wait = plan_of(fleet.with_jobs(job("b", extras="scratch:200G"))).waiting("b")
    assert wait.reason is WaitReasonCode.RESOURCES
    assert wait.detail == (
        "needs 200 GiB of scratch on its node: enough GPUs are free, but not enough of these;"
        " at most 124 GiB of scratch is free on one node"
    )


def test_extras_are_free_again_when_the_job_ends():
    cell = Cell(make_fleet("n0=4", offers="nic=2"))
    cell.submit(job("a", extras="nic:2"), job("b", extras="nic:1"))
    cell.plan()
    assert cell.world.usage["n0"].host.extras == (("nic", 2),)
    assert not cell.runs("b")
    cell.end("a")
    cell.plan()
    assert cell.runs("b")
    assert cell.world.usage["n0"].host.extras == (("nic", 1),)


def test_a_higher_priority_takes_the_extras_of_a_lower_one():
    fleet = make_fleet("n0=4", offers="nic=2").runs(job("low", extras="nic:2"), "n0:0")
    assert lined(plan_of(fleet.with_jobs(job("high", priority=5, extras="nic:1"))), "high", "low") == (
        "low stops for high | high claimed"
    )


# ---- licences ----------------------------------------------------------------------------------------------------------


def test_a_licence_is_counted_over_the_fleet_and_its_holders_are_named():
    fleet = make_fleet(TWO).with_licences(matlab=20)
    busy = fleet.runs(job("3", licences="matlab:12"), "n0:0").runs(job("4", licences="matlab:7"), "n1:0")
    wait = plan_of(busy.with_jobs(job("7", licences="matlab:2"))).waiting("7")
    assert wait.reason is WaitReasonCode.LICENCE
    assert wait.detail == "needs 2 of licence matlab; 1 of 20 is free; job 3 holds 12, job 4 holds 7"


def test_a_gang_holds_its_seats_once_and_not_on_each_node():
    fleet = make_fleet(TWO).with_licences(matlab=2)
    plan = plan_of(fleet.with_jobs(job("a", gpus="2x4", licences="matlab:2")))
    assert drawn(plan, "a") == "n0:0,1,2,3 n1:0,1,2,3"
    assert plan.placement("a").allocation.resources.extras == (("matlab", 2),)


def test_one_plan_gives_no_seat_twice_and_a_job_without_licence_starts_beside():
    fleet = make_fleet(TWO).with_licences(matlab=3)
    jobs = [job("a", licences="matlab:2"), job("b", licences="matlab:2"), job("c"), job("d", licences="matlab:1")]
    assert lined(plan_of(fleet.with_jobs(*jobs))) == "a n0:0 | c n0:1 | d n0:2 | b licence"


def test_seats_are_free_again_when_the_job_ends_or_waits_again():
    cell = Cell(make_fleet(TWO).with_licences(matlab=2))
    cell.submit(job("a", licences="matlab:2"), job("b", licences="matlab:1"))
    cell.plan()
    assert cell.world.licence_usage == {"matlab": 2}
    cell.fails("a")
    assert cell.world.licence_usage == {}
    cell.plan()
    assert cell.world.licence_usage in ({"matlab": 1}, {"matlab": 2})
    for name in "ab":
        cell.end(name)
        cell.plan()
    assert cell.world.licence_usage == {}


def test_a_start_waits_until_the_preempted_holder_has_left():
    cell = Cell(make_fleet(TWO).with_licences(matlab=1), save_s=30.0)
    cell.submit(job("low", licences="matlab:1"))
    cell.plan()
    cell.go_on(7200.0)
    cell.submit(job("high", priority=5, licences="matlab:1"))
    plan = cell.plan()
    assert [stop.job_id for stop in plan.stops] == ["low"]
    assert not plan.placements
    cell.go_on(60.0)
    assert cell.runs("high")
    assert cell.world.licence_usage == {"matlab": 1}


def test_more_seats_than_exist_are_never():
    fleet = make_fleet(TWO).with_licences(matlab=20)
    found = judged(fleet, licences="matlab:21")
    assert (found.outlook, found.limit) == (Outlook.NEVER, "licences")
    assert found.detail == "the job needs 21 of licence matlab; 20 exist"
    assert judged(fleet, licences="cad:1").detail == "the job needs 1 of licence cad, which does not exist"


def test_a_plan_that_exceeds_licences_or_extras_is_rejected_at_the_commit():
    cell = Cell(make_fleet("n0=4", offers="nic=2").with_licences(matlab=1))
    cell.submit(job("a", licences="matlab:1", extras="nic:1"))
    cell.plan()
    cell.submit(job("b"))
    seats = Placement(job_id="b", allocation=allocation("n0:1", licences=(("matlab", 1),)))
    assert rejection_reason(cell.world, seats) == "licence matlab has too few free seats"
    ports = Placement(job_id="b", allocation=allocation("n0:1", extras=(("nic", 2),)))
    assert rejection_reason(cell.world, ports) == "n0 lacks nic"
    assert rejection_reason(cell.world, replace(ports, allocation=allocation("n0:1", extras=(("nic", 1),)))) == ""


def test_a_changed_number_of_seats_takes_effect_at_once_and_takes_none_away():
    cell = Cell(make_fleet(TWO).with_licences(matlab=2))
    cell.submit(job("a", licences="matlab:2"), job("b", licences="matlab:1"))
    cell.plan()
    cell.put(licence("matlab", 1))
    cell.plan()
    assert cell.world.licence_usage == {"matlab": 2}
    assert not cell.runs("b")
    cell.put(licence("matlab", 3))
    cell.plan()
    assert cell.runs("b")


# ---- requests ----------------------------------------------------------------------------------------------------------


def test_a_submit_asks_for_a_licence_by_the_name_that_a_licence_has():
    head = Harness("n0=4", offers="scratch=1T")
    assert head.request(PutLicence(licence=licence("matlab", 3), by=OP)) == ()
    role = head.job(head.submit(extras="matlab:2,scratch:10G")).spec.role
    assert role.licences == (("matlab", 2),)
    assert role.extras == (("scratch", 10 * GIB),)


def test_a_new_licence_helps_a_job_that_was_accepted_although_it_could_never_start():
    head = Harness("n0=4")
    made = head.submit(extras="matlab:2", allow_never=True)
    assert head.job(made).state is JobState.PENDING
    head.request(PutLicence(licence=licence("matlab", 2), by=OP))
    head.runs(made)
    assert head.job(made).spec.role.licences == (("matlab", 2),)
    assert head.world.licence_usage == {"matlab": 2}


def test_a_licence_cannot_have_the_name_of_an_offer_and_is_not_removed_while_it_is_held():
    head = Harness("n0=4", offers="scratch=1T")
    with pytest.raises(Conflict, match="node n0 offers scratch"):
        head.request(PutLicence(licence=licence("scratch", 1), by=OP))
    with pytest.raises(BadRequest, match="-1 seats"):
        head.request(PutLicence(licence=licence("matlab", -1), by=OP))
    with pytest.raises(NotFound, match="no licence 'cad'"):
        head.request(RemoveLicence(name="cad", by=OP))
    head.request(PutLicence(licence=licence("matlab", 2), by=OP))
    head.runs(head.submit(extras="matlab:2"))
    with pytest.raises(Conflict, match="running jobs hold 2 seats of licence matlab"):
        head.request(RemoveLicence(name="matlab", by=OP))


def test_fewer_seats_name_the_waiting_jobs_that_can_never_start():
    head = Harness("n0=4")
    head.request(PutLicence(licence=licence("matlab", 3), by=OP))
    head.runs(head.submit(extras="matlab:2"))
    waiting = head.submit(extras="matlab:3")
    (lost,) = head.request(PutLicence(licence=licence("matlab", 2), by=OP))
    assert (lost.job_id, lost.why) == (waiting, "the job needs 3 of licence matlab; 2 exist")


# ---- the grammar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("", {}),
        ("matlab", {"matlab": 1}),
        ("Matlab:2, scratch=1.5T", {"matlab": 2, "scratch": 1536 * GIB}),
        ({"nic": 4, "scratch": "1G"}, {"nic": 4, "scratch": GIB}),
    ],
)
def test_names_and_amounts_are_read(text, amounts):
    assert parse_extras(text) == extras_of(amounts.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus:2", "resources: gpus is not an extra"),
        ("mem:2G", "resources: mem is not an extra"),
        ("matlab:0", "resources: matlab: 0 is not between 1 and 1000000"),
        ("matlab:two", "resources: matlab: 'two' is not an amount"),
        ("matlab:-1", "resources: matlab: '-1' is not an amount"),
        ("a:1,a:2", "resources: a is given twice"),
        ("9lives:1", "resources: '9lives' is not a name of a resource"),
        (",".join(f"n{number}" for number in range(33)), "resources: 33 names; at most 32 are allowed"),
        ("scratch:99999999T", "resources: scratch: 99999999T is not between 1 MiB and 1 EiB"),
    ],
)
def test_what_is_not_an_extra_is_refused_by_its_name(text, said):
    with pytest.raises(BadRequest) as error:
        parse_extras(text)
    assert error.value.message == said


def test_the_offer_of_a_node_is_remembered_in_one_form():
    assert parse_offers("Scratch=1.5T, nic=8") == "nic=8,scratch=1572864M"
    assert parse_extras(parse_offers("scratch=1.5T,nic=8")) == parse_extras("scratch=1.5T,nic=8")
    assert parse_offers("off") == ""
    with pytest.raises(BadRequest, match="offers: cpus is not an extra"):
        parse_offers("cpus=8")
