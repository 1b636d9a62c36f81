"""Jobs with alternatives of different sizes, such as `h100:8|a100:16`: which one starts, with how many tasks, what quotas count, what users read."""

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.scheduling.feasibility.answer import Outlook
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.snapshot import Usage
from phalanx.core.work.job_file.launchers import alternatives_notes, known_task_count
from phalanx.core.work.job_file.plan_key import with_gpus_for_plan
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.spec import LaunchMode
from phalanx.core.work.states import WaitReasonCode
from tests.builders import T, make_fleet, queue, spec
from tests.builders import job as a_job
from tests.cell import Cell

FLEET = "r: fast=h100:8 s0=a100:8 s1=a100:8"
EITHER = "h100:8|a100:16"
BY_SPEED = (("h100", 1.5), ("a100", 1.0))  # per device: 16 devices of a100 are faster than 8 of h100


def job(name, **fields):
    return a_job(name, **{"saves_on_stop": True, **fields})


def cell_with(*jobs, fleet=FLEET, queues=()):
    cell = Cell(make_fleet(fleet).with_queues(*queues) if queues else make_fleet(fleet))
    cell.submit(*jobs)
    cell.go_on(60.0)
    return cell


def held(cell, name):
    """Nodes, devices, and tasks of a running job as `2x8, 16 tasks`; empty if it waits."""
    attempt = cell.world.attempts.get(name)
    if attempt is None:
        return ""
    grants = attempt.allocation.grants
    (each,) = {len(grant.devices) for grant in grants}
    return f"{len(grants)}x{each}, {attempt.allocation.world_size} tasks"


# what runs already, the request -> what it holds
STARTS = [
    ("the first if it is free", (), {"gpus": EITHER}, "1x8, 8 tasks"),
    ("else the next", ("h100:1",), {"gpus": EITHER}, "2x8, 16 tasks"),
    ("none if neither is", ("h100:1", "a100:1"), {"gpus": EITHER}, ""),
    ("in the order written", (), {"gpus": "a100:16|h100:8"}, "2x8, 16 tasks"),
    ("the larger number of one model", (), {"gpus": "a100:16|a100:8"}, "2x8, 16 tasks"),
    ("the smaller number if the larger is not free", ("a100:1",), {"gpus": "a100:16|a100:8"}, "1x8, 8 tasks"),
    ("one task a node for a launcher", ("h100:1",), {"gpus": EITHER, "launch": LaunchMode.PER_NODE}, "2x8, 2 tasks"),
    (
        "as many tasks a node as were asked for",
        ("h100:1",),
        {"gpus": EITHER, "launch": LaunchMode.FIXED, "tasks_per_node": 2},
        "2x8, 4 tasks",
    ),
    ("the faster one by speed x devices", (), {"gpus": EITHER, "speeds": BY_SPEED}, "2x8, 16 tasks"),
    ("as wide as an elastic alternative can be", ("h100:1",), {"gpus": "1..2xh100:8|1..3xa100:8"}, "2x8, 16 tasks"),
    ("a share or a whole device", ("h100:8",), {"gpus": "h100:1/2|a100:1"}, "1x1, 1 tasks"),
]


@pytest.mark.parametrize(("busy", "fields", "want"), [row[1:] for row in STARTS], ids=[row[0] for row in STARTS])
def test_which_alternative_starts(busy, fields, want):
    cell = Cell(make_fleet(FLEET))
    cell.submit(*[job(f"busy{number}", gpus=gpus) for number, gpus in enumerate(busy)])
    cell.go_on(60.0)
    cell.submit(job("a", **fields))
    cell.go_on(60.0)
    assert held(cell, "a") == want


def test_a_share_is_an_alternative_to_a_whole_device():
    cell = cell_with(job("a", gpus="a100:1/2|h100:1"))
    (grant,) = cell.world.attempts["a"].allocation.grants
    assert grant.share is not None
    assert (grant.node_id, grant.milli) == ("s0", 500)


# the queue's limit -> what the job holds: 16 GPUs are preferred, and 8 accepted
LIMITS = [("both fit", 16, "2x8, 16 tasks"), ("only the smaller one", 15, "1x8, 8 tasks"), ("neither", 7, "")]


