"""A gang with several roles: each on nodes of its own, all or none; it is counted, explained and found again as one job."""

from dataclasses import replace

import pytest

from phalanx.core.errors import NeverFits
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.job import place
from phalanx.core.resources import Resources
from phalanx.core.scheduling.board_builder import build_board
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.fleet_index import index_fleet
from phalanx.core.scheduling.needs import need_of_attempt
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.work.gpus import combine_gpu_options, parse_gpus
from phalanx.core.work.spec import JobSpec, LaunchMode, TopologyConstraint
from phalanx.core.work.states import AttemptState
from tests.builders import allocation, at, drawn, facts, job, lined, make_fleet, plan_of, spec


def gpus_of(text):
    """As a script gives them: `2x0` is two nodes without GPUs."""
    nodes, _, count = text.partition("x")
    return combine_gpu_options(None, int(nodes), 0) if count == "0" else parse_gpus(text)


def roles(*each):
    """The role of a gang: GPUs, and CPUs of a node if there is a second word."""
    first, *others = [
        spec(gpus=gpus_of(gpus), cpus=int(cpus or 0), launch=LaunchMode.FIXED, tasks_per_node=1).role
        for gpus, _, cpus in (one.partition(" ") for one in each)
    ]
    return replace(first, others=tuple(others))


def gang(name, *each, **fields):
    one = job(name, **fields)
    return replace(one, spec=replace(one.spec, role=roles(*each)))


def placed(fleet, one):
    return plan_of(fleet.with_jobs(one)).placement(one.id).allocation


@pytest.mark.parametrize(
    ("fleet", "each", "where"),
    [
        ("n0=4 n1=4 n2=4", ["1x4", "2x2"], "n0:0,1,2,3 n1:0,1 n2:0,1"),
        ("n0=2 n1=8 n2=2", ["1x2", "1x8", "1x1"], "n0:0,1 n1:0,1,2,3,4,5,6,7 n2:0"),
        ("n0=h100:8 n1=a100:4 n2=0", ["1xa100:4", "1xh100:8", "1x0 16"], "n1:0,1,2,3 n0:0,1,2,3,4,5,6,7 n2:"),
        (
            "n0=a100:4 n1=h100:4 n2=0",
            ["2x0 8", "1xh100:2"],
            "n2: n0: n1:0,1",
        ),  # nodes without GPUs in a role are of any kind
        ("n0=8 n1=4", ["1x2", "1x8"], "n1:0,1 n0:0,1,2,3,4,5,6,7"),  # the order of the roles, else the largest first
    ],
)
def test_each_role_gets_nodes_of_its_own(fleet, each, where):
    assert drawn(plan_of(make_fleet(fleet).with_jobs(gang("a", *each))), "a") == where


def test_grants_say_their_role_and_what_it_asked_for():
    found = placed(make_fleet("n0=4 n1=4 n2=4", cpus=32), gang("a", "1x4 8", "2x1 3"))
    assert [(grant.role, grant.cpus, len(grant.devices), grant.tasks) for grant in found.grants] == [
        (0, 8, 4, 1),
        (1, 3, 1, 1),
        (1, 3, 1, 1),
    ]
    assert found.resources == Resources(6000, 14)


def test_a_gang_waits_rather_than_start_with_some_of_its_roles():
    fleet = make_fleet("n0=4 n1=4").runs(job("b", gpus=3, preemptible=False), "n1:0-2")
    plan = plan_of(fleet.with_jobs(gang("a", "1x4", "1x2")))
    assert lined(plan, "a") == "a resources"
    assert "role 1 of 2 needs 1 x 2 GPUs" not in plan.waits["a"].detail, "it would fit alone, on n0"
    assert (
        plan.waits["a"].detail == "each of its 2 roles fits alone; 2 nodes that hold all of them at once are not free"
    )


def test_the_role_that_does_not_fit_is_named():
    fleet = make_fleet("n0=4 n1=4 n2=8").runs(job("b", gpus=8, preemptible=False), "n2:0-7")
    detail = plan_of(fleet.with_jobs(gang("a", "1x4", "1x8"))).waits["a"].detail
    assert detail == "role 1 of 2 needs 1 x 8 GPUs; 8 free in total, at most 4 on one node"


