"""Where one node's worth and where a gang goes, on pools drawn in a line: free devices of each node, of 8 unless said, domains by name."""

from dataclasses import replace

import pytest

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.topology import build_topology_tree
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.node_bitsets import bitset_of, lowest_member, lowest_members
from phalanx.core.scheduling.pool import DevicePool
from tests.builders import make_node

LEAF, RACK = 0, 1


def pool(text, *, size=8, cpus=None, memory=None):
    """`l0/r0: 8 8 | l0/r1: 4`: nodes in leaf l0 with so many devices free; three names start with the spine, none is no topology."""
    fleet: list[Node] = []
    free: list[int] = []
    for domain in text.split("|"):
        path, _, inside = domain.rpartition(":")
        names = path.strip().split("/")
        levels = ("spine", "leaf", "rack") if len(names) == 3 else ("leaf", "rack")
        labels = dict(zip(levels, names, strict=False)) if path else {}
        for word in inside.split():
            fleet.append(replace(make_node(f"n{len(fleet):03}"), labels=labels))
            free.append(int(word))
    drawn = DevicePool([size] * len(free), tree=build_topology_tree(fleet), cpus=cpus, memory=memory)
    drawn.take(tuple((node, size - own) for node, own in enumerate(free)))
    return drawn


def nodes(places):
    return [node for node, _ in places or ()]


def gang(count, devices=8, **fields):
    return Need(nodes=count, devices=devices, **fields)


def test_one_node_is_the_best_fit_and_of_equals_the_lowest():
    assert pool("8 3 2 3").find(gang(1, 3)) == ((1, 3),)


def test_a_part_of_a_node_goes_where_whole_nodes_are_fewest():
    assert nodes(pool("l0: 8 8 4 | l1: 8 4").find(gang(1, 4))) == [4]


def test_a_whole_node_comes_from_the_fullest_domain():
    assert nodes(pool("l0: 8 8 8 | l1: 0 8 8 | l2: 0 0 0").find(gang(1))) == [4]


def test_among_equally_full_racks_that_in_the_fullest_leaf():
    assert nodes(pool("l0/r0: 8 4 | l0/r1: 8 8 | l1/r2: 8 4 | l1/r3: 8 0").find(gang(1, 4))) == [5]


def test_among_equally_full_racks_the_leaf_counts_before_the_spine():
    drawn = "s0/l0/r0: 8 4 | s0/l0/r1: 8 8 | s0/l1/r2: 8 8 8 8 | s1/l2/r3: 8 4 | s1/l2/r4: 8 8 8"
    assert nodes(pool(drawn).find(gang(1, 4))) == [1]


def test_best_fit_comes_before_the_fullest_domain():
    assert nodes(pool("l0: 8 8 2 | l1: 4 0 0").find(gang(1, 2))) == [2]


def test_a_gang_takes_whole_nodes_the_lowest():
    assert pool("0 8 8 8").find(gang(2)) == ((1, 8), (2, 8))


def test_a_gang_of_parts_is_best_fit_too():
    assert pool("8 4 8 5 4").find(gang(3, 4)) == ((1, 4), (3, 4), (4, 4))


def test_half_a_gang_is_none():
    assert pool("8 8 7").find(gang(3)) is None


def test_the_tail_goes_on_a_partly_used_node():
    assert pool("8 8 5 3").find(gang(1, last_node_devices=3)) == ((0, 8), (3, 3))


def test_the_tail_goes_on_a_whole_node_if_no_other_holds_it():
    assert pool("8 2 8").find(gang(1, last_node_devices=3)) == ((0, 8), (2, 3))


def test_no_room_for_the_tail_is_no_room():
    assert pool("8 2 2 2").find(gang(1, last_node_devices=3)) is None
    assert pool("l0: 8 2 | l1: 2 2").find(gang(1, last_node_devices=3)) is None


def test_of_equal_nodes_for_the_tail_the_lowest():
    assert pool("5 8 5").find(gang(1, last_node_devices=4)) == ((0, 4), (1, 8))


