"""Any tree of queues with quotas of several resources: each resource's limits hold at every instant, and one's right can always be had."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, no-untyped-call"

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.resources import Resources, extras_of
from phalanx.core.work.quotas.quota_tree import QuotaTree
from tests.effort import examples
from tests.property.test_quota import GPU, held_below, trees

AMOUNTS = st.integers(0, 8)
NAMES = ("cpus", "seat")
FLEET = st.builds(
    lambda gpus, cpus, seats: Resources(gpus * GPU, cpus, 0, extras_of([("seat", seats)])), *[AMOUNTS] * 3
)
vectors = st.builds(
    lambda gpus, cpus, seats: Resources(gpus * GPU, cpus, 0, extras_of([("seat", seats)])),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
steps = st.lists(st.tuples(st.integers(0, 7), st.sampled_from("uv"), vectors, st.booleans()), max_size=30)


@st.composite
def vector_trees(draw):
    """Trees with terms for CPUs and seats too; quotas never exceed those above them."""
    queues = draw(trees())
    for name in NAMES:
        for field in ("other_quotas", "other_borrow", "other_lend", "other_per_user"):
            amounts = [draw(st.one_of(st.none(), AMOUNTS)) for _ in queues]
            queues = [
                one if amount is None else replace(one, **{field: (*getattr(one, field), (name, amount))})
                for one, amount in zip(queues, amounts, strict=True)
            ]
        for number in reversed(range(len(queues))):
            queue = queues[number]
            below = sum(one.terms_of(name).quota or 0 for one in queues if one.parent == queue.id)
            quota = queue.terms_of(name).quota
            if quota is not None or below:
                others = dict(queue.other_quotas) | {name: max(below, quota or 0)}
                queues[number] = replace(queue, other_quotas=tuple(sorted(others.items())))
    return queues


def play(tree, queues, moves):
    """Starts whatever is admitted and ends what it is told; the jobs that run."""
    running: list[tuple[str, str, Resources]] = []
    for pick, user, asked, start in moves:
        queue = queues[pick % len(queues)].id
        number = tree.job_node(queue)
        if start or not running:
            refusal = tree.check_admission(number, user, asked)
            if refusal is None:
                tree.add_running(number, user, asked)
                running.append((queue, user, asked))
            else:
                assert refusal.describe()
        else:
            ended, owner, held = running.pop(pick % len(running))
            tree.remove_running(tree.job_node(ended), owner, held)
    return running


@given(vector_trees(), FLEET, steps)
@settings(max_examples=examples(100), deadline=None)
def test_the_limits_of_each_resource_hold(queues, fleet, moves):
    tree = QuotaTree(queues, fleet)
    running = play(tree, queues, moves)
    for name in {name for queue in queues for name in queue.other_resources}:
        one = tree.dimension(name)
        held = [(queue, user, resources.amount_of(name)) for queue, user, resources in running]
        assert sum(amount for _, _, amount in held) <= max(fleet.amount_of(name), one.right[0])
        for queue in queues:
            inside = held_below(queues, held, queue.id)
            total, terms = sum(amount for _, amount in inside), queue.terms_of(name)
            assert one.held[tree.subtree_node(queue.id)] == total
            if terms.borrow is not None:
                assert total <= one.right[tree.subtree_node(queue.id)] + terms.borrow
            for user in "uv":
                assert terms.per_user is None or sum(each for who, each in inside if who == user) <= terms.per_user


@given(vector_trees(), FLEET, steps, st.integers(0, 7), vectors)
@settings(max_examples=examples(100), deadline=None)
def test_an_end_undoes_a_start_in_every_resource(queues, fleet, moves, pick, asked):
    tree = QuotaTree(queues, fleet)
    running = play(tree, queues, moves)
    before = [(list(one.used), list(one.held)) for one in (tree.gpus, *tree.others)]
    number = tree.job_node(queues[pick % len(queues)].id)
    tree.add_running(number, "u", asked)
    tree.remove_running(number, "u", asked)
    assert before == [(one.used, one.held) for one in (tree.gpus, *tree.others)]
    for queue, user, held in running:
        tree.remove_running(tree.job_node(queue), user, held)
    assert not any(any(one.used) or any(one.held) for one in (tree.gpus, *tree.others))


@given(vector_trees(), FLEET, steps, st.integers(0, 7), vectors.filter(bool), st.randoms(use_true_random=False))
@settings(max_examples=examples(200), deadline=None)
def test_stopping_borrowers_suffices_for_what_is_ones_right_of_every_resource(
    queues, fleet, moves, pick, asked, order: random.Random
):
    queues = [replace(queue, gpus_per_user=None, jobs_per_user=None, other_per_user=()) for queue in queues]
    tree = QuotaTree(queues, fleet)
    running = play(tree, queues, moves)
    claimant = tree.job_node(queues[pick % len(queues)].id)
    if not tree.is_entitled(claimant, asked):
        return
    order.shuffle(running)
    while tree.check_admission(claimant, "w", asked) is not None:
        victim = next(job for job in running if tree.is_reclaimable(tree.job_node(job[0]), claimant, asked))
        running.remove(victim)
        tree.remove_running(tree.job_node(victim[0]), victim[1], victim[2])
