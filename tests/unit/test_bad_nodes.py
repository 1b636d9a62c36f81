"""Bad nodes: a planted one is found, sound nodes are not; and how many spares a fleet needs."""

import math
import random

import pytest

from phalanx.core.ids import NodeId
from phalanx.core.recovery.bad_nodes import (
    HALF_LIFE_S,
    MEAN_LEAST,
    MarkSum,
    add_mark,
    decayed_sum,
    find_bad_nodes,
    poisson_tail,
)
from phalanx.core.recovery.spares import spares, under_repair

DAY_S = 86_400.0
RATE_S = 6.5e-3 / DAY_S  # of a sound node: failures per second


def fleet(**sums):
    return {NodeId(name): MarkSum(sum=float(value), at_s=0.0) for name, value in sums.items()}


def sound(count):
    return {f"n{number}": 0 for number in range(count)}


def test_marks_fade_by_half_in_a_half_life_and_not_by_a_clock_set_back():
    marks = MarkSum(sum=4.0, at_s=1000.0)
    assert decayed_sum(marks, 1000.0 + HALF_LIFE_S) == pytest.approx(2.0)
    assert decayed_sum(marks, 0.0) == 4.0
    assert add_mark(marks, 1.0, 1000.0 + HALF_LIFE_S).sum == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("sums", "last", "drained"),
    [
        ({**sound(63), "bad": 1}, [], []),
        ({**sound(63), "bad": 2}, [], []),
        ({**sound(63), "bad": 3}, ["bad"], []),
        ({**sound(63), "bad": 4}, ["bad"], ["bad"]),
        ({**sound(3), "bad": 2}, ["bad"], []),  # of so few, two are unlikely enough
        ({f"n{number}": 4 for number in range(64)}, [], []),  # a bad fleet has no bad node
        (
            {**{f"n{number}": 1 for number in range(63)}, "bad": 4},
            [],
            [],
        ),  # four times as often, and chance does that in 64
        ({**{f"n{number}": 1 for number in range(63)}, "bad": 9}, ["bad"], ["bad"]),
        ({"bad": 50}, [], []),  # alone there is nothing to compare with
    ],
)
def test_bad_node_is_one_beyond_three_times_the_others_and_beyond_chance(sums, last, drained):
    found = find_bad_nodes(fleet(**sums), 0.0)
    assert [str(node) for node in found] == last
    assert [str(node) for node, bad_node in found.items() if bad_node.drain] == drained


def test_bad_node_says_why_in_numbers():
    (bad_node,) = find_bad_nodes(fleet(**sound(63), bad=4), 0.0).values()
    assert bad_node.why == f"fails gangs {4 / MEAN_LEAST:.1f} times as often as the others (4.0 marks against 0.13)"


def test_repaired_node_is_believed_again_after_weeks():
    assert find_bad_nodes(fleet(**sound(63), bad=4), 6 * 7 * DAY_S) == {}


def history(seed, *, nodes=64, times=1.0, days=60.0):
    """A fleet of which n0 fails so many times as often: (failures of n0 when it was found, of it drained; sound nodes ever called bad nodes)."""
    rng, now_s = random.Random(seed), 0.0
    marks = {NodeId(f"n{number}"): MarkSum() for number in range(nodes)}
    weights = [times, *[1.0] * (nodes - 1)]
    found: int | None = None
    drained: int | None = None
    wrong: set[NodeId] = set()
    own = 0
    while True:
        now_s += rng.expovariate(RATE_S * sum(weights))
        if now_s > days * DAY_S:
            return found, drained, wrong
        node = rng.choices(list(marks), weights)[0]
        marks[node] = add_mark(marks[node], 1.0, now_s)
        own += node == "n0"
        for name, bad_node in find_bad_nodes(marks, now_s).items():
            if name != "n0" or times == 1.0:
                wrong.add(name)
            else:
                found = found or own
                drained = drained or (own if bad_node.drain else None)