def test_the_rest_of_a_gang_over_leafs_stays_in_one_rack():
    # l0 is used up. The last two fit into one rack of l2, though l1 is fuller.
    found = pool("l0/r0: 8 8 | l0/r1: 8 8 | l1/r2: 8 0 | l1/r3: 8 0 | l2/r4: 8 8 8").find(gang(6))
    assert nodes(found) == [0, 1, 2, 3, 8, 9]


def test_a_gang_of_parts_in_the_fullest_leaf_with_room_for_its_tail():
    assert pool("l0: 4 4 0 | l1: 4 4 2 0 | l2: 4 4 4").find(gang(2, 4, last_node_devices=2)) == ((3, 4), (4, 4), (5, 2))


def test_slices_go_into_the_fullest_leaf_that_holds_them():
    found = pool("l0/r0: 8 8 | l0/r1: 8 8 | l0/r2: 8 8 | l1/r3: 8 8 | l1/r4: 8 8").find(
        gang(4, slice_nodes=2, slice_within=RACK)
    )
    assert nodes(found) == [6, 7, 8, 9]


def test_places_are_in_node_order_even_if_the_tail_is_the_first():
    assert pool("5 8 8").find(gang(2, last_node_devices=4)) == ((0, 4), (1, 8), (2, 8))


def test_a_gang_goes_into_the_smallest_domain_that_holds_it():
    assert nodes(pool("l0/r0: 8 8 0 | l0/r1: 8 | l1/r2: 8 8 8").find(gang(3))) == [4, 5, 6]


def test_of_the_domains_that_hold_it_the_fullest():
    assert nodes(pool("l0: 8 8 8 | l1: 8 8 0 | l2: 8 0 0").find(gang(2))) == [3, 4]


def test_of_equally_full_racks_the_gang_takes_that_in_the_fullest_leaf():
    assert nodes(pool("l0/r0: 8 8 | l0/r1: 8 8 | l1/r2: 8 8 | l1/r3: 8 0").find(gang(2))) == [4, 5]


def test_a_domain_without_room_for_the_tail_does_not_hold_the_gang():
    assert pool("l0: 8 8 2 | l1: 8 8 3 8").find(gang(2, last_node_devices=3)) == ((3, 8), (4, 8), (5, 3))


def test_a_leaf_for_the_gang_and_the_tail_when_no_rack_has_room_for_both():
    assert pool("l0/r0: 8 8 | l0/r1: 4 0").find(gang(2, last_node_devices=3)) == ((0, 8), (1, 8), (2, 3))


def test_inside_a_leaf_as_few_racks_as_can_be():
    # Three from the roomiest rack, and the fourth where a rack has just one left.
    assert nodes(pool("l0/r0: 8 8 0 | l0/r1: 8 8 8 | l0/r2: 8 0 0").find(gang(4))) == [3, 4, 5, 6]


def test_over_leafs_the_roomiest_is_used_up_and_the_rest_stays_in_the_smallest_that_holds_it():
    found = pool("l0: 8 8 0 0 | l1: 8 8 8 8 | l2: 8 0 0 0 | l3: 8 8 8 0").find(gang(5))
    assert nodes(found) == [4, 5, 6, 7, 8]


def test_a_required_level_makes_the_gang_wait():
    scattered = pool("l0: 8 8 | l1: 8 8")
    assert scattered.find(gang(3, within=LEAF, required=True)) is None
    assert nodes(scattered.find(gang(3, within=LEAF))) == [0, 1, 2]


def test_a_required_leaf_may_be_one_rack_of_it_but_not_the_reverse():
    one = pool("l0/r0: 8 8 | l0/r1: 8")
    assert nodes(one.find(gang(2, within=LEAF, required=True))) == [0, 1]
    assert nodes(one.find(gang(3, within=LEAF, required=True))) == [0, 1, 2]
    assert one.find(gang(3, within=RACK, required=True)) is None


def test_two_nodes_are_never_within_one_node():
    alone = pool("8 8")
    assert alone.find(gang(2, within=0, required=True)) is None
    assert nodes(alone.find(gang(1, within=0, required=True))) == [0]


