"""A fleet counted by facts is the fleet counted node by node."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.fleet.capacity import nodes_resources
from phalanx.core.fleet.fleet_counts import FleetCounts
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.summary import NodeKinds, summary_of
from tests.builders import make_node


@st.composite
def fleets(draw: st.DrawFn) -> list[Node]:
    found = []
    for number in range(draw(st.integers(0, 6))):
        node = make_node(f"n{number}", draw(st.integers(0, 3)), cpus=draw(st.sampled_from([8, 64])))
        devices = tuple(replace(device, healthy=draw(st.booleans())) for device in node.devices)
        extras = draw(st.sampled_from([(), (("nic", 2),), (("nic", 1), ("scratch", 5))]))
        state = draw(st.sampled_from([NodeState.UP, NodeState.DOWN]))
        found.append(replace(node, devices=devices, extras=extras, state=state))
    return found


@given(fleets(), st.integers(0, 2))
def test_counts_are_those_of_the_nodes(nodes: list[Node], startable: int) -> None:
    pooled = [make_node(f"pool-{number}", 2) for number in range(startable)]
    counts = FleetCounts(nodes, pooled, NodeKinds())
    every = [*nodes, *pooled]
    assert counts.schedulable() == summary_of([node for node in nodes if node.schedulable])
    assert counts.resources() == (nodes_resources(every), nodes_resources(every, healthy=True))
