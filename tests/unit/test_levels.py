"""Measured rates become levels where they fall by a factor, whatever the noise; and what falls short of its level is named."""

import random
from itertools import combinations

import pytest

from phalanx.planner.calibration.network_levels import infer_topology, natural_sort_key
from phalanx.planner.calibration.profile import PairMeasurement

GB = 1e9


def rates(tree, *, noise=0.0, seed=1, slow=None):
    """Pairs of a fleet drawn as a tree: nested lists of names; the first rate of `by` is that of the outermost pairs.

    `slow`: other rates, by pair or node, in GB/s.
    """
    nodes, by = tree
    chance = random.Random(seed)
    found = []
    for first, second in combinations(sorted(_names(nodes), key=natural_sort_key), 2):
        rate = by[_common(nodes, first, second)] * (1.0 + noise * chance.uniform(-1.0, 1.0))
        for part, other in (slow or {}).items():
            if part in (f"{first}-{second}", first, second):
                rate = min(rate, other)
        found.append(PairMeasurement(first=first, second=second, bytes_per_s=rate * GB))
    return found


def _names(tree):
    return [tree] if isinstance(tree, str) else [name for part in tree for name in _names(part)]


def _common(tree, first, second):
    for part in tree:
        if not isinstance(part, str) and {first, second} <= set(_names(part)):
            return 1 + _common(part, first, second)
    return 0


def drawn(measure):
    """Levels as text: "leaf n0,n1 | n2,n3"."""
    return [f"{level.name} {' | '.join(','.join(domain) for domain in level.domains)}" for level in measure.levels]


FLAT = ([f"n{number}" for number in range(8)], [10])
LEAFS = ([["n0", "n1", "n2"], ["n3", "n4", "n5"]], [1, 10])
DEEP = (
    [[["n0", "n1"], ["n2", "n3"]], [["n4", "n5"], ["n6", "n7"]]],
    [1, 4, 12],
)
DEEPER = (
    [
        [[["n0", "n1"], ["n2", "n3"]], [["n4", "n5"], ["n6", "n7"]]],
        [[["n8", "n9"], ["n10", "n11"]], [["n12", "n13"], ["n14", "n15"]]],
    ],
    [1, 3, 9, 27],
)


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (FLAT, []),
        (LEAFS, ["leaf n0,n1,n2 | n3,n4,n5"]),
        (DEEP, ["leaf n0,n1,n2,n3 | n4,n5,n6,n7", "rack n0,n1 | n2,n3 | n4,n5 | n6,n7"]),
        (
            DEEPER,
            [
                "spine n0,n1,n2,n3,n4,n5,n6,n7 | n8,n9,n10,n11,n12,n13,n14,n15",
                "leaf n0,n1,n2,n3 | n4,n5,n6,n7 | n8,n9,n10,n11 | n12,n13,n14,n15",
                "rack n0,n1 | n2,n3 | n4,n5 | n6,n7 | n8,n9 | n10,n11 | n12,n13 | n14,n15",
            ],
        ),
        (([["n0", "n1", "n2"], ["n3"]], [1, 10]), []),  # one alone is slow, not far
        (([["n0", "n1"], "n2", "n3"], [1, 10]), ["leaf n0,n1"]),  # what only half have is a place
        (([["n0", "n1"], ["n2", "n3"], "n4"], [1, 10]), ["leaf n0,n1 | n2,n3"]),
        ((["n0", "n1"], [1]), []),
    ],
    ids=["flat", "leafs", "two", "three", "slow", "half", "stray", "pair"],
)
def test_levels_are_found_where_rates_fall_by_a_factor(tree, expected, noise):
    for seed in range(5):
        assert drawn(infer_topology(rates(tree, noise=noise, seed=seed))) == expected


def test_noise_alone_makes_no_level_and_no_slow_link():
    for seed in range(50):
        found = infer_topology(rates(FLAT, noise=0.18, seed=seed))
        assert (found.levels, found.slow) == ((), ())


def test_each_level_says_what_its_sound_links_give():
    found = infer_topology(rates(DEEP))
    assert (found.bytes_per_s, [level.bytes_per_s for level in found.levels]) == (1 * GB, [4 * GB, 12 * GB])


def told(measure):
    return [(slow.first, slow.second, slow.bytes_per_s / GB, slow.level_bytes_per_s / GB) for slow in measure.slow]


def test_a_slow_link_is_named_with_its_levels_rate_and_splits_nothing():
    found = infer_topology(rates(LEAFS, slow={"n0-n2": 1.1}))
    assert drawn(found) == ["leaf n0,n1,n2 | n3,n4,n5"]
    assert told(found) == [("n0", "n2", 1.1, 10.0)]


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_slow_node_is_named_once_and_not_each_of_its_links(nodes):
    tree = ([f"n{number}" for number in range(nodes)], [10])
    found = infer_topology(rates(tree, slow={"n1": 1.1}))
    assert drawn(found) == []
    assert told(found) == [("n1", "", 1.1, 10.0)]


def test_a_slow_node_within_its_leaf_stays_there_and_is_named():
    tree = ([["n0", "n1", "n2", "n3"], ["n4", "n5", "n6", "n7"]], [1, 10])
    found = infer_topology(rates(tree, slow={"n3": 4}))
    assert drawn(found) == ["leaf n0,n1,n2,n3 | n4,n5,n6,n7"]
    assert [(one[0], one[1]) for one in told(found)] in ([("n3", "")], [("n0", "n3"), ("n1", "n3"), ("n2", "n3")])


def test_a_node_whose_neighbour_is_sick_is_alone_in_its_rack_and_not_slow():
    found = infer_topology(rates(DEEP, slow={"n4": 2}))
    assert drawn(found)[1] == "rack n0,n1 | n2,n3 | n6,n7"
    assert all(one[0] == "n4" for one in told(found))


def test_a_trunk_that_several_pairs_share_at_once_makes_none_of_them_slow():
    shared = {"n0-n3": 0.5, "n1-n4": 0.33, "n2-n5": 0.33, "n0-n4": 0.5}
    assert told(infer_topology(rates(LEAFS, slow=shared))) == []
    assert told(infer_topology(rates(LEAFS, slow={"n0-n3": 0.1}))) == [("n0", "n3", 0.1, 1.0)]


def test_links_that_were_not_measured_say_nothing():
    pairs = [pair for pair in rates(DEEP) if (pair.first, pair.second) not in {("n0", "n7"), ("n1", "n2")}]
    assert drawn(infer_topology(pairs)) == drawn(infer_topology(rates(DEEP)))
    assert infer_topology([]).nodes == ()


def test_labels_name_a_nodes_domain_at_each_level():
    labels = infer_topology(rates(([["n0", "n1"], ["n2", "n3"], "n4"], [1, 10]))).labels()
    assert labels == {
        "n0": {"leaf": "m0"},
        "n1": {"leaf": "m0"},
        "n2": {"leaf": "m1"},
        "n3": {"leaf": "m1"},
        "n4": {"leaf": ""},
    }


def test_names_are_ordered_as_people_count():
    assert sorted(["n10", "n2", "a", "n1b"], key=natural_sort_key) == ["a", "n1b", "n2", "n10"]