def test_slices_each_stay_in_one_rack():
    # Rack r0 has three: one slice of two, and one node that no slice can use.
    found = pool("l0/r0: 8 8 8 | l0/r1: 8 8 | l0/r2: 8 0").find(gang(4, slice_nodes=2, slice_within=RACK))
    assert nodes(found) == [0, 1, 3, 4]


def test_slices_wait_for_racks_though_the_nodes_would_do():
    lone = pool("l0/r0: 8 8 8 | l0/r1: 8 | l0/r2: 8")
    assert lone.find(gang(4, slice_nodes=2, slice_within=RACK)) is None
    assert lone.find(gang(4)) is not None


def test_slices_stay_in_one_leaf_if_it_is_required():
    two = pool("l0/r0: 8 8 | l0/r1: 8 | l1/r2: 8 8 | l1/r3: 8")
    sliced = gang(4, slice_nodes=2, slice_within=RACK, within=LEAF)
    assert nodes(two.find(sliced)) == [0, 1, 3, 4]
    assert two.find(replace(sliced, required=True)) is None


def test_the_last_slices_go_into_the_rack_with_the_least_room_for_them():
    found = pool("l0/r0: 8 8 8 8 | l0/r1: 8 8 8 | l0/r2: 8 8").find(gang(6, slice_nodes=2, slice_within=RACK))
    assert nodes(found) == [0, 1, 2, 3, 7, 8]


def test_of_racks_with_equally_many_slices_the_lowest_is_used_up():
    found = pool("l0/r0: 8 8 | l0/r1: 8 8 | l0/r2: 8 8 8").find(gang(4, slice_nodes=2, slice_within=RACK))
    assert nodes(found) == [0, 1, 2, 3]


def test_a_short_last_slice_ends_the_ranks():
    # The rack with one free node comes first in the ring: it cannot hold the short slice, the ranks would be cut elsewhere.
    found = pool("l0/r0: 8 0 | l0/r1: 8 8 | l0/r2: 8 8").find(gang(3, slice_nodes=2, slice_within=RACK))
    assert nodes(found) == [2, 3, 4]


def test_shut_nodes_are_passed_over():
    three = pool("l0: 8 4 8 | l1: 4 8 8")
    assert nodes(three.find(gang(1, 4), excluded=0b001010)) == [0]
    assert nodes(three.find(gang(2), excluded=0b000001)) == [4, 5]
    assert nodes(three.find(gang(1, 4, excluded=0b000010))) == [3]
    assert three.find(gang(2), excluded=0b110000) == ((0, 8), (2, 8))


def test_the_fullest_domain_is_sought_among_nodes_that_are_not_shut():
    assert nodes(pool("l0: 8 8 4 | l1: 4 4 8").find(gang(1, 4), excluded=0b001000)) == [4]


def test_nodes_without_the_cpus_or_memory_are_passed_over_until_they_have_them():
    cpus, memory = [4, 32, 32], [100, 100, 10]
    three = pool("8 8 8", cpus=cpus, memory=memory)
    need = gang(1, 2, cpus=8, memory_bytes=50)
    assert nodes(three.find(need)) == [1]
    three.take(((1, 2),))
    cpus[1] = 0  # the board's own booking follows the taking
    assert three.find(need) is None
    cpus[0] = 16
    three.mark_changed(0)
    assert nodes(three.find(need)) == [0]


def test_what_is_known_of_cpus_stays_true_over_many_changes():
    cpus = [16] * 40
    forty = pool(" ".join(["8"] * 40), cpus=cpus)
    for change in range(3000):  # past the journal's bound
        node = change % 40
        cpus[node] = 0 if node < 30 and cpus[node] else 16
        forty.mark_changed(node)
        if change % 7 == 0:
            fits = [number for number in range(40) if cpus[number] >= 8]
            assert nodes(forty.find(gang(len(fits), 1, cpus=8))) == fits
            assert forty.find(gang(len(fits) + 1, 1, cpus=8)) is None


def test_a_job_without_devices_goes_where_the_fewest_cpus_suffice():
    none = pool("l0: 0 8 | l1: 8 8", cpus=[32, 4, 8, 8])
    assert none.find(Need(nodes=1, devices=0, cpus=6)) == ((2, 0),)
    assert none.find(Need(nodes=2, devices=0, cpus=6, within=LEAF, required=True)) == ((2, 0), (3, 0))
    assert none.find(Need(nodes=4, devices=0, cpus=6)) is None


