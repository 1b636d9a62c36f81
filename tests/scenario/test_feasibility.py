"""What can never start: each limit from both sides, what is unknown, and when waiting jobs are judged again."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.core.errors import NeverFits, NotFound
from phalanx.core.ids import NodeId, QueueId, ReservationId, UserId
from phalanx.core.scheduling.feasibility.answer import Outlook
from phalanx.core.scheduling.feasibility.cache import FeasibilityCache
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker, newly_impossible
from phalanx.core.scheduling.feasibility.node_scopes import NODE_RETURNS_WITHIN_S
from phalanx.core.scheduling.feasibility.request import feasibility_request
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.events import (
    CordonNode,
    EndReservation,
    PutQueues,
    PutReservation,
    RemoveNode,
    UncordonNode,
    UpdateJob,
)
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import TopologyConstraint
from phalanx.core.work.states import WaitReasonCode
from tests.builders import PLAIN, T, gpu, job, lined, make_fleet, plan_of, queue
from tests.harness import Harness

OP = UserId("op")
RACKS = "r0: n0=8 n1=8 | r1: n2=8"
IN_RACK = TopologyConstraint(within="rack", required=True)


def reserved(*nodes, user="ada", name="lab", **fields):
    return Reservation(
        id=ReservationId(name),
        nodes=nodes,
        users=frozenset({UserId(user)}),
        **{"start_s": T - 10.0, "end_s": T + 5000.0, **fields},
    )


def judged(fleet, *, awaited="", **fields):
    return FeasibilityChecker(replace(fleet.with_jobs(), awaited_nodes=awaited), fleet.now_s).check_job(
        job("x", **fields)
    )


# ---- the limits of queues -------------------------------------------------------------------------------------------

NLP_BELOW = [queue("top", quota_gpus=4, borrow_gpus=2), queue("nlp", parent="top")]
WIDE = make_fleet("r: n0=8 n1=8")
# queues, the job in queue nlp -> limit and sentence, or "" for a job that is possible
LIMITS = [
    ("users.gpus", [queue("nlp", gpus_per_user=6)], {"gpus": 8}, "8 GPUs asked; queue nlp allows 6 a user"),
    ("", [queue("nlp", gpus_per_user=6)], {"gpus": 6}, ""),
    ("users.gpus", [queue("nlp", gpus_per_user=0)], {"gpus": 1}, "1 GPU asked; queue nlp allows 0 a user"),
    ("", [queue("nlp", gpus_per_user=0)], {"gpus": 0}, ""),
    (
        "users.gpus",
        [queue("top", gpus_per_user=6), queue("nlp", parent="top")],
        {"gpus": 8},
        "8 GPUs asked; queue top allows 6 a user",
    ),
    ("users.jobs", [queue("nlp", jobs_per_user=0)], {"gpus": 0}, "queue nlp allows 0 running jobs a user"),
    ("", [queue("nlp", jobs_per_user=1)], {"gpus": 8}, ""),
    ("budget", [queue("nlp", budget_gpu_h=0.0)], {"gpus": 1}, "1 GPU asked; the budget of queue nlp is 0 GPU-hours"),
    ("", [queue("nlp", budget_gpu_h=0.0)], {"gpus": 0}, ""),
    ("", [queue("nlp", budget_gpu_h=0.1)], {"gpus": 8}, ""),
    (
        "budget",
        [queue("top", budget_gpu_h=0.0), queue("nlp", parent="top")],
        {"gpus": 1},
        "1 GPU asked; the budget of queue top is 0 GPU-hours",
    ),
    (
        "borrow",
        [queue("nlp", quota_gpus=4, borrow_gpus=2)],
        {"gpus": 8},
        "8 GPUs asked; queue nlp can get at most 6 (quota 4, borrow 2)",
    ),
    ("", [queue("nlp", quota_gpus=4, borrow_gpus=4)], {"gpus": 8}, ""),
    ("", [queue("nlp", quota_gpus=4)], {"gpus": 8}, ""),
    (
        "borrow",
        [queue("nlp", borrow_gpus=0)],
        {"gpus": 1},
        "1 GPU asked; queue nlp can get at most 0 (no quota, borrow 0)",
    ),
    ("", [queue("nlp", borrow_gpus=0)], {"gpus": 0}, ""),
    (
        "borrow",
        NLP_BELOW,
        {"gpus": 8},
        "8 GPUs asked; queue nlp can get at most 6: queue top above it has quota 4, borrow 2",
    ),
    ("", NLP_BELOW, {"gpus": 6}, ""),
    (
        "borrow",
        [
            queue("top", quota_gpus=8, borrow_gpus=0),
            queue("nlp", parent="top"),
            queue("b", parent="top", quota_gpus=3, lend_gpus=1),
        ],
        {"gpus": 8},
        "8 GPUs asked; queue nlp can get at most 6: queue top above it has quota 8 of which queues below it do not lend 2, borrow 0",
    ),
    (
        "lend",
        [queue("nlp"), queue("b", quota_gpus=12, lend_gpus=2)],
        {"gpus": 8},
        "8 GPUs asked; queue nlp can get at most 6: of 16 GPUs, queues keep 10 that they do not lend",
    ),
    ("", [queue("nlp"), queue("b", quota_gpus=12, lend_gpus=4)], {"gpus": 8}, ""),
    (
        "",
        [queue("nlp", quota_gpus=16), queue("b", quota_gpus=16, lend_gpus=0)],
        {"gpus": "2x8"},
        "",
    ),  # more quota than fleet
    # An elastic job counts with its fewest nodes.
    ("", [queue("nlp", gpus_per_user=4)], {"gpus": "1..4x4"}, ""),
    ("users.gpus", [queue("nlp", gpus_per_user=4)], {"gpus": "2..4x4"}, "8 GPUs asked; queue nlp allows 4 a user"),
    # These only delay a job.
    ("", [queue("nlp", open=False)], {"gpus": 8}, ""),
    ("", [queue("nlp")], {"gpus": 8, "held": True}, ""),
    ("", [queue("nlp")], {"gpus": 8, "begin_s": T + 1e9}, ""),
]


@pytest.mark.parametrize(
    ("limit", "queues", "asked", "sentence"), LIMITS, ids=[f"{row[0]}-{at}" for at, row in enumerate(LIMITS)]
)
def test_limits_of_queues(limit, queues, asked, sentence):
    found = judged(WIDE.with_queues(*queues), queue="nlp", **asked)
    assert (found.limit, found.detail) == (limit, sentence)
    assert found.outlook is (Outlook.NEVER if limit else Outlook.POSSIBLE)


# ---- the fleet ------------------------------------------------------------------------------------------------------

BIG = make_fleet("r: n0=8 n1=h200:4", cpus=16, memory_gib=64)
# fleet, the job -> words of the sentence, or "" for a job that is possible
FLEET: list[Any] = [
    (WIDE, {"gpus": "2x8"}, ""),
    (WIDE, {"gpus": "3x8"}, "3 nodes x 8 = 24 GPUs can never fit: the fleet has 2 nodes"),
    (WIDE, {"gpus": "1x9"}, "at most 8 matching GPUs on one node"),
    (WIDE, {"gpus": 32}, "16 in total"),
    (WIDE, {"gpus": "2..9x8"}, ""),
    (WIDE, {"gpus": "3..9x8"}, "3..9 nodes x 8"),
    (BIG, {"gpus": "h200:4"}, ""),
    (BIG, {"gpus": "h200:8"}, "at most 4 matching GPUs"),
    (BIG, {"gpus": "b200,h200:4"}, ""),  # one of several models suffices
    (BIG, {"gpus": "b200,h100:4"}, "no node has a GPU that is b200 or h100"),
    (BIG, {"gpus": "h200-141gb:4"}, "no node has a GPU of model h200 of 141 GiB"),
    (BIG, {"gpus": 1, "cpus": 16}, ""),
    (BIG, {"gpus": 1, "cpus": 17}, "with 17 CPUs each"),
    (BIG, {"gpus": 1, "memory_gib": 65}, "and 65 GiB per node"),
    (BIG, {"gpus": gpu(nodes=3, per_node=0)}, "3 nodes can never fit"),
    (BIG, {"gpus": gpu(nodes=2, per_node=0)}, "the nodes of one job have one GPU model, and the fleet has at most 1"),
    (WIDE, {"gpus": gpu(nodes=2, per_node=0)}, ""),
    (make_fleet(RACKS), {"gpus": "2x8", "topology": IN_RACK}, ""),
    (make_fleet(RACKS), {"gpus": "3x8", "topology": IN_RACK}, "no rack has 3 such nodes, the largest is r0 with 2"),
    (
        make_fleet(RACKS),
        {"gpus": "1x8", "topology": replace(IN_RACK, within="leaf")},
        "no node is labelled with its leaf",
    ),
    (make_fleet(RACKS), {"gpus": "3x8", "topology": TopologyConstraint(within="rack")}, ""),  # only preferred
    (
        make_fleet(RACKS),
        {"gpus": "4x4", "topology": TopologyConstraint(slice_nodes=2, slice_within="rack")},
        "4 nodes x 4",
    ),
    # The nodes that the job names.
    (WIDE, {"gpus": "2x8", "nodelist": ("n0", "n1")}, ""),
    (WIDE, {"gpus": "2x8", "nodelist": ("n0",)}, "can never fit: the node list has 1 node"),
    (WIDE, {"gpus": "2x8", "exclude": ("n1",)}, "the fleet without the excluded nodes has 1 node"),
    (
        WIDE,
        {"gpus": 1, "nodelist": ("n0",), "exclude": ("n0",)},
        "the node list without the excluded nodes has no node",
    ),
    (WIDE, {"gpus": 1, "nodelist": ("n7",)}, "the node list names n7, which is not in the fleet"),
    (
        make_fleet(RACKS),
        {"gpus": "2x8", "topology": IN_RACK, "exclude": ("n1",)},
        "no rack has 2 such nodes of the fleet without the excluded nodes, the largest is r0 with 1",
    ),
    # Its reservation.
    (WIDE.set_aside(reserved("n0", "n1")), {"gpus": "2x8", "reservation": "lab"}, ""),
    (WIDE.set_aside(reserved("n0")), {"gpus": "2x8", "reservation": "lab"}, "reservation lab has 1 node"),
    (WIDE.set_aside(reserved("n0", start_s=T + 100.0)), {"gpus": 8, "reservation": "lab"}, ""),
    (WIDE, {"gpus": 1, "reservation": "lab"}, "reservation lab has ended"),
    (
        WIDE.set_aside(reserved("n0", user="bob")),
        {"gpus": 1, "reservation": "lab"},
        "reservation lab is for bob, not for ada in queue default",
    ),
    (WIDE.set_aside(reserved("n0", "n1", user="bob")), {"gpus": 8}, ""),  # closed to it for a while
    # Nodes in use are still nodes.
    (WIDE.held(n0=range(8), n1=range(8)), {"gpus": "2x8"}, ""),
]


@pytest.mark.parametrize(
    ("fleet", "asked", "words"), FLEET, ids=[f"{row[1].get('gpus')}-{at}" for at, row in enumerate(FLEET)]
)
def test_the_fleet(fleet, asked, words):
    found = judged(fleet, **asked)
    assert found.outlook is (Outlook.NEVER if words else Outlook.POSSIBLE), found
    assert words in found.detail


# ---- what is unknown is not never -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        (WIDE.down("n1"), "n1 is down"),
        (WIDE.drained("n1"), "n1 is drained (disk)"),
        (WIDE.cordoned("n0", "n1"), "n0 is cordoned (disk), n1 is cordoned (disk)"),
        (WIDE.sick("n1", 3), "n1 has 1 unhealthy device"),
    ],
)
def test_a_node_that_may_return_leaves_the_job_possible_later(fleet, says):
    found = judged(fleet, gpus="2x8")
    assert (found.outlook, found.detail) == (
        Outlook.NOT_NOW,
        f"nothing here now can run this (2 nodes x 8 = 16 GPUs): {says}",
    )
    assert judged(fleet, gpus="3x8").never


def test_nodes_that_could_not_hold_a_part_are_not_named():
    fleet = make_fleet("r: n0=8 n1=8 n2=2").down("n1", "n2")
    assert judged(fleet, gpus="2x8").nodes == ("n1",)


def test_more_nodes_than_a_sentence_holds_are_counted():
    fleet = make_fleet("r: " + " ".join(f"n{at}=8" for at in range(6))).down(*(f"n{at}" for at in range(1, 6)))
    assert judged(fleet, gpus="6x8").detail.endswith("n1 is down, n2 is down, n3 is down and 2 more")


def test_a_node_that_has_been_down_for_a_month_does_not_count():
    fleet = WIDE.down("n1")
    within = replace(fleet, now_s=T + NODE_RETURNS_WITHIN_S - 1.0)
    after = replace(fleet, now_s=T + NODE_RETURNS_WITHIN_S)
    assert judged(within, gpus="2x8").outlook is Outlook.NOT_NOW
    gone = judged(after, gpus="2x8")
    assert gone.never
    assert gone.detail.endswith(
        "the fleet has 1 node, at most 8 matching GPUs on one node, 8 in total; it would fit with n1, down for more than 30d00h"
    )
    assert "it would fit" not in judged(after, gpus="3x8").detail
    drained = replace(WIDE.drained("n1"), now_s=T + 2 * NODE_RETURNS_WITHIN_S)
    assert judged(drained, gpus="2x8").outlook is Outlook.NOT_NOW  # it is up


def test_nodes_that_are_still_to_come_may_hold_anything():
    waits = "engine slurm has not listed its nodes yet"
    found = judged(WIDE, gpus="99x8", awaited=waits)
    assert (found.outlook, found.detail) == (Outlook.NOT_NOW, f"nothing here now can run this: {waits}")
    assert judged(WIDE, gpus="2x8", awaited=waits).outlook is Outlook.POSSIBLE
    keeps = WIDE.with_queues(queue("nlp"), queue("b", quota_gpus=12, lend_gpus=0))
    assert judged(keeps, gpus=8, queue="nlp", awaited=waits).outlook is Outlook.NOT_NOW
    # but no node makes a queue's own limit larger
    assert judged(WIDE.with_queues(queue("nlp", gpus_per_user=6)), gpus=8, queue="nlp", awaited=waits).never


def test_an_empty_fleet_refuses_nothing():
    found = judged(make_fleet(""), gpus="99x8")
    assert (found.outlook, found.detail) == (Outlook.NOT_NOW, "nothing here now can run this: no node has joined")


def test_unhealthy_devices_may_leave_too_little_to_borrow():
    """The scheduler counts healthy devices; a repaired one counts again."""
    queues = [queue("nlp"), queue("b", quota_gpus=8, lend_gpus=0)]
    assert judged(WIDE.with_queues(*queues), gpus=8, queue="nlp").outlook is Outlook.POSSIBLE
    assert judged(WIDE.sick("n1", 0).with_queues(*queues), gpus=8, queue="nlp").detail == (
        "nothing here now can run this: 1 of 16 devices are unhealthy, and other queues keep their quotas"
    )


# ---- the scheduler --------------------------------------------------------------------------------------------------


def test_what_can_never_start_holds_nobody_back():
    """`fifo` starts no later job first; and one of the highest priority reserves no nodes for itself."""
    never = job("never", gpus="3x8", priority=9)
    waits = WIDE.with_jobs(never, job("a", gpus=8))
    assert lined(plan_of(waits, name="fifo")) == "a n0:0,1,2,3,4,5,6,7 | never never"
    assert plan_of(waits).waiting("never").detail.startswith("3 nodes x 8 = 24 GPUs can never fit")


@pytest.mark.parametrize("fields", [{"held": True}, {"begin_s": T + 90.0}, {"not_before_s": T + 5.0}])
def test_never_is_the_reason_whatever_else_it_waits_for(fields):
    assert plan_of(WIDE.with_jobs(job("a", gpus="3x8", **fields))).waiting("a").reason is WaitReasonCode.NEVER


def test_a_scheduler_judges_again_when_a_node_has_been_away_for_too_long():
    scheduler, one = Scheduler(), job("a", gpus="2x8")
    seen = WIDE.down("n1").with_jobs(one)
    seen = replace(seen, jobs={one.id: seen.pending[0]})
    later_s = T + NODE_RETURNS_WITHIN_S
    set_back = (later_s + 1.0, T + 9.0, "nodes_down")
    and_on = (later_s + 1.0 + NODE_RETURNS_WITHIN_S, later_s + 9.0, "never")
    for now_s, wall_s, reason in ((T, T, "nodes_down"), (later_s, later_s, "never"), set_back, and_on):
        scheduler.plan(seen, now_s, wall_s)
        wait = scheduler.wait_reason(one)
        assert wait is not None
        assert wait.reason == reason


def test_a_node_that_returns_after_a_month_makes_the_job_possible_again():
    scheduler, one = Scheduler(), job("a", seq=1, gpus="2x8")
    away = replace(WIDE.down("n1"), now_s=T + NODE_RETURNS_WITHIN_S).with_jobs()
    away = replace(away, jobs={one.id: one})
    assert lined(scheduler.plan(away, away.now_s)) == "a never"
    back = replace(away, version=2, nodes=WIDE.nodes)
    scheduler.update(back, [back.nodes[NodeId("n1")]], back.now_s)
    assert lined(scheduler.plan(back, back.now_s)).startswith("a n0:0,1,2,3,4,5,6,7 n1:0")


def test_the_checker_of_a_world_follows_its_changes_and_the_time():
    world, cache = World(), FeasibilityCache()
    change = WorldChange(world=world)
    for node in WIDE.down("n1").nodes.values():
        change.put(node)
    change.put(queue("nlp"))
    asked = feasibility_request(job("a", gpus="2x8", queue="nlp").spec, QueueId("nlp"), UserId("ada"))

    def outlook(now_s=T):
        return cache.checker(world, now_s).check(asked).outlook

    assert outlook() is Outlook.NOT_NOW
    assert cache.checker(world, T) is cache.checker(world, T + 1.0)
    assert outlook(T + NODE_RETURNS_WITHIN_S) is Outlook.NEVER
    assert outlook() is Outlook.NOT_NOW  # the clock was set back
    later = WorldChange(world=world)
    later.put(WIDE.nodes[NodeId("n1")])
    assert outlook() is Outlook.POSSIBLE
    later.put(queue("nlp", gpus_per_user=8))
    assert outlook() is Outlook.NEVER
    later.undo()
    assert outlook() is Outlook.NOT_NOW


def test_a_named_node_gives_the_job_a_shape_of_its_own():
    """8 GPUs are one whole node in this fleet, but two halves on the nodes that the job names."""
    fleet = make_fleet("r: n0=8 n1=4 n2=4")
    assert lined(plan_of(fleet.with_jobs(job("a", gpus=8)))) == "a n0:0,1,2,3,4,5,6,7"
    for fields in ({"nodelist": ("n1", "n2")}, {"exclude": ("n0",)}):
        assert lined(plan_of(fleet.with_jobs(job("a", gpus=8, **fields)))) == "a n1:0,1,2,3 n2:0,1,2,3"
    inside = fleet.set_aside(reserved("n1", "n2")).with_jobs(job("a", gpus=8, reservation="lab"))
    assert lined(plan_of(inside)) == "a n1:0,1,2,3 n2:0,1,2,3"


def test_a_change_names_only_what_it_makes_impossible():
    before = FeasibilityChecker(WIDE.with_queues(queue("nlp")).with_jobs(), T)
    after = FeasibilityChecker(WIDE.with_queues(queue("nlp", gpus_per_user=6)).with_jobs(), T)
    waits = [job("1", gpus=8, queue="nlp"), job("2", gpus=6, queue="nlp"), job("3", gpus=99, queue="nlp")]
    assert [one.id for one, _ in newly_impossible(waits, before, after)] == ["1"]
    assert newly_impossible(waits, after, before) == []


# ---- requests -------------------------------------------------------------------------------------------------------


def reason(cluster: Any, job_id):
    wait = cluster.head.controller.waits.get(job_id)
    return None if wait is None else wait.reason.value


def outlook_of(cluster: Any, job_id):
    controller = cluster.head.controller
    return controller.feasibility.checker(controller.world, cluster.now.wall_s).check_job(cluster.job(job_id)).outlook


def put(cluster, *queues):
    return cluster.request(PutQueues(queues=(PLAIN, *queues)))


def test_a_submit_that_can_never_start_is_refused_and_leaves_nothing():
    cluster = Harness()
    put(cluster, queue("nlp", gpus_per_user=6))
    with pytest.raises(NeverFits, match=r"^8 GPUs asked; queue nlp allows 6 a user$") as refused:
        cluster.submit(gpus=8, queue="nlp")
    assert (refused.value.exit_code, refused.value.http_status) == (64, 422)
    assert refused.value.hint == "request at most 6 GPUs, or use another queue; allow_never submits it anyway"
    with pytest.raises(NeverFits):
        cluster.submit(gpus=8, queue="nlp", array="0-3")
    assert not cluster.world.jobs
    assert cluster.submit(gpus=8, queue="nlp", user="ada", allow_never=True) == "1"  # no number was used up


def test_an_accepted_job_that_can_never_start_says_so_and_starts_once_the_limit_is_raised():
    cluster = Harness()
    put(cluster, queue("nlp", gpus_per_user=6))
    never = cluster.submit(gpus=8, queue="nlp", allow_never=True)
    cluster.run(1.0)
    assert reason(cluster, never) == "never"
    put(cluster, queue("nlp", gpus_per_user=8))
    cluster.runs(never)


def test_changed_queues_name_the_waiting_jobs_that_they_make_impossible():
    cluster = Harness()
    put(cluster, queue("nlp"))
    running = cluster.submit(gpus=8, queue="nlp")
    cluster.runs(running)
    waiting, small = cluster.submit(gpus=8, queue="nlp", hold=True), cluster.submit(gpus=2, queue="nlp", hold=True)
    made = put(cluster, queue("nlp", quota_gpus=4, borrow_gpus=0))
    why = "8 GPUs asked; queue nlp can get at most 4 (quota 4, borrow 0)"
    assert [(one.job_id, one.why) for one in made] == [(waiting, why)]
    assert reason(cluster, waiting) == "never"
    assert cluster.kinds(waiting)[-1] == "never"
    assert "never" not in cluster.kinds(small) + cluster.kinds(running)
    assert put(cluster, queue("nlp", quota_gpus=3, borrow_gpus=0)) == ()  # it was impossible before


def test_a_removed_node_makes_the_jobs_that_need_it_impossible_and_its_return_possible():
    cluster = Harness()
    cluster.kill_node("n2")
    cluster.until(lambda: cluster.world.nodes[NodeId("n2")].state == "down")
    waiting = cluster.submit(gpus="3x4")
    cluster.run(1.0)
    assert reason(cluster, waiting) == "nodes_down"
    (made,) = cluster.request(RemoveNode(node_id=NodeId("n2"), by=OP))
    assert made.job_id == waiting
    assert made.why.startswith("3 nodes x 4 = 12 GPUs can never fit: the fleet has 2 nodes")
    cluster.run(1.0)
    assert reason(cluster, waiting) == "never"
    cluster.revive_node("n2")
    cluster.runs(waiting)


def test_a_drained_node_delays_a_job_and_its_return_starts_it():
    cluster = Harness()
    cluster.request(CordonNode(node_id=NodeId("n1"), by=OP, why="disk", drain=True))
    waiting = cluster.submit(gpus="3x4")
    cluster.run(1.0)
    assert reason(cluster, waiting) == "nodes_down"
    assert outlook_of(cluster, waiting) is Outlook.NOT_NOW
    cluster.request(UncordonNode(node_id=NodeId("n1"), by=OP))
    assert outlook_of(cluster, waiting) is Outlook.POSSIBLE
    cluster.runs(waiting)


def test_while_nodes_are_awaited_nothing_is_refused_for_want_of_them():
    cluster = Harness()
    world = cluster.world
    world.set_awaited_nodes("n3 has not registered yet")
    waiting = cluster.submit(gpus="4x4")
    named = cluster.submit(gpus=1, nodelist=(NodeId("n3"),))
    cluster.run(1.0)
    assert reason(cluster, waiting) == "nodes_down"
    world.set_awaited_nodes("")
    cluster.run(1.0)
    assert [reason(cluster, one) for one in (waiting, named)] == ["never", "never"]
    with pytest.raises(NeverFits):
        cluster.submit(gpus="4x4")
    with pytest.raises(NotFound, match="nodelist: no node n3"):
        cluster.submit(gpus=1, nodelist=(NodeId("n3"),))


def test_a_waiting_job_is_not_moved_to_a_queue_where_it_can_never_start():
    cluster = Harness()
    put(cluster, queue("nlp", gpus_per_user=6))
    waiting = cluster.submit(gpus=8, hold=True)
    with pytest.raises(NeverFits, match="queue nlp allows 6 a user"):
        cluster.request(UpdateJob(job_id=waiting, by=OP, queue=QueueId("nlp")))
    assert cluster.job(waiting).queue == "default"
    willing = cluster.submit(gpus=8, hold=True, allow_never=True)
    cluster.request(UpdateJob(job_id=willing, by=OP, queue=QueueId("nlp")))
    cluster.request(UpdateJob(job_id=waiting, by=OP, priority=1))


def test_a_job_whose_reservation_has_ended_says_so():
    cluster = Harness()
    now_s = cluster.now.wall_s
    cluster.request(PutReservation(reservation=reserved("n0", start_s=now_s + 50.0, end_s=now_s + 500.0)))
    waiting = cluster.submit(gpus=4, reservation="lab")
    cluster.run(1.0)
    assert reason(cluster, waiting) == "reservation"
    with pytest.raises(NeverFits, match="reservation lab has 1 node"):
        cluster.submit(gpus="2x4", reservation="lab")
    cluster.request(EndReservation(reservation_id=ReservationId("lab"), by=OP))
    cluster.run(1.0)
    assert reason(cluster, waiting) == "never"
