"""Tables of plans: a fleet drawn in a line, what runs and what waits, and the plan as a line. Who may start, who goes first, and where.

A plan in a line: `b stops for a` or `moves`, then placements `a n0:0,1`, then who waits and why (`c quota`). Rights to others' room are
drawn in `test_making_room`, queues in `test_fair_queues`.
"""

from dataclasses import replace

import pytest

from phalanx.core.ids import JobId, NodeId, ReservationId, UserId
from phalanx.core.scheduling.policies import POLICIES
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.scheduling.settings import PolicySettings
from phalanx.core.work.dependency import ArrayPosition, Dependency, DependencyKind
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import TopologyConstraint
from phalanx.core.work.states import WaitReasonCode
from tests.builders import T, drawn, gpu, job, lined, make_fleet, plan_of, queue

RACKS = "l0/r0: n0=8 n1=8 | l0/r1: n2=8 n3=8 | l1/r2: n4=8 n5=8 n6=8"
FIRST, SECOND, WHOLE = "0,1,2,3", "4,5,6,7", "0,1,2,3,4,5,6,7"


def afterok(number="9"):
    return (Dependency(kind=DependencyKind.AFTER_OK, job_id=JobId(number)),)


def element(index, running_max=2, of="7", **fields):
    place = ArrayPosition(array_id=JobId(of), index=index, size=9, running_max=running_max)
    return job(f"{of}_{index}", array=place, **fields)


def reserved(name, *nodes, start_s=-10.0, end_s=5000.0, users=()):
    """From and to, in seconds from now; for nobody unless users are named."""
    return Reservation(
        id=ReservationId(name),
        nodes=tuple(map(NodeId, nodes)),
        start_s=T + start_s,
        end_s=T + end_s,
        users=frozenset(map(UserId, users)),
    )


# ---- where: topology, models, packing, CPUs -------------------------------------------------------------------------

# fleet, devices held, job -> its place; "" for none
WHERE = [
    # the smallest domain that holds the gang: one node, one rack, one leaf, then anywhere
    (RACKS, {}, {"gpus": "2x8"}, f"n0:{WHOLE} n1:{WHOLE}"),
    (RACKS, {}, {"gpus": "3x8"}, f"n4:{WHOLE} n5:{WHOLE} n6:{WHOLE}"),
    (RACKS, {}, {"gpus": "4x8"}, f"n0:{WHOLE} n1:{WHOLE} n2:{WHOLE} n3:{WHOLE}"),
    # of racks that hold it the fullest, so that empty ones stay empty: r2 has two whole nodes left as has r1, but r0 has one
    (RACKS, {"n0": [0], "n4": [0]}, {"gpus": "1x8"}, f"n1:{WHOLE}"),
    # a level required: wait rather than spread; preferred: the nearest there is
    (RACKS, {}, {"gpus": "4x8", "topology": TopologyConstraint(within="rack", required=True)}, ""),
    (
        RACKS,
        {},
        {"gpus": "4x8", "topology": TopologyConstraint(within="rack")},
        f"n0:{WHOLE} n1:{WHOLE} n2:{WHOLE} n3:{WHOLE}",
    ),
    (
        RACKS,
        {"n0": [0]},
        {"gpus": "2x8", "topology": TopologyConstraint(within="rack", required=True)},
        f"n2:{WHOLE} n3:{WHOLE}",
    ),
    (RACKS, {"n0": [0], "n2": [0]}, {"gpus": "4x8", "topology": TopologyConstraint(within="leaf", required=True)}, ""),
    # slices: each two nodes in one rack; n1 has lost its neighbour
    (
        RACKS,
        {"n0": [0]},
        {"gpus": "4x8", "topology": TopologyConstraint(slice_nodes=2, slice_within="rack")},
        f"n2:{WHOLE} n3:{WHOLE} n4:{WHOLE} n5:{WHOLE}",
    ),
    (
        RACKS,
        {"n0": [0], "n2": [0]},
        {"gpus": "4x8", "topology": TopologyConstraint(slice_nodes=2, slice_within="rack")},
        "",
    ),
    # neighbours in the ring are neighbours in the tree: b is in r0 with a, whatever it is called
    ("r1: a=4 c=4 | r0: d=4 b=4", {}, {"gpus": "4x4"}, "b:0,1,2,3 d:0,1,2,3 a:0,1,2,3 c:0,1,2,3"),
    # part-node work fills broken nodes, the fullest that has room
    ("r: n0=8 n1=8 n2=8", {"n1": [0, 1, 2], "n2": [0, 1, 2, 3, 4]}, {"gpus": 3}, "n2:5,6,7"),
    ("r: n0=8 n1=8 n2=8", {"n1": [0, 1, 2], "n2": [0, 1, 2, 3, 4]}, {"gpus": 5}, "n1:3,4,5,6,7"),
    # whole nodes and the rest on one more, on a broken one
    ("r: n0=8 n1=8 n2=8", {"n2": [0]}, {"gpus": gpu(19, uneven=True)}, f"n0:{WHOLE} n1:{WHOLE} n2:1,2,3"),
    # models: the first that is free; a gang is of one model
    ("r: n0=h200:4 n1=a100:4", {}, {"gpus": "a100,h200:4"}, "n1:0,1,2,3"),
    ("r: n0=h200:4 n1=a100:4", {"n1": [0]}, {"gpus": "a100,h200:4"}, "n0:0,1,2,3"),
    ("r: n0=h200:4 n1=a100:4 n2=a100:4", {}, {"gpus": "h200,a100:8"}, "n1:0,1,2,3 n2:0,1,2,3"),
    ("r: n0=h200:4 n1=a100:4", {}, {"gpus": "h200,a100:8"}, ""),
]