def test_a_node_that_left_is_offered_again_with_what_was_given_back_meanwhile():
    two = pool("l0: 4 | l1: 8")
    two.remove_node(0)
    two.remove_node(0)
    assert nodes(two.find(gang(1, 4))) == [1]
    assert (two.free_total, two.capacity_for(gang(1)).whole_nodes) == (8, 1)
    two.release(((0, 4),))
    two.restore_node(0)
    assert nodes(two.find(gang(2))) == [0, 1]


def test_a_node_with_more_held_than_it_has_is_full_until_its_jobs_are_gone():
    one = DevicePool([3, 4])
    one.take(((0, 4),))
    assert (one.find(gang(1, 1)), one.free_total) == (((1, 1),), 4)
    one.release(((0, 4),))
    assert (one.find(gang(1, 3)), one.free_total) == (((0, 3),), 7)


def test_nodes_of_other_pools_are_not_offered():
    mine = DevicePool([-1, 2, -1, 0])
    assert (mine.node_devices_max, mine.free_total, mine.find(gang(1, 2)), mine.changed_nodes) == (
        2,
        2,
        ((1, 2),),
        {1, 3},
    )
    assert nodes(mine.find(Need(nodes=2, devices=0))) == [1, 3]
    assert mine.find(gang(1, 3)) is None


def test_a_pool_without_nodes_finds_nothing():
    nobody = DevicePool(
        [-1, -1], tree=build_topology_tree([replace(make_node(name), labels={"leaf": name}) for name in "ab"])
    )
    assert (nobody.find(gang(1, 1)), nobody.find(gang(2)), nobody.capacity_for(gang(2))) == (None, None, (0, 0, 0, 0))


def test_what_is_held_or_away_fits_ever_and_what_the_fleet_lacks_does_not():
    held = pool("l0: 0 0 | l1: 0 0")
    held.remove_node(2)
    assert held.find(gang(1)) is None
    assert [held.fits_ever(need) for need in (gang(4), gang(5), gang(1, 9), gang(3, within=LEAF, required=True))] == [
        True,
        False,
        False,
        False,
    ]
    assert not held.fits_ever(gang(1, excluded=0b1111))


def test_why_not_counts_what_there_is():
    some = pool("l0: 8 0 5 | l1: 8 8 3")
    assert some.capacity_for(gang(3, within=LEAF, required=True)) == (32, 8, 3, 2)
    assert some.capacity_for(gang(3, 5)).largest_domain == 4
    assert some.capacity_for(gang(3, 3, slice_nodes=3, slice_within=LEAF)).largest_domain == 3
    assert some.capacity_for(gang(2, within=RACK + 1, required=True)).largest_domain == 1


def test_a_hole_for_a_move_never_breaks_up_a_whole_node():
    assert pool("8 4 6").find_single_node(4, excluded=0b010) == 2
    assert pool("8 4 6").find_single_node(4, excluded=0b110) == -1


def test_numbers_that_do_not_follow_the_tree_are_refused_by_name():
    labels = [{"leaf": leaf} for leaf in ("a", "b", "a")]
    tree = build_topology_tree([replace(make_node(f"n{number}"), labels=own) for number, own in enumerate(labels)])
    with pytest.raises(ValueError, match=r"node number 2 \(n2\) is in a, but not next to its other nodes"):
        DevicePool([8, 8, 8], tree=tree)
    assert nodes(DevicePool([8, -1, 8], tree=tree).find(gang(2))) == [0, 2]


def test_a_gang_of_thousands_takes_the_lowest_like_a_small_one():
    members = [number for number in range(5000) if number % 3]
    bits = bitset_of(members)
    assert lowest_members(bits, 2000, base=7) == [member + 7 for member in members[:2000]]
    assert lowest_members(bits, 50, base=7) == [member + 7 for member in members[:50]]
    assert (lowest_member(bits), lowest_member(0), lowest_members(0, 99), bitset_of(())) == (1, -1, [], 0)
