"""Any fleet, any needs: what the pool finds satisfies the need, it finds something whenever there is something, and its counts stay true."""

from dataclasses import replace
from itertools import combinations

import hypothesis.strategies as st
from hypothesis import given, settings

from phalanx.core.fleet.topology import LEVELS, build_topology_tree
from phalanx.core.scheduling.needs import Need
from phalanx.core.scheduling.pool import DevicePool
from tests.builders import make_node
from tests.effort import examples

UNIT = 3


@st.composite
def trees(draw, nodes):
    """A tree over so many nodes, numbered along it; some of unknown place."""
    levels = draw(st.sampled_from(((), ("leaf",), ("spine", "rack"), ("spine", "leaf", "nvlink"))))
    label = st.sampled_from(("x", "y", "z", ""))
    fleet = [
        replace(make_node(f"n{number}"), labels={level: draw(label) for level in levels}) for number in range(nodes)
    ]
    order = build_topology_tree(fleet).sorted_positions()
    return build_topology_tree([fleet[at] for at in order])


@st.composite
def needs(draw):
    nodes = draw(st.integers(1, 4))
    devices = draw(st.integers(0, UNIT))
    sliced = draw(st.booleans()) and nodes > 1
    within = draw(st.integers(-1, len(LEVELS) - 1))
    return Need(
        nodes=nodes,
        devices=devices,
        last_node_devices=0 if sliced or devices < 2 else draw(st.integers(0, devices - 1)),
        cpus=draw(st.sampled_from((0, 0, 2))),
        memory_bytes=draw(st.sampled_from((0, 0, 5))),
        within=within,
        required=within >= 0 and draw(st.booleans()),
        slice_nodes=draw(st.integers(1, nodes)) if sliced else 0,
        slice_within=draw(st.integers(0, 2)) if sliced else -1,
    )


@st.composite
def pools(draw):
    """A pool among others' nodes, some devices held, some nodes away."""
    nodes = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.sampled_from((-1, 0, 1, UNIT, UNIT, UNIT)), min_size=nodes, max_size=nodes))
    cpus = draw(st.lists(st.integers(0, 4), min_size=nodes, max_size=nodes))
    memory = draw(st.lists(st.integers(3, 9), min_size=nodes, max_size=nodes))
    pool = DevicePool(sizes, tree=draw(trees(nodes)), cpus=cpus, memory=memory)
    for node, size in enumerate(sizes):
        if size > 0:
            pool.take(((node, draw(st.integers(0, size))),))
        if size >= 0 and draw(st.sampled_from((False, False, False, True))):
            pool.remove_node(node)
    return pool


def path(pool, node):
    return [level[node] for level in pool.tree.domains] if pool.tree is not None else []


def one_domain(pool, nodes, level):
    """Whether the nodes share a domain of the level; past the last level that is the node."""
    return len({tuple((path(pool, node) + [(node,)] * 9)[: level + 1]) for node in nodes}) <= 1


def usable(pool, need, excluded):
    return [
        node
        for node, size in enumerate(pool.devices_of_node)
        if size >= 0
        and node not in pool.removed_nodes
        and not excluded >> node & 1
        and pool.capacity.cpus[node] >= need.cpus
        and pool.capacity.memory[node] >= need.memory_bytes
    ]


def satisfies(pool, need, places):
    nodes = [node for node, _ in places]
    if need.required and need.within >= 0 and not one_domain(pool, nodes, need.within):
        return False
    if need.slice_nodes > 1 and need.slice_within >= 0:
        size = need.slice_nodes
        return all(one_domain(pool, nodes[at : at + size], need.slice_within) for at in range(0, len(nodes), size))
    return True


def everything(pool, need, excluded):
    """Every placement there is, by trying all."""
    here = usable(pool, need, excluded)
    for nodes in combinations([node for node in here if pool.free[node] >= need.devices], need.nodes):
        tails = (
            [node for node in here if pool.free[node] >= need.last_node_devices and node not in nodes]
            if need.last_node_devices
            else [None]
        )
        for tail in tails:
            places = [(node, need.devices) for node in nodes] + (
                [(tail, need.last_node_devices)] if tail is not None else []
            )
            if satisfies(pool, need, sorted(places)):
                yield tuple(sorted(places))


@settings(max_examples=examples(400))
@given(pools(), needs(), st.integers(0, 3))
def test_it_finds_a_place_if_there_is_one_and_it_is_one(pool, need, excluded):
    found = pool.find(need, excluded)
    possible = set(everything(pool, need, excluded))
    assert (found in possible) if possible else found is None


