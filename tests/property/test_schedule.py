"""Any fleet, any jobs: what the scheduler grants can be committed, and it passes over nothing that it could have granted."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.transitions import TransitionContext
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.shape import preferred_shape, tasks_per_node
from phalanx.core.state.plan import Placement
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.states import WaitReasonCode
from tests.builders import PLAIN, Fleet, T, job, make_node, plan_of
from tests.oracle import FreeRooms, find

NODES = [f"n{number}" for number in range(5)]


@st.composite
def fleets(draw):
    nodes = {}
    for name in NODES[: draw(st.integers(1, 5))]:
        kind = draw(st.sampled_from(("", "h200:", "a100-80gb:")))
        nodes[NodeId(name)] = make_node(
            name, f"{kind}{draw(st.integers(0, 8))}", cpus=draw(st.sampled_from((2, 16))), memory_gib=64
        )
    fleet = Fleet(nodes=nodes)
    names = st.lists(st.sampled_from(sorted(nodes)), max_size=2)
    fleet = fleet.down(*draw(names)).drained(*draw(names))
    held = {name: draw(st.sets(st.integers(0, 7), max_size=3)) for name in draw(names)}
    return fleet.held(**held)


@st.composite
def jobs(draw):
    shape = draw(
        st.sampled_from(
            ("0", "1", "2", "3", "4", "6", "8", "12", "2x1", "2x2", "3x2", "h200:2", "a100:1", "2xa100-80gb:2")
        )
    )
    avoid = tuple(NodeId(name) for name in draw(st.lists(st.sampled_from(NODES), max_size=2, unique=True)))
    return job(
        "x",
        gpus=shape,
        priority=draw(st.integers(-1, 2)),
        cpus=draw(st.sampled_from((0, 0, 1, 8))),
        avoided_nodes=avoid,
        memory_gib=draw(st.sampled_from((0, 0, 48))),
        held=draw(st.sampled_from((False, False, False, True))),
    )


@st.composite
def snapshots(draw):
    waiting = [
        replace(one, id=JobId(str(number))) for number, one in enumerate(draw(st.lists(jobs(), max_size=12)), start=1)
    ]
    return draw(fleets()).with_jobs(*waiting)


def world_of(snapshot):
    world = World()
    change = WorldChange(world=world)
    for record in (PLAIN, *snapshot.nodes.values(), *snapshot.pending):
        change.put(record)
    world.usage.update(snapshot.usage)
    return world, change


@given(snapshots())
def test_every_placement_can_be_committed_in_the_order_of_the_plan(snapshot):
    world, change = world_of(snapshot)
    for placement in plan_of(snapshot).placements:
        assert rejection_reason(world, placement) == ""
        outcome = place(world.jobs[placement.job_id], placement.allocation, TransitionContext(now_s=T))
        change.put(outcome.job)
        change.put(outcome.attempt)
        assert rejection_reason(world, placement) == "the job no longer waits"


@given(snapshots())
def test_every_job_is_placed_or_told_why_not(snapshot):
    plan = plan_of(snapshot)
    placed = {placement.job_id for placement in plan.placements}
    assert placed | set(plan.waits) == {one.id for one in snapshot.pending}
    assert not placed & set(plan.waits)
    assert all(wait.detail for wait in plan.waits.values())


@given(snapshots())
def test_gangs_are_whole_and_of_the_shape_asked_for(snapshot):
    wanted = {one.id: one.spec.role for one in snapshot.pending}
    for placement in plan_of(snapshot).placements:
        role, grants = wanted[placement.job_id], placement.allocation.grants
        assert placement.allocation.gpus == role.gpus.total
        assert len({len(grant.devices) for grant in grants}) == 1, "equal parts"
        if role.gpus.nodes is not None:
            assert len(grants) == role.gpus.nodes
        assert [grant.node_rank for grant in grants] == list(range(len(grants)))
        assert [grant.first_rank for grant in grants] == [rank * grants[0].tasks for rank in range(len(grants))]
        assert grants[0].tasks == tasks_per_node(role, len(grants[0].devices))
        for grant in grants:
            models = {device.model for device in snapshot.nodes[grant.node_id].devices if device.index in grant.devices}
            assert role.gpus.model is None or models == {role.gpus.model}


@given(snapshots())
def test_nothing_that_still_fits_after_the_plan_was_passed_over(snapshot):
    plan = plan_of(snapshot)
    free = FreeRooms.of(snapshot)
    for placement in plan.placements:
        free.take(placement.allocation)
    up = [node for _, node in sorted(snapshot.nodes.items()) if node.schedulable]
    waiting = {one.id: one for one in snapshot.pending}
    for job_id, wait in plan.waits.items():
        if wait.reason is WaitReasonCode.RESOURCES:
            assert find(free, preferred_shape(waiting[job_id].spec.role, up), waiting[job_id].avoided_nodes) is None


@given(snapshots(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_its_input(snapshot, random):
    pending, nodes, usage = list(snapshot.pending), list(snapshot.nodes.items()), list(snapshot.usage.items())
    for items in (pending, nodes, usage):
        random.shuffle(items)
    shuffled = replace(snapshot, pending=tuple(pending), nodes=dict(nodes), usage=dict(usage))
    assert repr(plan_of(snapshot)) == repr(plan_of(shuffled))


@given(snapshots())
def test_no_lower_job_takes_what_a_higher_equal_one_waits_for(snapshot):
    plan = plan_of(snapshot)
    rank = {one.id: (-one.spec.priority, one.seq) for one in snapshot.pending}
    roles = {one.id: one.spec.role for one in snapshot.pending}
    for job_id, wait in plan.waits.items():
        if wait.reason is WaitReasonCode.RESOURCES:
            for placement in plan.placements:
                like = (
                    roles[placement.job_id].gpus,
                    roles[placement.job_id].cpus,
                    roles[placement.job_id].memory_bytes,
                )
                if like == (roles[job_id].gpus, roles[job_id].cpus, roles[job_id].memory_bytes):
                    assert rank[placement.job_id] < rank[job_id]


@given(snapshots(), st.sampled_from(("drain", "device", "cpus")))
def test_plan_made_before_something_changed_is_rejected(snapshot, what):
    placements = plan_of(snapshot).placements
    if not placements:
        return
    world, change = world_of(snapshot)
    first = placements[0]
    grant = first.allocation.grants[0]
    node = world.nodes[grant.node_id]
    if what == "drain":
        change.put(Fleet(nodes={node.id: node}).drained(node.id).nodes[node.id])
    elif what == "device":
        change.put(replace(node, devices=()))
    else:
        change.put(replace(node, cpus=0))
    touched = what == "drain" or (what == "device" and grant.devices) or (what == "cpus" and grant.cpus)
    if touched:
        assert rejection_reason(world, first)
    assert (
        rejection_reason(world, Placement(job_id=JobId("99"), allocation=first.allocation)) == "the job no longer waits"
    )
