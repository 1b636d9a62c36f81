"""The queue tree in small drawings: rights, borrowing, lending, reclaiming, users, budgets and the fair share."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import math
from dataclasses import replace

import pytest

from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.resources import NO_RESOURCES, Resources
from phalanx.core.scheduling.quota import FairShareTree
from phalanx.core.state.plan import Placement
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.queue import (
    FAIR_HALF_LIFE_S,
    Queue,
    QueueUsage,
    add_usage,
)
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import AttemptState, JobState, WaitReasonCode
from tests.builders import T, allocation, job, make_node, placed

HOUR_S = 3600.0
GPU = Resources(1000)
MILLI = 1000
DAY_S = 24 * HOUR_S


def make_tree(*queues, fleet=64, spent=(), now_s=0.0):
    return FairShareTree(queues, fleet * GPU, spent, now_s)


def queue(name, **facts):
    return Queue(id=name, **facts)


def hold(tree, name, gpus, user="u"):
    assert tree.check_admission(tree.job_node(name), user, gpus * GPU) is None
    tree.add_running(tree.job_node(name), user, gpus * GPU)


def room(tree, name):
    return gpus_of(tree.available_milli(tree.job_node(name)))


def test_one_queue_without_quota_may_hold_the_whole_fleet():
    tree = make_tree(queue("default"))
    assert room(tree, "default") == 64
    assert tree.check_admission(tree.job_node("default"), "u", 65 * GPU).describe() == (
        "all quotas are in use and nothing is left to borrow for 65 GPUs"
    )


def test_where_no_queue_has_a_quota_none_borrows():
    tree = make_tree(queue("red"), queue("blue", borrow_gpus=60))
    hold(tree, "red", 48)
    assert tree.borrowed_past_right(tree.job_node("red")) == 0
    other = make_tree(queue("red"), queue("blue", quota_gpus=16))
    hold(other, "red", 48)
    assert other.borrowed_past_right(other.job_node("red")) == 48 * MILLI


def test_idle_quota_is_lent_and_the_lender_gets_it_back():
    tree = make_tree(queue("red", quota_gpus=32), queue("blue", quota_gpus=32))
    hold(tree, "red", 48)
    assert tree.borrowed_past_right(tree.job_node("red")) == 16 * MILLI
    assert room(tree, "blue") == 16
    assert tree.check_admission(tree.job_node("blue"), "u", 32 * GPU).reason is WaitReasonCode.QUOTA
    assert tree.is_entitled(tree.job_node("blue"), 32 * GPU)
    assert tree.is_reclaimable(tree.job_node("red"), tree.job_node("blue"), 32 * GPU)
    assert not tree.is_reclaimable(tree.job_node("blue"), tree.job_node("red"), 8 * GPU)


def test_nobody_borrows_more_than_it_may_nor_what_is_not_lent():
    tree = make_tree(queue("red", quota_gpus=32, borrow_gpus=8), queue("blue", quota_gpus=32, lend_gpus=4))
    assert room(tree, "red") == 36
    tree = make_tree(queue("red", quota_gpus=32, borrow_gpus=8), queue("blue", quota_gpus=32))
    assert room(tree, "red") == 40
    hold(tree, "red", 40)
    refusal = tree.check_admission(tree.job_node("red"), "u", 1 * GPU)
    assert refusal.describe() == "queue red uses 40 of at most 40 GPUs; the job needs 1"
    assert tree.check_admission(tree.job_node("red"), "u", 41 * GPU).describe() == (
        "the job needs 41 GPUs; queue red can use at most 40, so it can never start there"
    )


def test_what_a_child_keeps_is_not_taken_by_its_siblings_so_that_the_parent_stays_within_its_limit():
    tree = make_tree(
        queue("top", quota_gpus=16, borrow_gpus=0),
        queue("idle", parent="top", quota_gpus=8, lend_gpus=0),
        queue("busy", parent="top"),
    )
    assert room(tree, "busy") == 8
    hold(tree, "busy", 8)
    assert tree.check_admission(tree.job_node("busy"), "u", 1 * GPU).describe() == (
        "queue top uses 16 of at most 16 GPUs; the job needs 1"
    )
    hold(tree, "idle", 8)
    assert tree.held[tree.subtree_node("top")] == 16 * MILLI


def test_a_queue_without_quota_lives_on_what_is_left_over_or_idle():
    tree = make_tree(queue("red", quota_gpus=48, lend_gpus=0), queue("spare"), fleet=64)
    assert room(tree, "spare") == 16
    hold(tree, "spare", 16)
    assert tree.borrowed_past_right(tree.job_node("spare")) == 16 * MILLI
    assert room(tree, "red") == 48


def test_children_share_their_parents_right_and_the_rest_is_its_own():
    tree = make_tree(
        queue("research", quota_gpus=32, borrow_gpus=0),
        queue("nlp", parent="research", quota_gpus=16),
        queue("vision", parent="research", quota_gpus=8),
        queue("prod", quota_gpus=32),
    )
    hold(tree, "research", 24)
    assert tree.borrowed_past_right(tree.job_node("research")) == 16 * MILLI
    assert room(tree, "nlp") == 8
    assert tree.is_reclaimable(tree.job_node("research"), tree.job_node("nlp"), 16 * GPU)
    hold(tree, "vision", 8)
    assert room(tree, "nlp") == 0
    assert tree.check_admission(tree.job_node("nlp"), "u", 16 * GPU).queue == "research"
    assert not tree.is_reclaimable(tree.job_node("vision"), tree.job_node("nlp"), 16 * GPU)


def test_a_queue_without_quota_reclaims_by_the_right_of_the_one_above():
    tree = make_tree(queue("research", quota_gpus=32), queue("nlp", parent="research"), queue("prod", quota_gpus=32))
    hold(tree, "prod", 64)
    assert tree.is_entitled(tree.job_node("nlp"), 32 * GPU)
    assert not tree.is_entitled(tree.job_node("nlp"), 33 * GPU)
    assert tree.is_reclaimable(tree.job_node("prod"), tree.job_node("nlp"), 32 * GPU)


def test_within_its_parents_right_a_borrower_is_no_outsiders_victim():
    tree = make_tree(
        queue("research", quota_gpus=32),
        queue("nlp", parent="research", quota_gpus=16),
        queue("vision", parent="research", quota_gpus=16),
        queue("prod", quota_gpus=32),
    )
    hold(tree, "nlp", 32)
    assert tree.borrowed_past_right(tree.job_node("nlp")) == 16 * MILLI
    assert not tree.is_reclaimable(tree.job_node("nlp"), tree.job_node("prod"), 32 * GPU)
    assert tree.is_reclaimable(tree.job_node("nlp"), tree.job_node("vision"), 16 * GPU)


def test_quotas_past_the_fleet_stand_and_are_not_scaled():
    tree = make_tree(queue("red", quota_gpus=64), queue("blue", quota_gpus=64), fleet=64)
    hold(tree, "red", 64)
    assert room(tree, "blue") == 64
    assert not tree.is_reclaimable(tree.job_node("red"), tree.job_node("blue"), 64 * GPU)


def test_a_user_is_limited_in_a_queue_and_all_below_it():
    tree = make_tree(queue("top", gpus_per_user=8, jobs_per_user=2), queue("low", parent="top"))
    hold(tree, "low", 4, "ann")
    assert (
        tree.check_admission(tree.job_node("top"), "ann", 5 * GPU).describe()
        == "user ann uses 4 of at most 8 GPUs per user in queue top"
    )
    hold(tree, "top", 1, "ann")
    refusal = tree.check_admission(tree.job_node("low"), "ann", 1 * GPU)
    assert (refusal.reason, refusal.describe()) == (
        WaitReasonCode.USER_LIMIT,
        "user ann uses 2 of at most 2 running jobs per user in queue top",
    )
    assert tree.check_admission(tree.job_node("low"), "ben", 8 * GPU) is None
    tree.remove_running(tree.job_node("low"), "ann", 4 * GPU)
    assert tree.check_admission(tree.job_node("top"), "ann", 7 * GPU) is None


def test_growing_takes_gpus_but_is_no_further_job():
    tree = make_tree(queue("q", jobs_per_user=1))
    hold(tree, "q", 4)
    tree.add_running(tree.job_node("q"), "u", 4 * GPU, jobs=0)
    tree.remove_running(tree.job_node("q"), "u", 8 * GPU)
    assert tree.check_admission(tree.job_node("q"), "u", 64 * GPU) is None


def test_a_spent_budget_refuses_starts_until_the_next_period():
    tree = make_tree(queue("top", budget_gpu_h=100.0, budget_period_s=DAY_S), queue("low", parent="top"))
    number = tree.job_node("low")
    tree.change_rate(number, 10 * MILLI, 0.0)
    tree.advance(9.9 * HOUR_S)
    assert tree.check_admission(number, "u", 1 * GPU) is None
    assert tree.next_change_s(tree.now_s) == math.inf
    tree.advance(10 * HOUR_S)
    refusal = tree.check_admission(number, "u", 1 * GPU)
    assert (refusal.reason, refusal.queue, refusal.until_s) == (WaitReasonCode.BUDGET, "top", DAY_S)
    assert tree.next_change_s(tree.now_s) == DAY_S
    assert tree.check_admission(number, "u", NO_RESOURCES) is None
    tree.advance(25 * HOUR_S)
    assert tree.check_admission(number, "u", 1 * GPU) is None
    assert tree.budget_left_gpu_h("top") == pytest.approx(90.0)  # what runs goes on, on the new period's account


def test_the_fair_share_prefers_who_used_less_for_his_weight():
    tree = make_tree(queue("heavy", weight=3.0), queue("light"), queue("new"))
    for name in ("heavy", "light"):
        tree.change_rate(tree.job_node(name), 8 * MILLI, 0.0)
    tree.advance(DAY_S)
    factor = {name: tree.fair_share_factor(tree.job_node(name)) for name in ("heavy", "light", "new")}
    assert factor["new"] == 1.0
    assert 1.0 > factor["heavy"] > factor["light"] > 0.0
    # s = 3/4 and 1/4, U = 1/2: R = U (1 - s) / s.
    assert factor["heavy"] == pytest.approx(2 ** (-0.5 / 3))
    assert factor["light"] == pytest.approx(2 ** (-0.5 * 3))


def test_depth_and_idle_siblings_cost_nothing():
    tree = make_tree(
        queue("a"),
        queue("a1", parent="a"),
        queue("a11", parent="a1"),
        queue("a12", parent="a1"),
        queue("b"),
    )
    tree.change_rate(tree.job_node("a11"), 8 * MILLI, 0.0)
    tree.change_rate(tree.job_node("b"), 8 * MILLI, 0.0)
    tree.advance(DAY_S)
    assert tree.fair_share_factor(tree.job_node("a11")) == tree.fair_share_factor(tree.job_node("b"))
    assert tree.fair_share_factor(tree.job_node("a12")) == tree.fair_share_factor(tree.job_node("b"))


def test_a_queue_alone_keeps_one():
    tree = make_tree(queue("default"))
    tree.change_rate(tree.job_node("default"), 64 * MILLI, 0.0)
    tree.advance(DAY_S)
    assert tree.fair_share_factor(tree.job_node("default")) == 1.0


def test_use_decays_by_half_in_a_half_life():
    tree = make_tree(queue("q"))
    tree.change_rate(tree.job_node("q"), 1 * MILLI, 0.0)
    tree.change_rate(tree.job_node("q"), -1 * MILLI, 100.0)
    before = tree.usage("q").decayed_gpu_s
    tree.advance(100.0 + FAIR_HALF_LIFE_S)
    assert tree.usage("q").decayed_gpu_s == pytest.approx(before / 2)
    assert before == pytest.approx(100.0, rel=1e-3)


def test_the_stored_books_agree_with_the_live_ones_after_a_restart():
    top = queue("top", budget_gpu_h=1e6, fair_users=True, half_life_s=2 * FAIR_HALF_LIFE_S)
    queues = {"top": top, "low": queue("low", parent="top")}
    live = make_tree(*queues.values())
    spent = {}
    jobs = [
        ("low", 4, 0.0, 5e5, 1.0, "ann"),
        ("top", 2, 1e5, 9e5, 0.25, "ann"),
        ("low", 8, 2e5, 2.9e6, 0.5, "bob"),
        ("low", 1, 2.7e6, 3.1e6, 1.0, "ann"),
    ]
    moments = sorted([(start, 1, job) for job in jobs for start in [job[2]]] + [(job[3], -1, job) for job in jobs])
    for at_s, sign, (name, gpus, from_s, to_s, speed, user) in moments:
        live.change_rate(live.job_node(name), sign * gpus * MILLI, at_s, speed=speed, user=user)
        if sign < 0:
            ended = add_usage(queues, spent, name, gpus * GPU, from_s, to_s, speed, 0.0, user)
            spent |= {record.queue: record for record in ended}
    again = make_tree(*queues.values(), spent=spent.values(), now_s=3.2e6)
    live.advance(3.2e6)
    for name in queues:
        assert again.usage(name).decayed_gpu_s == pytest.approx(live.usage(name).decayed_gpu_s)
        assert again.usage(name).gpu_s == pytest.approx(live.usage(name).gpu_s)
        for user in ("", "ann", "bob", "new"):
            assert again.fair_share_factor(again.job_node(name), user) == pytest.approx(
                live.fair_share_factor(live.job_node(name), user)
            )
        assert again.user_shares(name) == {user: pytest.approx(share) for user, share in live.user_shares(name).items()}
    assert set(again.user_shares("low")) == {"ann", "bob"}


def test_a_user_who_waits_counts_without_use_and_one_alone_keeps_one():
    tree = make_tree(queue("q", fair_users=True))
    number = tree.job_node("q")
    tree.change_rate(number, 4 * MILLI, 0.0, user="ann")
    tree.advance(DAY_S)
    assert tree.fair_share_factor(number, "ann") == 1.0
    tree.set_waiting([(number, "bob")])
    assert tree.fair_share_factor(number, "ann") == pytest.approx(0.5)
    assert tree.fair_share_factor(number, "bob") == 1.0


def test_the_half_life_of_the_topmost_queue_holds_below_it():
    tree = make_tree(queue("top", half_life_s=DAY_S), queue("low", parent="top"), queue("other"))
    for name in ("low", "other"):
        tree.change_rate(tree.job_node(name), 1 * MILLI, 0.0)
        tree.change_rate(tree.job_node(name), -1 * MILLI, 100.0)
    before = {name: tree.usage(name).decayed_gpu_s for name in ("top", "low", "other")}
    tree.advance(100.0 + DAY_S)
    for name in ("top", "low"):
        assert tree.usage(name).decayed_gpu_s == pytest.approx(before[name] / 2)
    assert tree.usage("other").decayed_gpu_s == pytest.approx(before["other"] * 2 ** (-1 / 7))


def test_one_end_by_a_clock_that_was_ahead_does_not_stop_the_books():
    """Found by reading: until the true time came up with it, whatever ended after was counted as nothing."""
    queues = {"q": queue("q", budget_gpu_h=10.0, budget_period_s=DAY_S)}
    (ahead,) = add_usage(queues, {}, "q", 4 * GPU, T + 9 * DAY_S, T + 9 * DAY_S + 60.0)
    (true,) = add_usage(queues, {"q": ahead}, "q", 4 * GPU, T, T + 60.0)
    assert (true.at_s, true.gpu_s) == (T + 60.0, 240.0)
    assert true.decayed_gpu_s == pytest.approx(480.0, rel=1e-3)
    (little,) = add_usage(queues, {"q": true}, "q", 4 * GPU, T, T + 30.0)
    assert (little.at_s, little.gpu_s) == (T + 60.0, 360.0), "two heads' clocks, which agree but for seconds"


def test_what_runs_when_the_head_starts_is_charged_from_its_start():
    live, late = make_tree(queue("q")), make_tree(queue("q"), now_s=3e6)
    live.change_rate(live.job_node("q"), 4 * MILLI, 2e6)
    live.advance(3e6)
    late.change_rate(late.job_node("q"), 4 * MILLI, 3e6, since_s=2e6)
    assert late.usage("q").decayed_gpu_s == pytest.approx(live.usage("q").decayed_gpu_s)
    assert late.usage("q").gpu_s == pytest.approx(live.usage("q").gpu_s)


def test_a_stored_period_that_is_over_counts_no_more():
    record = QueueUsage(queue="q", at_s=10.0, period_s=0.0, gpu_s=50 * HOUR_S, decayed_gpu_s=1.0)
    facts = {"budget_gpu_h": 50.0, "budget_period_s": DAY_S}
    assert (
        make_tree(queue("q", **facts), spent=[record], now_s=20.0).check_admission(1, "u", 1 * GPU).reason
        is WaitReasonCode.BUDGET
    )
    assert make_tree(queue("q", **facts), spent=[record], now_s=DAY_S + 1).check_admission(1, "u", 1 * GPU) is None


def test_a_placement_past_the_quota_is_rejected_at_the_commit_and_use_is_written_at_the_end():
    world = World()
    change = WorldChange(world=world)
    runs, waits = placed(job("1", gpus=3, queue="red"), "n0:0,1,2", now_s=T), job("2", seq=2, gpus=2, queue="red")
    for record in (make_node("n0", 8), queue("red", quota_gpus=4, borrow_gpus=0), runs.job, runs.attempt, waits):
        change.put(record)
    placement = Placement(job_id=waits.id, allocation=allocation("n0:3,4"))
    assert rejection_reason(world, placement) == "queue red uses 3 of at most 4 GPUs; the job needs 2"
    assert world.holdings().held[world.holdings().job_node("red")] == 3000
    change.put(replace(runs.job, state=JobState.SUCCEEDED))
    change.put(replace(runs.attempt, state=AttemptState.ENDED, ended_s=runs.attempt.placed_s + 100.0))
    assert rejection_reason(world, placement) == ""
    assert world.queue_usage["red"].gpu_s == 300.0
