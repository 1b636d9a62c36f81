"""Any tree of queues, any sequence of starts and ends: quotas hold at every instant, and what is one's right can always be had."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.ids import QueueId
from phalanx.core.resources import Resources
from phalanx.core.scheduling.quota import FairShareTree
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.quota_tree import FLEET, QuotaTree
from phalanx.core.work.states import AttemptState
from tests.builders import job, make_node, placed
from tests.effort import examples

SMALL = st.integers(0, 8)


@st.composite
def trees(draw):
    """Up to eight queues in any shape; quotas never exceed those above them, and the top ones may exceed the fleet."""
    count = draw(st.integers(1, 8))
    parents = [None] + [draw(st.one_of(st.none(), st.integers(0, child - 1))) for child in range(1, count)]
    queues = [
        Queue(
            id=f"q{number}",
            parent=None if parents[number] is None else f"q{parents[number]}",
            quota_gpus=draw(st.one_of(st.none(), SMALL)),
            borrow_gpus=draw(st.one_of(st.none(), SMALL)),
            lend_gpus=draw(st.one_of(st.none(), SMALL)),
            gpus_per_user=draw(st.one_of(st.none(), st.none(), SMALL)),
            jobs_per_user=draw(st.one_of(st.none(), st.none(), st.integers(0, 3))),
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        )
        for number in range(count)
    ]
    for number in reversed(range(count)):
        below = sum(queues[child].quota_gpus or 0 for child in range(count) if parents[child] == number)
        if queues[number].quota_gpus is not None or below:
            queues[number] = replace(queues[number], quota_gpus=max(below, queues[number].quota_gpus or 0))
    return queues


GPU = 1000  # thousandths
sizes = st.one_of(
    st.integers(0, 6).map(lambda gpus: gpus * GPU), st.integers(1, GPU - 1)
)  # whole devices, and shares of one
steps = st.lists(st.tuples(st.integers(0, 7), st.sampled_from("uv"), sizes, st.booleans()), max_size=40)


def held_below(queues, jobs, top):
    """GPUs and (user, GPUs) of jobs in `top` and below, counted the slow way."""
    parents = {queue.id: queue.parent for queue in queues}
    inside = []
    for queue, user, gpus in jobs:
        above = queue
        while above is not None and above != top:
            above = parents[above]
        if above == top:
            inside.append((user, gpus))
    return inside


def play(tree, queues, moves):
    """Starts whatever is admitted and ends what it is told; the jobs that run."""
    running = []
    for pick, user, gpus, start in moves:
        queue = queues[pick % len(queues)].id
        if start or not running:
            number = tree.job_node(queue)
            refusal = tree.check_admission(number, user, Resources(gpus))
            if refusal is None:
                tree.add_running(number, user, Resources(gpus))
                running.append((queue, user, gpus))
            else:
                assert refusal.describe()
        else:
            ended, owner, held = running.pop(pick % len(running))
            tree.remove_running(tree.job_node(ended), owner, Resources(held))
    return running


@given(trees(), st.integers(0, 30), steps)
@settings(max_examples=examples(150), deadline=None)
def test_limits_hold_at_every_instant(queues, fleet, moves):
    for number in range(len(moves)):
        running = play(tree := QuotaTree(queues, Resources(fleet * GPU)), queues, moves[: number + 1])
        for queue in queues:
            inside = held_below(queues, running, queue.id)
            held = sum(gpus for _, gpus in inside)
            right = tree.right[tree.subtree_node(queue.id)]
            assert tree.held[tree.subtree_node(queue.id)] == held
            if queue.borrow_gpus is not None:
                assert held <= right + queue.borrow_gpus * GPU
            for user in "uv":
                own = [gpus for name, gpus in inside if name == user]
                assert queue.gpus_per_user is None or sum(own) <= queue.gpus_per_user * GPU
                assert queue.jobs_per_user is None or len(own) <= queue.jobs_per_user
            # What it does not lend stays its own, whoever else comes.
            if queue.lend_gpus is not None:
                others = sum(gpus for _, _, gpus in running) - held
                assert others <= max(fleet * GPU, tree.right[FLEET]) - max(
                    0, right - held - queue.lend_gpus * GPU
                ) - min(held, right)
        assert sum(gpus for _, _, gpus in running) <= max(fleet * GPU, tree.right[FLEET])


@given(trees(), st.integers(0, 30), steps, st.integers(0, 7), sizes)
@settings(max_examples=examples(150), deadline=None)
def test_give_undoes_take_exactly_and_room_is_what_admits_allows(queues, fleet, moves, pick, gpus):
    tree = QuotaTree(queues, Resources(fleet * GPU))
    running = play(tree, queues, moves)
    number = tree.job_node(queues[pick % len(queues)].id)
    room = tree.available_milli(number)
    assert tree.check_admission(number, "nobody", Resources(room)) is None or any(
        queue.jobs_per_user == 0 or queue.gpus_per_user is not None for queue in queues
    )
    if all(queue.gpus_per_user is None and queue.jobs_per_user is None for queue in queues):
        assert tree.check_admission(number, "w", Resources(room + 1)) is not None
    before = (list(tree.used), list(tree.held))
    tree.add_running(number, "u", Resources(gpus))
    tree.remove_running(number, "u", Resources(gpus))
    assert before == (tree.used, tree.held)
    for queue, user, held in running:
        tree.remove_running(tree.job_node(queue), user, Resources(held))
    assert not any(tree.used)
    assert not any(tree.held)


@given(trees(), st.integers(0, 30), steps, st.integers(0, 7), sizes.filter(bool), st.randoms(use_true_random=False))
@settings(max_examples=examples(400), deadline=None)
def test_stopping_borrowers_always_suffices_for_what_is_ones_right(
    queues, fleet, moves, pick, gpus, order: random.Random
):
    queues = [replace(queue, gpus_per_user=None, jobs_per_user=None) for queue in queues]
    tree = QuotaTree(queues, Resources(fleet * GPU))
    running = play(tree, queues, moves)
    claimant = tree.job_node(queues[pick % len(queues)].id)
    if not tree.is_entitled(claimant, Resources(gpus)):
        return
    order.shuffle(running)
    while tree.check_admission(claimant, "w", Resources(gpus)) is not None:
        victim = next(job for job in running if tree.is_reclaimable(tree.job_node(job[0]), claimant, Resources(gpus)))
        assert tree.borrowed_past_right(tree.job_node(victim[0])) > 0
        running.remove(victim)
        tree.remove_running(tree.job_node(victim[0]), victim[1], Resources(victim[2]))


@given(trees(), st.integers(0, 30), steps, st.integers(0, 7), st.integers(0, 7), sizes.filter(bool))
@settings(max_examples=examples(150), deadline=None)
def test_nobody_loses_what_is_his_right(queues, fleet, moves, one, other, gpus):
    tree = QuotaTree(queues, Resources(fleet * GPU))
    play(tree, queues, moves)
    victim, claimant = (tree.job_node(queues[pick % len(queues)].id) for pick in (one, other))
    if tree.is_reclaimable(victim, claimant, Resources(gpus)):
        assert victim != claimant
        assert tree.used[victim] > tree.right[victim] or tree.used[victim] > tree.pool[victim]
        assert tree.is_entitled(claimant, Resources(gpus))


@given(trees(), st.integers(0, 30), steps, st.integers(0, 7), sizes.filter(bool))
@settings(max_examples=examples(150), deadline=None)
def test_what_would_be_owed_is_what_could_be_reclaimed_at_once(queues, fleet, moves, pick, gpus):
    tree = QuotaTree(queues, Resources(fleet * GPU))
    borrower = tree.job_node(queues[pick % len(queues)].id)
    for owner, user, held in play(tree, queues, moves):
        node = tree.job_node(owner)
        owes = tree.would_owe(borrower, node, Resources(gpus))
        tree.remove_running(node, user, Resources(held))
        tree.add_running(borrower, "w", Resources(gpus))
        assert owes == tree.is_reclaimable(borrower, node, Resources(held))
        tree.remove_running(borrower, "w", Resources(gpus))
        tree.add_running(node, user, Resources(held))


uses = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.floats(0.0, 2e6), st.floats(0.0, 2e6)), max_size=12)


@given(trees(), uses)
@settings(max_examples=examples(100), deadline=None)
def test_factors_lie_between_zero_and_one_and_more_use_never_helps(queues, jobs):
    plain, more = (FairShareTree(queues, Resources(64 * GPU)) for _ in range(2))
    for pick, gpus, from_s, for_s in jobs:
        for tree in (plain, more):
            number = tree.job_node(queues[pick % len(queues)].id)
            tree.change_rate(number, gpus * GPU, 5e6, since_s=from_s)
            tree.change_rate(number, -gpus * GPU, 5e6 + for_s)
    number = more.job_node(queues[0].id)
    if plain.usage(queues[0].id).decayed_gpu_s == 0.0:
        return
    more.change_rate(number, 4 * GPU, more.now_s, since_s=more.now_s - 1e5)
    for queue in queues:
        assert 0.0 < plain.fair_share_factor(plain.job_node(queue.id)) <= 1.0
    if len({queue.parent for queue in queues}) == 1:
        assert more.fair_share_factor(number) <= plain.fair_share_factor(plain.job_node(queues[0].id)) + 1e-12


@st.composite
def doings(draw):
    """What a step does to a world: a queue put or removed, a node, a job started or ended."""
    return draw(
        st.lists(
            st.tuples(st.sampled_from(["queue", "remove", "node", "start", "start", "end"]), st.integers(0, 5), SMALL),
            max_size=15,
        )
    )


def do(change, what, which, size):
    world = change.world
    match what:
        case "queue":
            change.put(
                Queue(
                    id=QueueId(f"q{which}"), quota_gpus=size, jobs_per_user=9, parent=QueueId("q0") if which else None
                )
            )
        case "remove" if which and not any(f"q{which}" == one.queue for one in world.jobs.values()):
            change.remove_queue(QueueId(f"q{which}"))
        case "node":
            change.put(make_node(f"n{which}", 1 + size))
        case "start" if world.queues:
            seq, queue = change.new_job_seq(), sorted(world.queues)[which % len(world.queues)]
            on = f"n{seq}:{','.join(map(str, range(size)))}"
            after = placed(job(str(seq), seq=seq, gpus=1, queue=queue), on)
            change.put(after.job)
            change.put(after.attempt)
        case "end" if world.attempts:
            attempt = list(world.attempts.values())[which % len(world.attempts)]
            change.put(replace(attempt, state=AttemptState.ENDED, ended_s=attempt.placed_s + 100.0 * size))


@given(doings(), doings(), doings())
@settings(max_examples=examples(150), deadline=None)
def test_the_worlds_own_books_are_what_counting_anew_gives(before, undone, after):
    world = World()
    WorldChange(world=world).put(Queue(id=QueueId("q0")))
    for steps, kept in ((before, True), (undone, False), (after, True)):
        change = WorldChange(world=world)
        for what, which, size in steps:
            world.holdings()
            do(change, what, which, size)
        if not kept:
            change.undo()
    live, world.holdings_cache = world.holdings(), None
    fresh = world.holdings()
    assert (live.held, live.used, live.right) == (fresh.held, fresh.used, fresh.right)
    assert set(world.queue_usage) <= set(world.queues)


def test_a_full_limit_of_the_queue_above_does_not_take_a_right_away():
    """Found by `test_nobody_loses_what_is_his_right`: the queue's own jobs filled it to its limit, and the one below could not reclaim."""
    queues = [
        Queue(id=QueueId("q0"), quota_gpus=2, borrow_gpus=3),
        Queue(id=QueueId("q1"), parent=QueueId("q0"), quota_gpus=2),
    ]
    tree = QuotaTree(queues, Resources(5 * GPU))
    tree.add_running(tree.job_node(QueueId("q0")), "u", Resources(5 * GPU))
    own, below = tree.job_node(QueueId("q0")), tree.job_node(QueueId("q1"))
    assert tree.is_reclaimable(own, below, Resources(1))
    assert tree.is_entitled(below, Resources(1))
