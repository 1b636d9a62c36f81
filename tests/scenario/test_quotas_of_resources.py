"""Quotas of CPUs, memory and extras: the rules of GPUs hold for each resource, and messages name the resource."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, dict-item, index"

import pytest

from phalanx.core.resources import Resources
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.units import GIB
from phalanx.core.work.quotas.quota_tree import QuotaTree
from tests.builders import T, job, lined, make_fleet, plan_of, queue
from tests.cell import Cell

FLEET = make_fleet("n0=8 n1=8", cpus=32, memory_gib=256).with_licences(matlab=8)
CPU_QUOTA = [queue("a", other_quotas=(("cpus", 16),), other_borrow=(("cpus", 0),)), queue("b")]

# queues, jobs (name, queue, asked) -> the plan
PLANS = [
    (CPU_QUOTA, [("x", "a", {"cpus": 16}), ("y", "a", {"cpus": 1})], "x n0:0 | y quota"),
    (CPU_QUOTA, [("x", "a", {"cpus": 16}), ("y", "b", {"cpus": 16})], "x n0:0 | y n0:1"),
    (CPU_QUOTA, [("x", "a", {"cpus": 8, "gpus": "2x1"}), ("y", "a", {"cpus": 1})], "y n0:0 | x quota"),
    (CPU_QUOTA, [("x", "a", {"cpus": 16, "gpus": 0}), ("y", "a", {"cpus": 1, "gpus": 0})], "x n0: | y quota"),
    (
        [queue("a", other_per_user=(("memory", 64 * GIB),))],
        [("x", "a", {"memory_gib": 64}), ("y", "a", {"memory_gib": 1}), ("z", "a", {})],
        "x n0:0 | z n0:1 | y user_limit",
    ),
    (
        [queue("a", other_quotas=(("matlab", 2),), other_borrow=(("matlab", 1),)), queue("b")],
        [
            ("x", "a", {"licences": "matlab:2"}),
            ("y", "a", {"licences": "matlab:1"}),
            ("z", "a", {"licences": "matlab:1"}),
        ],
        "x n0:0 | y n0:1 | z quota",
    ),
    # What b keeps of its CPUs nobody else gets: of 64, b has 48 and lends none.
    (
        [queue("a"), queue("b", other_quotas=(("cpus", 48),), other_lend=(("cpus", 0),))],
        [("x", "a", {"cpus": 16}), ("y", "a", {"cpus": 16}), ("z", "b", {"cpus": 32})],
        "x n0:0 | z n1:0 | y quota",
    ),
]


@pytest.mark.parametrize(("queues", "jobs", "drawing"), PLANS)
def test_each_resource_has_its_own_quota(queues, jobs, drawing):
    waiting = [job(name, queue=where, **{"gpus": 1, **asked}) for name, where, asked in jobs]
    assert lined(plan_of(FLEET.with_queues(*queues).with_jobs(*waiting))) == drawing


def test_the_reason_names_the_resource_and_the_amounts():
    fleet = FLEET.with_queues(*CPU_QUOTA).runs(job("x", queue="a", cpus=12), "n0:0")
    wait = plan_of(fleet.with_jobs(job("y", queue="a", cpus=8))).waiting("y")
    assert wait.detail == "queue a uses 12 of at most 16 CPUs; the job needs 8"
    memory = [queue("a", other_per_user=(("memory", 64 * GIB),))]
    fleet = FLEET.with_queues(*memory).runs(job("x", queue="a", memory_gib=40), "n0:0")
    wait = plan_of(fleet.with_jobs(job("y", queue="a", memory_gib=32))).waiting("y")
    assert wait.detail == "user ada uses 40 GiB of at most 64 GiB memory per user in queue a"


# queues, the job in queue a -> limit and sentence
NEVER = [
    (CPU_QUOTA, {"cpus": 17}, "borrow", "17 CPUs asked; queue a can get at most 16 (quota 16, borrow 0)"),
    (CPU_QUOTA, {"cpus": 9, "gpus": "2x1"}, "borrow", "18 CPUs asked; queue a can get at most 16 (quota 16, borrow 0)"),
    # Not written with its nodes, but no node has 12 GPUs.
    (CPU_QUOTA, {"cpus": 9, "gpus": 12}, "borrow", "18 CPUs asked; queue a can get at most 16 (quota 16, borrow 0)"),
    (
        [queue("a", other_per_user=(("memory", 64 * GIB),))],
        {"memory_gib": 65},
        "users.memory",
        "65 GiB memory asked; queue a allows 64 GiB a user",
    ),
    (
        [queue("a"), queue("b", other_quotas=(("matlab", 6),), other_lend=(("matlab", 1),))],
        {"licences": "matlab:4"},
        "lend",
        "4 matlab asked; queue a can get at most 3: of 8 matlab, queues keep 5 that they do not lend",
    ),
    (CPU_QUOTA, {"cpus": 16}, "", ""),
]


@pytest.mark.parametrize(("queues", "asked", "limit", "detail"), NEVER)
def test_a_job_that_a_quota_can_never_admit_is_named_with_the_arithmetic(queues, asked, limit, detail):
    snapshot = FLEET.with_queues(*queues).with_jobs()
    found = FeasibilityChecker(snapshot, T).check_job(job("x", queue="a", **{"gpus": 1, **asked}))
    assert (found.limit, found.detail) == (limit, detail)


def test_the_owner_of_a_quota_of_cpus_takes_them_back_from_who_borrowed_them():
    queues = [queue("a", quota_gpus=8, other_quotas=(("cpus", 32),)), queue("b")]
    fleet = FLEET.with_queues(*queues).runs(job("low", queue="b", cpus=32), "n0:0")
    fleet = fleet.runs(job("small", queue="b", cpus=16), "n1:0")
    drawing = lined(plan_of(fleet.with_jobs(job("own", queue="a", cpus=32))))
    assert drawing in ("low stops for own | own claimed", "low stops for own | low priority | own claimed")


def test_a_class_of_other_cpus_is_not_held_back_by_one_that_was_refused():
    waiting = [job("x", queue="a", cpus=17, gpus=1), job("y", queue="a", cpus=2, gpus=1)]
    queues = [queue("a", other_quotas=(("cpus", 16),), other_borrow=(("cpus", 0),)), queue("b")]
    assert lined(plan_of(FLEET.with_queues(*queues).with_jobs(*waiting)), "y") == "y n0:0"


def test_what_ends_is_written_for_the_queue_and_those_above_it():
    cell = Cell(FLEET.with_queues(queue("top"), queue("a", parent="top")))
    cell.submit(job("x", queue="a", cpus=4, memory_gib=2, licences="matlab:1"))
    cell.plan()
    cell.go_on(100.0)
    cell.end("x")
    spent = {"cpus": 400.0, "matlab": 100.0, "memory": 200.0 * GIB}
    assert dict(cell.world.queue_usage["a"].other_s) == spent
    assert dict(cell.world.queue_usage["top"].other_s) == spent


def test_a_tree_that_limits_gpus_alone_counts_nothing_else():
    tree = QuotaTree([queue("a", quota_gpus=4), queue("b")], Resources(16_000, 64, 1 << 40))
    assert tree.others == ()
    assert tree.check_admission(tree.job_node("a"), "u", Resources(4000, 10_000)) is None