@pytest.mark.parametrize(("fleet", "held", "wanted", "where"), WHERE)
def test_where_a_job_goes(fleet, held, wanted, where):
    assert drawn(plan_of(make_fleet(fleet).held(**held).with_jobs(job("a", **wanted))), "a") == where


def test_small_work_leaves_the_whole_node_to_the_gang_that_comes_with_it():
    fleet = make_fleet("r: n0=8 n1=8 n2=8").held(n1=[0, 1, 2], n2=[0])
    plan = plan_of(fleet.with_jobs(job("a", gpus=2), job("b", gpus=2), job("c", gpus=8)))
    assert [drawn(plan, name) for name in "abc"] == ["n1:4,5", "n1:6,7", f"n0:{WHOLE}"]


def test_cpus_and_memory_are_shared_out_as_devices_are():
    fleet = make_fleet("r: n0=8 n1=8", cpus=16, memory_gib=100).runs(job("x", gpus=1, cpus=12), "n0:0")
    plan = plan_of(fleet.with_jobs(job("a", cpus=8), job("b", cpus=8), job("c", cpus=8), job("d", memory_gib=90)))
    assert lined(plan) == "a n1:0 | b n1:1 | d n1:2 | c resources"


# ---- who may not start, whatever is free ----------------------------------------------------------------------------

MAINTENANCE = reserved("m", "n0", start_s=1000.0)
FOR_BOB = reserved("u", "n0", users=["bob"])

# what waits -> the plan on n0=8 n1=8
WHO = [
    ("unmet", [job("a", unmet_dependencies=afterok(), priority=9), job("b")], "b n0:0 | a dependency"),
    ("held", [job("a", held=True, priority=9), job("b")], "b n0:0 | a held"),
    ("begin", [job("a", begin_s=T + 1, priority=9), job("b")], "b n0:0 | a begin_time"),
    ("begun", [job("a", begin_s=T)], "a n0:0"),
    (
        "array",
        [*(element(n) for n in range(4)), job("b")],
        "7_0 n0:0 | 7_1 n0:1 | b n0:2 | 7_2 array_limit | 7_3 array_limit",
    ),
    ("no throttle", [element(n, None) for n in range(3)], "7_0 n0:0 | 7_1 n0:1 | 7_2 n0:2"),
    ("two arrays", [element(0, 1), element(1, 1), element(0, 1, "8")], "7_0 n0:0 | 8_0 n0:1 | 7_1 array_limit"),
]


@pytest.mark.parametrize(("waits", "plan"), [row[1:] for row in WHO], ids=[row[0] for row in WHO])
def test_who_may_start(waits, plan):
    assert lined(plan_of(make_fleet("r: n0=8 n1=8").with_jobs(*waits))) == plan


def test_elements_that_run_count_against_their_array():
    fleet = make_fleet("r: n0=8").runs(element(0), "n0:0")
    assert lined(plan_of(fleet.with_jobs(element(1), element(2)))) == "7_1 n0:1 | 7_2 array_limit"


