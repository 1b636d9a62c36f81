"""The tree that labels describe: levels that exist, nested domains, nodes of unknown place, and the order of the ring."""

from dataclasses import replace

from phalanx.core.fleet.topology import build_topology_tree
from tests.builders import make_node


def node(name, **labels):
    return replace(make_node(name), labels=labels)


def names(tree, level):
    """Each node's domain at a level, by name."""
    depth = tree.level(level)
    return [tree.names[depth][domain] for domain in tree.domains[depth]]


def test_levels_are_those_that_some_node_is_labelled_with_outermost_first():
    tree = build_topology_tree([node("a", nvlink="n1", spine="s0"), node("b", rack="r1", spine="s0", zone="eu")])
    assert tree.levels == ("spine", "rack", "nvlink")


def test_a_fleet_without_labels_has_no_levels_and_is_ordered_by_id():
    tree = build_topology_tree([node("b"), node("a")])
    assert (tree.levels, tree.domains, tree.names) == ((), (), ())
    assert tree.sorted_positions() == (1, 0)


def test_the_node_is_the_last_level_and_an_unknown_level_is_none():
    tree = build_topology_tree([node("a", leaf="l0", rack="r0")])
    assert [tree.level(name) for name in ("leaf", "rack", "node", "spine", "moon")] == [0, 1, 2, -1, -1]


def test_equal_racks_under_two_leafs_are_two_domains():
    tree = build_topology_tree(
        [node("a", leaf="l0", rack="r1"), node("b", leaf="l1", rack="r1"), node("c", leaf="l0", rack="r1")]
    )
    assert names(tree, "rack") == ["l0/r1", "l1/r1", "l0/r1"]


def test_nodes_of_unknown_place_are_near_nobody():
    tree = build_topology_tree([node("a", leaf="l0"), node("b"), node("c"), node("d", leaf="")])
    assert len({*tree.domains[0]}) == 4


def test_a_missing_level_inside_parts_only_from_there_on():
    tree = build_topology_tree([node("a", leaf="l0", rack="r0"), node("b", leaf="l0"), node("c", leaf="l0")])
    assert len({*tree.domains[0]}) == 1
    assert len({*tree.domains[1]}) == 3


def test_one_rack_of_an_unknown_leaf_is_believed_to_be_no_rack():
    tree = build_topology_tree([node("a", leaf="l0", rack="r0"), node("b", rack="r1"), node("c", rack="r1")])
    assert tree.domains[1][1] != tree.domains[1][2]


def test_a_label_that_is_another_nodes_id_is_not_that_nodes_domain():
    tree = build_topology_tree([node("a", leaf="b"), node("b")])
    assert tree.domains[0][0] != tree.domains[0][1]


def test_order_puts_neighbours_side_by_side_and_ends_in_the_id():
    fleet = [
        node("n3", leaf="l1", rack="r0"),
        node("n2", leaf="l0", rack="r1"),
        node("n1", leaf="l1", rack="r0"),
        node("n0", leaf="l0", rack="r0"),
        node("n4", leaf="l0", rack="r1"),
    ]
    tree = build_topology_tree(fleet)
    assert [fleet[at].id for at in tree.sorted_positions()] == ["n0", "n2", "n4", "n1", "n3"]
    assert sorted(zip(tree.order_keys(), fleet, strict=True), key=lambda pair: pair[0]) == [
        (tree.order_keys()[at], fleet[at]) for at in tree.sorted_positions()
    ]


def test_the_tree_does_not_depend_on_the_order_of_its_nodes():
    fleet = [node("a", leaf="l1"), node("b", leaf="l0"), node("c")]
    there, back = build_topology_tree(fleet), build_topology_tree(fleet[::-1])
    assert there.domains == tuple(level[::-1] for level in back.domains)
    assert there.names == back.names