def test_planted_bad_node_among_64_is_found_after_four_failures_and_drained_after_five():
    """Fails every third day, fifty times as often as the others. Medians over sixty histories, and the slowest of them."""
    found = [history(seed, times=50.0) for seed in range(60)]
    last, drained = sorted(one or 99 for one, _, _ in found), sorted(one or 99 for _, one, _ in found)
    assert (last[30], last[-1]) <= (4, 7)
    assert (drained[30], drained[-1]) <= (6, 11)


def test_sound_nodes_are_hardly_ever_called_bad():
    """Sixty days of 64 nodes at the published rate, a hundred times: node histories in which a sound node was used last for a while."""
    wrong = sum(len(history(seed)[2]) for seed in range(100))
    assert wrong <= 64 * 100 * 0.005, wrong


@pytest.mark.parametrize(("count", "mean"), [(0, 2.0), (1, 0.1), (3, 0.13), (5, 2.0), (10, 10.0), (700, 500.0)])
def test_poisson_tail_is_one_minus_the_sum_below(count, mean):
    below = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))
    assert poisson_tail(count, mean) == pytest.approx(1.0 - below, abs=1e-9)


def test_tail_of_nothing_and_of_the_impossible():
    assert poisson_tail(0, 0.0) == 1.0
    assert poisson_tail(1, 0.0) == 0.0
    assert 0.0 < poisson_tail(100, 0.1) < 1e-200


# ---- spares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "repair_days", "needed"),
    [
        (1, 3.0, 1),  # 0.02 under repair on average: one spare, since 2 % are more than 1 %
        (8, 3.0, 2),
        (64, 3.0, 4),
        (128, 3.0, 7),
        (2048, 3.0, 55),
        (2048, 0.0, 0),
        (0, 3.0, 0),
    ],
)
def test_spares_by_the_published_rate(nodes, repair_days, needed):
    node_mtbf_s, repair_s = 1.0 / RATE_S, repair_days * DAY_S
    found = spares(nodes, node_mtbf_s=node_mtbf_s, repair_s=repair_s)
    mean = under_repair(nodes, node_mtbf_s=node_mtbf_s, repair_s=repair_s)
    assert found == needed
    if found:
        assert poisson_tail(found + 1, mean) < 0.01 <= poisson_tail(found, mean)


def test_spares_hold_in_a_simulated_repair_shop():
    """Repairs that take three days or a month: the share of time with more nodes under repair than spares stays near one percent."""
    nodes, days = 256, 60_000
    rng, now_s, short_s, last_s = random.Random(7), 0.0, 0.0, 0.0
    back: list[float] = []
    kept = spares(nodes, node_mtbf_s=1.0 / RATE_S, repair_s=0.9 * 3 * DAY_S + 0.1 * 30 * DAY_S)
    while now_s < days * DAY_S:
        fails_s = now_s + rng.expovariate(RATE_S * nodes)
        for at_s in sorted([one for one in back if one <= fails_s] + [fails_s]):
            short_s += (at_s - last_s) * (len([one for one in back if one > last_s]) > kept)
            last_s = at_s
        now_s, back = fails_s, [one for one in back if one > fails_s]
        back.append(now_s + (3 if rng.random() < 0.9 else 30) * DAY_S)
    mean = under_repair(nodes, node_mtbf_s=1.0 / RATE_S, repair_s=0.9 * 3 * DAY_S + 0.1 * 30 * DAY_S)
    assert short_s / now_s == pytest.approx(poisson_tail(kept + 1, mean), rel=0.3)


@pytest.mark.parametrize(
    "wrong", [{"repair_s": -1.0}, {"node_mtbf_s": 0.0}, {"nodes": -1}, {"short": 0.0}, {"node_mtbf_s": 1e-9}]
)
def test_nonsense_is_refused(wrong):
    asked = {"nodes": 8, "node_mtbf_s": 1e6, "repair_s": DAY_S, **wrong}
    with pytest.raises(ValueError, match=r"must|correct"):
        spares(asked.pop("nodes"), **asked)