# reservations; what waits -> the plan on n0=8 n1=8
WINDOWS = [
    ("who is done before it", MAINTENANCE, [job("a", gpus=8, time_limit_s=900)], f"a n0:{WHOLE}"),
    ("who may not be done", MAINTENANCE, [job("a", gpus=8), job("b", gpus=8)], f"a n1:{WHOLE} | b reservation"),
    (
        "holders",
        FOR_BOB,
        [job("a", gpus=8), job("b", gpus=8, user="bob"), job("c", gpus=8)],
        f"a n1:{WHOLE} | b n0:{WHOLE} | c resources",
    ),
    (
        "inside only",
        FOR_BOB,
        [job("a", gpus=8, user="bob", reservation="u"), job("b", gpus=8, user="bob", reservation="u")],
        f"a n0:{WHOLE} | b reservation",
    ),
    ("not for you", FOR_BOB, [job("a", gpus=8, reservation="u")], "a never"),
]


@pytest.mark.parametrize(("window", "waits", "plan"), [row[1:] for row in WINDOWS], ids=[row[0] for row in WINDOWS])
def test_reservations(window, waits, plan):
    assert lined(plan_of(make_fleet("r: n0=8 n1=8").set_aside(window).with_jobs(*waits))) == plan


def inadmissible():
    """One job of every kind that must not stand in anybody's way, each of the highest priority."""
    return [
        job("quota", queue="full", priority=9),
        job("shut", queue="shut", priority=9),
        job("held", held=True, priority=9),
        job("dep", unmet_dependencies=afterok(), priority=9),
        job("begin", begin_s=T + 1000, priority=9),
        job("shape", gpus=64, priority=9),
        job("model", gpus="h200:1", priority=9),
        job("window", reservation="nowhere", priority=9),
        element(0, 0, priority=9),
    ]


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"fifo", "sjf"}))
def test_what_may_not_start_blocks_nobody(name):
    """`las` and `srtf` decide at rounds alone, so the clock moves on to one."""
    queues = [queue("default"), queue("full", quota_gpus=0, borrow_gpus=0), queue("shut", open=False)]
    fleet = make_fleet("r: n0=8").with_queues(*queues)
    snapshot = fleet.with_jobs(*inadmissible(), job("ok", gpus=8, time_limit_s=100.0))
    assert placed_within_a_round(snapshot, name) == {"ok"}


@pytest.mark.parametrize("name", ["fifo", "sjf"])
def test_what_may_not_start_blocks_nobody_in_a_strict_line_either(name):
    """But for a job that names a reservation without room: it stands at the head of the line, as whoever does not fit."""
    queues = [queue("default"), queue("full", quota_gpus=0, borrow_gpus=0), queue("shut", open=False)]
    waits = [one for one in inadmissible() if one.id != "window"]
    snapshot = make_fleet("r: n0=8").with_queues(*queues).with_jobs(*waits, job("ok", gpus=8, time_limit_s=100.0))
    assert placed_within_a_round(snapshot, name) == {"ok"}


def placed_within_a_round(snapshot, name):
    whole = replace(snapshot, jobs={one.id: one for one in snapshot.pending})
    scheduler = Scheduler(PolicySettings(name=name))
    placed = {one.job_id for one in scheduler.plan(whole, T).placements}
    return placed | {one.job_id for one in scheduler.plan(whole, T + 60.5).placements}


# ---- who goes first -------------------------------------------------------------------------------------------------