@settings(max_examples=examples(400))
@given(pools(), needs(), st.integers(0, 3))
def test_a_gang_goes_into_the_smallest_domain_that_holds_it_and_of_those_the_fullest(pool, need, excluded):
    possible = list(everything(pool, need, excluded))
    if pool.tree is None or not possible or need.nodes == 1:
        return
    found = pool.find(need, excluded)
    candidates = [node for node in usable(pool, need, excluded) if pool.free[node] >= need.devices]
    for level in reversed(range(len(pool.tree.levels))):
        domains = pool.tree.domains[level]
        holding = {domains[places[0][0]] for places in possible if len({domains[node] for node, _ in places}) == 1}
        if holding:
            inside = {domain: sum(domains[node] == domain for node in candidates) for domain in holding}
            chosen = {domains[node] for node, _ in found}
            assert len(chosen) == 1
            assert inside[chosen.pop()] == min(inside.values())
            return


@settings(max_examples=examples(300))
@given(pools(), st.integers(1, UNIT), st.integers(0, 7), st.sampled_from((0, 2)))
def test_one_node_is_the_best_fit_then_in_the_fullest_domain_innermost_first_then_the_lowest(
    pool, devices, excluded, cpus
):
    need = Need(nodes=1, devices=devices, cpus=cpus)

    def whole(level, node):
        domains = pool.tree.domains[level]
        return sum(
            pool.free[other] == pool.node_devices_max
            and other not in pool.removed_nodes
            and domains[other] == domains[node]
            for other in range(len(pool.devices_of_node))
        )

    depths = len(pool.tree.levels) if pool.tree is not None else 0
    fitting = [node for node in usable(pool, need, excluded) if pool.free[node] >= devices]
    ranked = sorted(
        (pool.free[node], *(whole(level, node) for level in reversed(range(depths))), node) for node in fitting
    )
    assert pool.find(need, excluded) == (((ranked[0][-1], devices),) if ranked else None)


def recount(pool):
    """A pool made anew from what the nodes say."""
    fresh = DevicePool(pool.devices_of_node, tree=pool.tree)
    for node in pool.removed_nodes:
        fresh.remove_node(node)
    for node, size in enumerate(pool.devices_of_node):
        if size >= 0:
            fresh.take(((node, size - pool.free[node]),))
    return fresh


def indexes(pool):
    listed = [node for node, size in enumerate(pool.devices_of_node) if size >= 0 and node not in pool.removed_nodes]
    for free in range(pool.node_devices_max + 1):
        assert pool.nodes_by_free[free] == sum(1 << node for node in listed if pool.free[node] == free)
    found = [pool.nodes_by_free, pool.counts_by_free, pool.free_total, pool.available_nodes, pool.free]
    if pool.domains is not None:
        found += [pool.domains.nodes_with, pool.domains._counts]
        for depth, level in enumerate(pool.domains.levels):
            domains = pool.tree.domains[depth]
            whole = [node for node in listed if pool.free[node] == pool.node_devices_max]
            assert level.whole == [sum(domains[node] == domains[first] for node in whole) for first in level.first]
            assert {count for count in range(99) if level.present >> count & 1} == {*level.whole}
            found += [level.whole, level.by_whole, level.present]
    return found


OPS = st.lists(
    st.one_of(
        needs().map(lambda need: ("place", need)),
        st.integers(0, 99).map(lambda at: ("give", at)),
        st.integers(0, 7).map(lambda node: ("leave", node)),
        st.integers(0, 7).map(lambda node: ("back", node)),
    ),
    max_size=30,
)


@settings(max_examples=examples(200))
@given(pools(), OPS)
def test_the_kept_counts_are_those_of_a_recount_and_nothing_is_handed_out_twice(pool, ops):
    held = []
    for verb, what in ops:
        if verb == "place":
            places = pool.find(what)
            if places is not None:
                pool.take(places)
                for node, _ in places:
                    pool.capacity.cpus[node] -= what.cpus
                held.append((what, places))
        elif verb == "give" and held:
            need, places = held.pop(what % len(held))
            pool.release(places)
            for node, _ in places:
                pool.capacity.cpus[node] += need.cpus
        elif verb in ("leave", "back") and what < len(pool.devices_of_node) and pool.devices_of_node[what] >= 0:
            (pool.remove_node if verb == "leave" else pool.restore_node)(what)
        assert all(
            0 <= free <= size or free == size for free, size in zip(pool.free, pool.devices_of_node, strict=True)
        )
        assert min(pool.capacity.cpus) >= 0
        assert indexes(pool) == indexes(recount(pool))


@given(pools(), needs())
def test_what_fits_now_fits_ever_and_the_empty_pool_decides(pool, need):
    ever = DevicePool(pool.devices_of_node, tree=pool.tree).find(replace(need, cpus=0, memory_bytes=0)) is not None
    assert pool.fits_ever(need) == ever
    assert ever or pool.find(need) is None