@pytest.mark.parametrize(("limit", "want"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_quotas_count_the_alternative_that_would_be_held(limit, want):
    cell = cell_with(job("a", gpus="a100:16|h100:8", queue="nlp"), queues=(queue("nlp", gpus_per_user=limit),))
    assert held(cell, "a") == want


def test_a_queue_is_charged_for_what_is_held():
    cell = cell_with(job("a", gpus="a100:16|h100:8", queue="nlp"), queues=(queue("nlp", gpus_per_user=17),))
    for name in "bc":
        cell.submit(job(name, gpus="h100:1", queue="nlp"))
        cell.go_on(60.0)
    assert [held(cell, name) for name in "abc"] == ["2x8, 16 tasks", "1x1, 1 tasks", ""]


def test_no_job_is_stopped_for_an_alternative_that_its_quota_refuses():
    cell = Cell(make_fleet(FLEET).with_queues(queue("nlp", gpus_per_user=8)))
    for number, gpus in enumerate(("a100:8", "a100:8", "h100:8")):
        cell.submit(job(f"low{number}", gpus=gpus, queue="nlp", user=f"user{number}"))
    cell.go_on(7200.0)
    cell.submit(job("a", gpus="a100:16|h100:8", queue="nlp", priority=10))
    cell.go_on(60.0)
    assert held(cell, "a") == "1x8, 8 tasks"
    assert [cell.runs(f"low{number}") for number in range(3)] == [True, True, False]


def test_a_job_that_lost_its_place_may_continue_on_the_other_alternative():
    cell = cell_with(job("a", gpus=EITHER))
    cell.fails("a")
    cell.submit(job("busy", gpus="h100:1", priority=1))
    cell.go_on(60.0)
    assert held(cell, "a") == "2x8, 16 tasks"


def test_the_reason_of_a_wait_names_each_alternative():
    cell = cell_with(job("b", gpus="h100:1"), job("c", gpus="a100:1"), job("a", gpus=EITHER))
    wait = cell.scheduler.wait_reason(cell.world.jobs["a"])
    assert wait is not None
    assert wait.detail == (
        "needs one of its alternatives. h100: needs 1 x 8 GPUs; 7 free in total, at most 7 on one node; "
        "a100: needs 2 x 8 GPUs; 15 free in total, at most 8 on one node"
    )


# ---- never -----------------------------------------------------------------------------------------------------------

# fleet, queues, request -> outlook and what its sentence contains
OUTLOOKS = [
    ("one alternative is enough", "r: n0=h100:8", (), EITHER, Outlook.POSSIBLE, ()),
    (
        "none fits the fleet",
        "r: n0=h100:4 n1=a100:8",
        (),
        EITHER,
        Outlook.NEVER,
        ("8 GPUs can never fit", "16 GPUs can never fit"),
    ),
    (
        "the quota allows one, but the fleet only holds the other",
        "r: s0=a100:8 s1=a100:8",
        (queue("nlp", gpus_per_user=8),),
        EITHER,
        Outlook.NEVER,
        ("no node has a GPU of model h100", "16 GPUs asked; queue nlp allows 8 a user"),
    ),
    ("the quota allows the one that fits", FLEET, (queue("nlp", gpus_per_user=8),), EITHER, Outlook.POSSIBLE, ()),
]


@pytest.mark.parametrize(
    ("fleet", "queues", "gpus", "outlook", "texts"), [row[1:] for row in OUTLOOKS], ids=[row[0] for row in OUTLOOKS]
)
def test_whether_a_job_with_alternatives_can_ever_start(fleet, queues, gpus, outlook, texts):
    cluster = make_fleet(fleet).with_queues(*(queues or (queue("nlp"),)))
    found = FeasibilityChecker(cluster.with_jobs(), cluster.now_s).check_job(job("x", gpus=gpus, queue="nlp"))
    assert found.outlook is outlook
    assert all(text in found.detail for text in texts), found.detail


# ---- what users read and may combine ---------------------------------------------------------------------------------


def test_the_notes_before_the_start_have_the_shape_and_the_tasks_of_each():
    role = spec(gpus=EITHER).role
    assert alternatives_notes(role, [[8], [8, 8]]) == [
        "one of h100: 1 node x 8 = 8 GPUs; a100: 2 nodes x 8 = 16 GPUs",
        "8 tasks on h100 or 16 tasks on a100, one per GPU",
    ]
    assert alternatives_notes(role, [[8], None])[0] == (
        "one of h100: 1 node x 8 = 8 GPUs; 16 A100 GPUs, on as few nodes as possible (these nodes cannot hold it)"
    )
    assert alternatives_notes(role, [[], []]) == [
        "one of 8 H100 GPUs, on as few nodes as possible; 16 A100 GPUs, on as few nodes as possible",
        "8 tasks on h100 or 16 tasks on a100, one per GPU",
    ]


def test_the_number_of_tasks_is_known_only_if_it_is_the_same_for_all():
    assert known_task_count(spec(gpus=EITHER).role) is None
    assert known_task_count(spec(gpus="2xh100:8|4xa100:4").role) == 16


def test_a_layout_holds_for_one_number_of_gpus():
    assert str(with_gpus_for_plan(spec(gpus="h100:8|2xa100:4").role, "dp=8").gpus) == "h100:8|2xa100:4"
    with pytest.raises(BadRequest, match="is for 8 ranks, but the job requests 16 GPUs"):
        with_gpus_for_plan(spec(gpus=EITHER).role, "dp=8")


def test_within_node_fixes_each_alternative_to_one_node():
    found = spec_from_mapping({"run": "true", "gpus": "h100:8|a100:4", "within": "node"}, workdir="/w")
    assert str(found.role.gpus) == "1xh100:8|1xa100:4"
    with pytest.raises(BadRequest, match="within: node needs all GPUs on one node"):
        spec_from_mapping({"run": "true", "gpus": "h100:8|2xa100:8", "within": "node"}, workdir="/w")


def test_slices_must_divide_the_nodes_of_each_alternative():
    keys = {"run": "true", "slice": 2, "slice_within": "rack"}
    assert spec_from_mapping({**keys, "gpus": "2xh100:8|4xa100:8"}, workdir="/w").topology.slice_nodes == 2
    with pytest.raises(BadRequest, match="3 nodes do not divide into slices of 2"):
        spec_from_mapping({**keys, "gpus": "2xh100:8|3xa100:8"}, workdir="/w")


LARGER_IS_FASTER = {"gpus": "a100:4|h100:8", "speeds": (("a100", 0.4), ("h100", 1.0))}
TO_4 = queue("default", quota_gpus=4, borrow_gpus=0)


@pytest.mark.parametrize("policy", ["default", "makespan"])
def test_running_job_does_not_move_to_an_alternative_that_its_quota_refuses(policy):
    cell = Cell(make_fleet("r: n0=a100:4 n1=h100:8").with_queues(TO_4), name=policy)
    cell.submit(job("a", **LARGER_IS_FASTER), lasts_s=1e6)
    for _ in range(40):
        cell.go_on(60.0)
    assert held(cell, "a") == "1x4, 4 tasks"
    assert sum(len(plan.stops) for plan in cell.plans) == 0


@pytest.mark.parametrize("policy", ["default", "makespan"])
def test_job_starts_with_the_alternative_that_its_quota_admits_though_another_is_faster(policy):
    cell = Cell(make_fleet("r: n0=h100:4 n1=a100:8").with_queues(TO_4), name=policy)
    cell.submit(job("a", gpus="a100:8|h100:4"), lasts_s=1e6)
    cell.go_on(600.0)
    assert held(cell, "a") == "1x4, 4 tasks"


def test_two_jobs_that_grow_by_moving_are_weighed_against_one_quota():
    cell = Cell(
        make_fleet("r: n0=a100:4 n1=a100:4 n2=h100:8 n3=h100:8").with_queues(
            queue("default", quota_gpus=12, borrow_gpus=0)
        )
    )
    cell.submit(job("a", **LARGER_IS_FASTER), job("b", **LARGER_IS_FASTER), lasts_s=1e6)
    for _ in range(60):
        cell.go_on(60.0)
    assert sorted(held(cell, name) for name in "ab") == ["1x4, 4 tasks", "1x8, 8 tasks"]


def test_a_job_is_not_called_impossible_for_an_alternative_that_alone_exceeds_a_limit():
    narrow = queue("default", other_quotas=(("cpus", 16),), other_borrow=(("cpus", 0),))
    waiting = job("a", gpus="1x8|4x1", cpus=8)
    free = make_fleet("r: n0=8 n1=8 n2=8 n3=8").with_queues(narrow).with_jobs(waiting)
    busy = replace(free, usage={node: Usage(devices=frozenset(range(8))) for node in free.nodes})
    scheduler = Scheduler()
    scheduler.plan(replace(busy, jobs={waiting.id: busy.pending[0]}), T)
    wait = scheduler.wait_reason(waiting)
    assert wait is not None
    assert wait.reason is WaitReasonCode.RESOURCES