# policy, fleet, held, what waits -> the plan
FIRST_IN_LINE = [
    (
        "priority",
        "default",
        "r: n0=4",
        {},
        [job("a", gpus=4), job("b", gpus=4, priority=1)],
        f"b n0:{FIRST} | a resources",
    ),
    (
        "queue's priority",
        "default",
        "r: n0=4",
        {},
        [job("a", gpus=4, priority=1), job("b", gpus=4, queue="urgent")],
        f"b n0:{FIRST} | a resources",
    ),
    (
        "repair",
        "default",
        "r: n0=4",
        {},
        [job("new", gpus=4, priority=3), job("lost", gpus=4, reason=WaitReasonCode.NODE_FAIL, attained_s=900.0)],
        f"lost n0:{FIRST} | new resources",
    ),
    (
        "drained is repaired too",
        "default",
        "r: n0=4",
        {},
        [job("new", gpus=4), job("lost", gpus=4, reason=WaitReasonCode.DRAINED)],
        f"lost n0:{FIRST} | new resources",
    ),
    (
        "crashed is not",
        "default",
        "r: n0=4",
        {},
        [job("new", gpus=4, priority=3), job("own", gpus=4, reason=WaitReasonCode.CRASH)],
        f"new n0:{FIRST} | own resources",
    ),
    ("nobody overtakes", "fifo", "r: n0=4", {"n0": [0]}, [job("a", gpus=4), job("b")], "a resources | b priority"),
    (
        "priority heads the line",
        "fifo",
        "r: n0=4",
        {},
        [job("a", gpus=4), job("b", gpus=4, priority=1)],
        f"b n0:{FIRST} | a resources",
    ),
    ("who fits starts", "skip", "r: n0=4", {"n0": [0]}, [job("a", gpus=4), job("b")], "b n0:1 | a resources"),
    (
        "shortest limit",
        "sjf",
        "r: n0=4",
        {},
        [job("a", gpus=4, time_limit_s=900), job("b", gpus=4, time_limit_s=60)],
        f"b n0:{FIRST} | a resources",
    ),
]


@pytest.mark.parametrize(
    ("policy", "fleet", "held", "waits", "plan"),
    [row[1:] for row in FIRST_IN_LINE],
    ids=[row[0] for row in FIRST_IN_LINE],
)
def test_who_goes_first(policy, fleet, held, waits, plan):
    queues = [queue("default"), queue("urgent", priority=10)]
    assert lined(plan_of(make_fleet(fleet).with_queues(*queues).held(**held).with_jobs(*waits), name=policy)) == plan


# A job runs until 100 s from now on six of n0's eight; the head needs all eight. What waits behind it -> what starts now
BACKFILL = [
    ("done before the head starts", "r: n0=8", {"gpus": 2, "time_limit_s": 60.0}, "n0:6,7"),
    ("not done before", "r: n0=8", {"gpus": 2, "time_limit_s": 500.0}, ""),
    ("no limit, beside the head's node", "r: n0=8 n1=2", {"gpus": 2}, "n1:0,1"),
    (
        "long, on what the head leaves over of another node",
        "r: n0=8 n1=4",
        {"gpus": 2, "time_limit_s": 500.0},
        "n1:0,1",
    ),
]


@pytest.mark.parametrize(("fleet", "behind", "starts"), [row[1:] for row in BACKFILL], ids=[row[0] for row in BACKFILL])
def test_backfill_never_delays_the_head(fleet, behind, starts):
    busy = make_fleet(fleet).runs(job("x", gpus=6, time_limit_s=7300.0), "n0:0-5", for_s=7200.0)
    plan = plan_of(busy.with_jobs(job("head", gpus=8, time_limit_s=50.0), job("b", **behind)), name="backfill")
    assert drawn(plan, "b") == starts


def test_backfill_goes_beside_a_head_that_leaves_some_of_its_node_over():
    busy = make_fleet("r: n0=8").runs(job("x", gpus=6, time_limit_s=7300.0), "n0:0-5", for_s=7200.0)
    waits = [job("head", gpus=5), job("b", gpus=1), job("c", gpus=1), job("d", gpus=1)]
    assert lined(plan_of(busy.with_jobs(*waits), name="backfill")) == "b n0:6 | c n0:7 | d resources | head resources"


# ---- why not --------------------------------------------------------------------------------------------------------

LIMITED = queue("q", quota_gpus=4, borrow_gpus=0)