@pytest.mark.parametrize(
    ("fleet", "each", "why"),
    [
        ("n0=4", ["1x2", "1x1"], "the 2 roles of the job need 2 nodes of their own .*; the fleet has 1 node, which"),
        ("n0=4 n1=2", ["1x4", "1x4"], "need 2 nodes of their own"),
        ("n0=4 n1=4", ["1x4", "1x8"], "role 1 of the job: .* can never fit"),
        ("n0=0 n1=0", ["1x0 4", "1x0 64"], "role 1 of the job: .*64 CPUs"),
    ],
)
def test_a_gang_that_no_fleet_of_these_nodes_holds_is_refused(fleet, each, why):
    with pytest.raises(NeverFits, match=why):
        acceptable_shapes(roles(*each), make_fleet(fleet).nodes.values())


def board_of(fleet):
    """An idle board, and the numbers of its nodes."""
    fit = index_fleet(fleet.nodes)
    return build_board(fit, fleet.with_jobs(), 0.0, 0.0), fit


def test_an_idle_node_with_two_models_is_one_node():
    apart = make_fleet("n0=h100:2 n1=a100:2")
    first, second = apart.nodes.values()
    devices = [replace(one, index=index, uuid=f"d{index}") for index, one in enumerate(first.devices + second.devices)]
    board, fit = board_of(replace(apart, nodes={first.id: replace(first, devices=tuple(devices))}))
    shapes = acceptable_shapes(roles("1xh100:1", "1xa100:1"), apart.nodes.values())
    (need,) = fit.needs(shapes, TopologyConstraint())
    assert [board.find_need(role) is not None for role in need.roles] == [True, True]
    assert board.find_need(need) is None


def test_what_a_gang_takes_comes_back_when_it_leaves():
    fleet = make_fleet("n0=h100:4 n1=a100:4 n2=0", cpus=32).with_licences(matlab=2)
    board, fit = board_of(fleet)
    role = replace(roles("1xh100:4 8", "1xa100:2 2", "1x0 16"), licences=(("matlab", 1),))
    (need,) = fit.needs(acceptable_shapes(role, fleet.nodes.values()), TopologyConstraint())
    entry = JobEntry(seq=1, job_class=board.job_class((need,)), submit_s=0.0)
    board.add_waiting(entry)
    found = board.find(entry)
    assert found is not None
    board.start(entry, found[0], found[1], 0.0)
    assert (board.free_total, sorted(board.cpus), board.free_licences) == (2, [16, 24, 30], {"matlab": 1})
    assert entry.held == Resources(6000, 26, extras=(("matlab", 1),))
    board.finish(entry, 1.0)
    assert (board.free_total, board.cpus, board.free_licences) == (8, [32] * 3, {"matlab": 2})


def test_a_head_that_starts_again_counts_a_running_gang_as_it_runs():
    fleet = make_fleet("n0=4 n1=4 n2=4")
    one = replace(gang("a", "1x4", "2x1 3"), seq=1)
    lies = placed(fleet, one)
    attempt = at(place(one, lies, facts(0)).case, AttemptState.RUNNING).attempt
    need = need_of_attempt(attempt, {0}, fleet.nodes)
    assert [(role.nodes, role.devices, role.cpus) for role in need.roles] == [(1, 4, 0), (2, 1, 3)]
    without = need_of_attempt(attempt, {0}, {NodeId("n1")})
    assert [(role.nodes, role.devices) for role in without.roles] == [(1, 1)]


def test_a_gang_of_higher_priority_stops_what_its_roles_need():
    fleet = make_fleet("n0=4 n1=4 n2=4")
    for name, node in (("b", "n0"), ("c", "n1"), ("d", "n2")):
        fleet = fleet.runs(job(name, gpus=4), f"{node}:0-3")
    plan = plan_of(fleet.with_jobs(gang("a", "1x4", "1x2", priority=10)))
    assert len(plan.stops) == 2
    assert {one.preempted_by for one in plan.stops} == {"a"}


def test_jobs_of_one_role_do_not_change():
    one = spec(gpus="2x4", cpus=4)
    assert isinstance(one, JobSpec)
    assert one.role.each == (one.role,)
    assert one.role.asked == Resources(8000, 8)
    assert allocation("n0:0").grants[0].role == 0
