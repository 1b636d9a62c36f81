"""What the scheduler decides, one picture each. A placement is drawn as `n0:0,1 n1:0,1`: node and device indices."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Cordon
from phalanx.core.fleet.summary import device_fits
from phalanx.core.ids import NodeId, QueueId
from phalanx.core.resources import Resources
from phalanx.core.scheduling import fleet_index
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.shape import acceptable_shapes, preferred_shape
from phalanx.core.state.snapshot import Usage
from phalanx.core.units import GIB
from phalanx.core.work.queue import Queue
from phalanx.core.work.spec import LaunchMode
from phalanx.core.work.states import WaitReasonCode
from tests.builders import T, drawn, gpu, job, make_fleet, plan_of, spec

TWO = "rack0: n0=4 n1=4"
THREE = "rack0: n0=8 n1=4 | rack1: n2=8"

# fleet, devices held, job -> where it goes; "" for nowhere
PLACES = [
    (TWO, {}, {"gpus": 4}, "n0:0,1,2,3"),
    (TWO, {}, {"gpus": 8}, "n0:0,1,2,3 n1:0,1,2,3"),
    (TWO, {}, {"gpus": "2x2"}, "n0:0,1 n1:0,1"),
    (TWO, {}, {"gpus": 16}, ""),
    (TWO, {"n0": [0]}, {"gpus": 8}, ""),  # all or nothing
    (TWO, {"n0": [0]}, {"gpus": "2x3"}, "n0:1,2,3 n1:0,1,2"),
    (TWO, {"n1": [1]}, {"gpus": 1}, "n1:0"),  # best fit keeps whole nodes whole
    (TWO, {"n1": [0, 2]}, {"gpus": 2}, "n1:1,3"),
    (TWO, {"n1": [0]}, {"gpus": 4}, "n0:0,1,2,3"),
    (THREE, {}, {"gpus": 4}, "n1:0,1,2,3"),  # the small node, so that the large ones stay whole
    (THREE, {}, {"gpus": 16}, "n0:0,1,2,3,4,5,6,7 n2:0,1,2,3,4,5,6,7"),
    (THREE, {}, {"gpus": 7}, "n0:0,1,2,3,4,5,6"),
    ("r: n0=8 n1=4 n2=4", {}, {"gpus": 12}, "n0:0,1,2,3 n1:0,1,2,3 n2:0,1,2,3"),
    ("r: n0=4 n1=4 n2=4 n3=4 n4=4 n5=4 n6=4", {}, {"gpus": 7}, "n0:0 n1:0 n2:0 n3:0 n4:0 n5:0 n6:0"),
    (TWO, {"n0": [0, 1, 2, 3], "n1": [0, 1, 2, 3]}, {"gpus": 0}, "n0:"),  # CPUs alone
    (TWO, {}, {"gpus": gpu(nodes=2, per_node=0)}, "n0: n1:"),
]


@pytest.mark.parametrize(("fleet", "held", "wanted", "where"), PLACES)
def test_place(fleet, held, wanted, where):
    plan = plan_of(make_fleet(fleet).held(**held).with_jobs(job("a", **wanted)))
    assert drawn(plan, "a") == where


def test_ranks_follow_node_names():
    plan = plan_of(make_fleet(TWO).held(n1=[0]).with_jobs(job("a", gpus="2x2")))
    grants = plan.placements[0].allocation.grants
    assert [(grant.node_id, grant.node_rank, grant.first_rank, grant.tasks) for grant in grants] == [
        ("n0", 0, 0, 2),
        ("n1", 1, 2, 2),
    ]


@pytest.mark.parametrize(
    ("launch", "tasks", "count"),
    [("per_device", None, 4), ("per_node", None, 1), ("fixed", 3, 3), ("per_device", 1, 1)],
)
def test_how_many_tasks_start_on_a_node(launch, tasks, count):
    wanted = job("a", gpus="2x4", launch=LaunchMode(launch), tasks_per_node=tasks)
    grants = plan_of(make_fleet(TWO).with_jobs(wanted)).placements[0].allocation.grants
    assert [grant.tasks for grant in grants] == [count, count]
    assert grants[1].first_rank == count


# ---- order ----------------------------------------------------------------------------------------------------------


def order(*jobs, fleet="r: n0=1 n1=1 n2=1", queues=()):
    plan = plan_of(make_fleet(fleet).with_queues(Queue(id=QueueId("default")), *queues).with_jobs(*jobs))
    return " ".join(placement.job_id for placement in plan.placements)


def test_priority_goes_before_submit_order():
    assert order(job("a"), job("b", priority=5), job("c"), job("d", priority=5)) == "b d a"


def test_queue_adds_its_priority():
    urgent = Queue(id=QueueId("urgent"), priority=10)
    assert order(job("a", priority=5), job("b", queue="urgent"), queues=[urgent]) == "b a"


def test_negative_priority_goes_last():
    assert order(job("a", priority=-1), job("b"), job("c", priority=-2)) == "b a c"


def test_gang_waits_rather_than_splits_and_later_jobs_that_fit_start():
    snapshot = make_fleet(TWO).held(n0=[0, 1]).with_jobs(job("a", gpus=8), job("b", gpus=2), job("c", gpus=4))
    plan = plan_of(snapshot)
    assert plan.placement("a") is None
    assert drawn(plan, "b") == "n0:2,3"
    assert drawn(plan, "c") == "n1:0,1,2,3"
    wait = plan.waiting("a")
    assert wait.reason is WaitReasonCode.RESOURCES
    assert wait.detail == "needs 2 x 4 GPUs; 0 free in total, at most 0 on one node"


def test_two_jobs_never_share_a_device():
    plan = plan_of(make_fleet("r: n0=4").with_jobs(job("a", gpus=3), job("b", gpus=2), job("c", gpus=1)))
    assert [drawn(plan, name) for name in "abc"] == ["", "n0:2,3", "n0:0"], (
        "the smallest first: each GPU serves more jobs"
    )


# ---- constraints ----------------------------------------------------------------------------------------------------

MIXED = "r: n0=h200:4 n1=a100-80gb:4 n2=a100-40gb:4"


@pytest.mark.parametrize(
    ("gpus", "where"),
    [
        ("h200:4", "n0:0,1,2,3"),
        ("H200:4", "n0:0,1,2,3"),
        ("a100-80gb:4", "n1:0,1,2,3"),
        ("a100-40gb:8", "n1:0,1,2,3 n2:0,1,2,3"),
        ("2xa100:4", "n1:0,1,2,3 n2:0,1,2,3"),
        ("a100:4", "n1:0,1,2,3"),
    ],
)
def test_model_and_memory_constrain(gpus, where):
    assert drawn(plan_of(make_fleet(MIXED).with_jobs(job("a", gpus=gpus))), "a") == where


@pytest.mark.parametrize(
    ("device", "asked", "fits"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4", True),
        ("NVIDIA RTX A6000", "rtx-a6000", True),
        ("NVIDIA RTX A6000", "a6000", True),
        ("NVIDIA H100 80GB HBM3", "h10", False),
        ("NVIDIA GH200 480GB", "h200", False),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm4", False),
    ],
)
def test_model_names_whole_words_of_what_the_driver_says(device, asked, fits):
    assert device_fits(Device(index=0, uuid="u", model=device, memory_bytes=80 * GIB), asked, 0) is fits


def test_eighty_gigabytes_of_a_vendor_are_a_little_less():
    card = Device(index=0, uuid="u", model="h100", memory_bytes=81_559 * (1 << 20))
    assert device_fits(card, "h100", 80 * GIB)
    assert not device_fits(card, "h100", 96 * GIB)


def test_cpus_and_memory_constrain():
    fleet = make_fleet(TWO, cpus=16, memory_gib=64)
    assert drawn(plan_of(fleet.with_jobs(job("a", gpus=1, cpus=16))), "a") == "n0:0"
    busy = replace(
        fleet,
        usage={NodeId("n0"): Usage(host=Resources(cpus=1)), NodeId("n1"): Usage(host=Resources(memory_bytes=60 * GIB))},
    )
    assert drawn(plan_of(busy.with_jobs(job("a", gpus=1, cpus=16))), "a") == "n1:0"
    assert drawn(plan_of(busy.with_jobs(job("a", gpus=1, memory_gib=10))), "a") == "n0:0"
    plan = plan_of(busy.with_jobs(job("a", gpus=1, cpus=16, memory_gib=10)))
    assert plan.waiting("a").reason is WaitReasonCode.RESOURCES


def test_shape_goes_to_nodes_with_cpus_enough():
    fleet = make_fleet("r: n0=8", cpus=4)
    nodes = {**fleet.nodes, **make_fleet("r: n1=4 n2=4", cpus=64).nodes}
    assert (
        drawn(plan_of(replace(fleet, nodes=nodes).with_jobs(job("a", gpus=8, cpus=32))), "a") == "n1:0,1,2,3 n2:0,1,2,3"
    )


def test_sick_devices_are_not_given():
    plan = plan_of(make_fleet("r: n0=4").sick("n0", 0, 2).with_jobs(job("a", gpus=2), job("b", gpus=1)))
    assert drawn(plan, "a") == "n0:1,3"
    assert plan.waiting("b").reason is WaitReasonCode.RESOURCES


def test_nodes_to_avoid_come_last_but_come():
    fleet = make_fleet("r: n0=4 n1=4 n2=4")
    bad = (NodeId("n0"), NodeId("n1"))
    assert drawn(plan_of(fleet.with_jobs(job("a", gpus=4, avoided_nodes=bad))), "a") == "n2:0,1,2,3"
    assert drawn(plan_of(fleet.held(n2=[0]).with_jobs(job("a", gpus=4, avoided_nodes=bad))), "a") == "n0:0,1,2,3"
    assert drawn(plan_of(fleet.with_jobs(job("a", gpus=12, avoided_nodes=bad))), "a").startswith("n0:0")


# ---- who may not start ----------------------------------------------------------------------------------------------


def test_held_job_waits_and_says_how_to_release_it():
    wait = plan_of(make_fleet(TWO).with_jobs(job("a", held=True))).waiting("a")
    assert (wait.reason, wait.detail) == (WaitReasonCode.HELD, "job a is held")


def test_closed_queue_holds_its_jobs_alone():
    closed = Queue(id=QueueId("night"), open=False)
    fleet = make_fleet(TWO).with_queues(Queue(id=QueueId("default")), closed)
    plan = plan_of(fleet.with_jobs(job("a", queue="night"), job("b")))
    assert plan.waiting("a").reason is WaitReasonCode.QUEUE_CLOSED
    assert drawn(plan, "b") == "n0:0"


@pytest.mark.parametrize(
    ("until_s", "starts"),
    [
        (5.0, False),
        (0.0, True),
        (-5.0, True),
        (60.0, False),
        (86_400.0, True),
    ],  # the last: the clock was set back by a day
)
def test_backoff_holds_for_a_moment_whatever_the_clock_does(until_s, starts):
    plan = plan_of(make_fleet(TWO).with_jobs(job("a", not_before_s=T + until_s, detail="n0: sick")))
    assert (drawn(plan, "a") != "") is starts
    if not starts:
        assert plan.waiting("a").reason is WaitReasonCode.BACKOFF


def test_a_limit_of_the_engine_is_named_until_the_next_try():
    text = "Slurm does not start the job: QOSGrpGRES"

    def at(begin_s):
        limited = job("a", not_before_s=begin_s, reason=WaitReasonCode.ENGINE_LIMIT, detail=text)
        return plan_of(make_fleet(TWO).with_jobs(limited))

    waiting = at(T + 5.0).waiting("a")
    assert (waiting.reason, waiting.detail) == (WaitReasonCode.ENGINE_LIMIT, text)
    assert drawn(at(T), "a") != ""


def test_job_in_backoff_does_not_judge_its_likes():
    plan = plan_of(make_fleet(TWO).with_jobs(job("a", not_before_s=T + 5), job("b"), job("c", held=True), job("d")))
    assert [drawn(plan, name) for name in "abcd"] == ["", "n0:0", "", "n0:1"]


@pytest.mark.parametrize("away", ["down", "drained", "cordoned"])
def test_nothing_new_on_nodes_that_take_no_work(away):
    fleet = getattr(make_fleet(TWO), away)("n0")
    assert drawn(plan_of(fleet.with_jobs(job("a", gpus=1))), "a") == "n1:0"
    wait = plan_of(fleet.with_jobs(job("a", gpus=8))).waiting("a")
    assert wait.reason is WaitReasonCode.NODES_DOWN
    assert wait.detail.startswith(f"nothing here now can run this (2 nodes x 4 = 8 GPUs): n0 is {away}")


def test_no_node_up_and_none_at_all():
    assert plan_of(make_fleet(TWO).down("n0", "n1").with_jobs(job("a"))).waiting("a").reason is WaitReasonCode.NO_NODES
    away = make_fleet(TWO).drained("n0", "n1")
    assert plan_of(away.with_jobs(job("a"))).waiting("a").detail == "no node accepts work: disk"
    for why in ("", "fan"):
        cordon = Cordon(by="op", why=why, since_s=T)
        others = replace(away, nodes={name: replace(node, cordon=cordon) for name, node in away.nodes.items()})
        one = replace(others, nodes={**others.nodes, NodeId("n0"): away.nodes[NodeId("n0")]})
        wait = plan_of((one if why else others).with_jobs(job("a"))).waiting("a")
        assert wait.detail == "no node accepts work: 2 are drained or cordoned"
    assert "no node has joined" in plan_of(make_fleet("").with_jobs(job("a"))).waiting("a").detail


@pytest.mark.parametrize(
    ("gpus", "fields"),
    [
        ("99x1", {}),
        ("1x5", {}),
        (16, {}),
        ("h200:1", {}),
        ("1", {"cpus": 33}),
        ("1", {"memory_gib": 257}),
        (gpu(nodes=3, per_node=0), {}),
        ("virtual-80gb:1", {}),
    ],
)
def test_what_can_never_fit_is_refused_at_submit(gpus, fields):
    with pytest.raises(NeverFits) as refused:
        preferred_shape(spec(gpus=gpus, **fields).role, make_fleet(TWO).nodes.values())
    assert refused.value.exit_code == 64
    assert refused.value.hint


def test_what_fits_once_a_node_is_back_is_taken_at_submit():
    assert str(preferred_shape(spec(gpus=8).role, make_fleet(TWO).down("n1").nodes.values())) == "2 nodes x 4 = 8 GPUs"


def test_fleet_without_nodes_refuses_nothing():
    assert preferred_shape(spec(gpus="99x8").role, []).nodes == 99


# ---- equal in, equal out --------------------------------------------------------------------------------------------


def busy_snapshot():
    fleet = make_fleet("r0: n0=8 n1=4 n2=4 | r1: n3=8 n4=h200:4").held(n0=[1, 2], n3=[7]).drained("n2")
    shapes = ["1", "2", "2x2", "4", "8", "h200:2", "16", "0", "3x1"]
    jobs = [job(f"j{number}", gpus=shapes[number % len(shapes)], priority=number % 3) for number in range(40)]
    return fleet.with_jobs(*jobs)


def picture(plan):
    return json.dumps(
        [
            [(one.job_id, repr(one.allocation)) for one in plan.placements],
            [(name, repr(wait)) for name, wait in plan.waits.items()],
        ]
    )


def test_equal_snapshots_give_equal_plans_in_whatever_order_they_are_told():
    snapshot = busy_snapshot()
    turned = replace(
        snapshot,
        pending=tuple(reversed(snapshot.pending)),
        nodes=dict(reversed(snapshot.nodes.items())),
        usage=dict(reversed(snapshot.usage.items())),
    )
    assert picture(plan_of(snapshot)) == picture(plan_of(turned))


@pytest.mark.slow
def test_equal_plans_under_other_hash_seeds():
    script = "from tests.scenario.test_scheduling import *; print(picture(plan_of(busy_snapshot())))"
    pictures = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }
    assert pictures == {picture(plan_of(busy_snapshot()))}


def test_ten_thousand_equal_jobs_are_judged_once(monkeypatch):
    """Work, not time: after one has not fitted, its likes are not tried."""
    tried = []

    def counted(work):
        def call(*wanted):
            tried.append(work.__name__)
            return work(*wanted)

        return call

    monkeypatch.setattr(Board, "find", counted(Board.find))
    monkeypatch.setattr(fleet_index, "acceptable_shapes", counted(acceptable_shapes))
    jobs = [job(f"j{number}", gpus=4) for number in range(10_000)]
    plan = plan_of(make_fleet("r: n0=4 n1=4 n2=4").held(n2=[0]).with_jobs(*jobs))
    assert [one.job_id for one in plan.placements] == ["j0", "j1"]
    assert len(plan.waits) == 9998
    assert tried.count("acceptable_shapes") == 1
    assert tried.count("find") <= 6, "twice until one does not fit, by the round for its class, and to say why"


def test_cycle_places_no_more_than_its_share_and_says_so():
    plan = plan_of(make_fleet("r: n0=8").with_jobs(*(job(f"j{number}") for number in range(5))), placements_max=3)
    assert [one.job_id for one in plan.placements] == ["j0", "j1", "j2"]
    assert plan.waiting("j4").reason is WaitReasonCode.BACKOFF