# a fleet, a job -> the reason and the sentence
WHY = [
    (
        make_fleet("r: n0=4").held(n0=[0]),
        job("a", gpus=4),
        "resources",
        "needs 1 x 4 GPUs; 3 free in total, at most 3 on one node",
    ),
    (
        make_fleet("r: n0=4 n1=4").held(n0=[0]),
        job("a", gpus="2x4"),
        "resources",
        "needs 2 x 4 GPUs; 7 free in total, at most 4 on one node",
    ),
    (
        make_fleet("r: n0=8", cpus=16).runs(job("x", cpus=12), "n0:0"),
        job("a", cpus=8),
        "resources",
        "needs 8 CPUs on its node: enough GPUs are free, but not enough of these",
    ),
    (
        make_fleet("r0: n0=8 n1=8 | r1: n2=8").held(n0=[0]),
        job("a", gpus="2x8", topology=TopologyConstraint(within="rack", required=True)),
        "topology",
        "needs 2 x 8 GPUs in one rack; 23 free in total, at most 1 such nodes in one rack",
    ),
    (
        make_fleet("r0: n0=8 | r1: n1=8"),
        job("a", gpus="2x8", topology=TopologyConstraint(within="rack", required=True)),
        "never",
        "2 nodes x 8 = 16 GPUs within one rack can never fit: no rack has 2 such nodes, the largest is r0 with 1",
    ),
    (
        make_fleet("r: n0=8").set_aside(FOR_BOB),
        job("a", gpus=1),
        "reservation",
        "1 node reserved for bob (u) for another 1h23m",
    ),
    (
        make_fleet("r: n0=8").set_aside(MAINTENANCE),
        job("a", gpus=1),
        "reservation",
        "1 node reserved for maintenance (m) in 16m40s, when it could still run: it has no time limit",
    ),
    (
        make_fleet("r: n0=8 n1=8").set_aside(FOR_BOB).held(n0=[0]),
        job("a", gpus=8, user="bob", reservation="u"),
        "reservation",
        "reservation u has not enough free capacity now",
    ),
    (
        make_fleet("r: n0=8").with_queues(LIMITED).runs(job("x", gpus=2, queue="q"), "n0:0,1"),
        job("a", gpus=3, queue="q"),
        "quota",
        "queue q uses 2 of at most 4 GPUs; the job needs 3",
    ),
    (make_fleet("r: n0=8"), job("a", unmet_dependencies=afterok("17")), "dependency", "waits for job 17 to succeed"),
    (make_fleet("r: n0=8"), job("a", begin_s=T + 90), "begin_time", "requested begin time is in 1m30s"),
    (make_fleet("r: n0=8"), job("a", held=True), "held", "job a is held"),
    (
        make_fleet("r: n0=8").runs(element(0, 1), "n0:0"),
        element(1, 1),
        "array_limit",
        "1 element of its array runs; at most 1 may",
    ),
    (
        make_fleet("r: n0=8").with_queues(queue("q", open=False)),
        job("a", queue="q"),
        "queue_closed",
        "queue q is closed",
    ),
    (
        make_fleet("r: n0=8 n1=8").drained("n1"),
        job("a", gpus=16),
        "nodes_down",
        "nothing here now can run this (2 nodes x 8 = 16 GPUs): n1 is drained (disk)",
    ),
    (make_fleet("r: n0=8").down("n0"), job("a"), "no_nodes", "no node is up"),
    (
        make_fleet("r: n0=8"),
        job("a", not_before_s=T + 5, detail="n0: sick"),
        "backoff",
        "waits shortly after a failed start",
    ),
    (
        make_fleet("r: n0=8").runs(job("x", gpus=8), "n0:0-7"),
        job("a", gpus=8, priority=1),
        "claimed",
        "waits for running jobs on n0 to save and stop",
    ),
]


@pytest.mark.parametrize(
    ("fleet", "one", "reason", "sentence"), WHY, ids=[f"{row[2]}-{at}" for at, row in enumerate(WHY)]
)
def test_why_a_job_waits(fleet, one, reason, sentence):
    wait = plan_of(fleet.with_jobs(one)).waiting(one.id)
    assert wait.reason is WaitReasonCode(reason)
    assert wait.detail == sentence


def test_a_full_fleet_is_no_matter_of_quota():
    fleet = make_fleet("r: n0=4").with_queues(queue("a"), queue("b"))
    plan = plan_of(fleet.with_jobs(job("x", gpus=4, queue="a"), job("y", gpus=4, queue="b")))
    assert lined(plan) == f"x n0:{FIRST} | y resources"


def test_reasons_of_a_plan_name_waiting_jobs_only():
    """Who is stopped for another waits on the board already, and still runs in the records: it has no reason to give yet."""
    fleet = make_fleet("r: n0=8").runs(job("x", gpus=8), "n0:0-7")
    assert lined(plan_of(fleet.with_jobs(job("a", gpus=8, priority=1)))) == "x stops for a | a claimed"
