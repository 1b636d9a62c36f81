"""The nodes of a fleet counted by their facts: 12,500 nodes are a handful of counts, from which capacity and summary follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.summary import FleetSummary, NodeCapacityKind, NodeKinds, kinds_of_facts, summary_from_counts
from phalanx.core.resources import MILLI_PER_DEVICE, Resources, extras_of


class FleetCounts:
    """Counts of one state of the nodes; computed at the first use. Safe for several threads: a race only repeats work.

    Args:
        nodes: that have joined, in any state.
        startable: that pools can start.
        kinds: what is known of the nodes.
    """

    __slots__ = ("_counts", "_kinds", "_nodes", "_startable")

    def __init__(self, nodes: Iterable[Node], startable: Iterable[Node], kinds: NodeKinds) -> None:
        self._nodes, self._startable, self._kinds = list(nodes), list(startable), kinds
        self._counts: Counter[NodeCapacityKind] | None = None

    def resources(self) -> tuple[Resources, Resources]:
        """What all nodes have together, with and without broken devices. Equal are one object."""
        return counted_resources(self._all())

    def schedulable(self) -> FleetSummary:
        """The summary of the nodes that accept work now: of all without the others, which are few."""
        others = [node for node in self._nodes if not node.schedulable]
        counts = self._all() - self._kinds.count([*others, *self._startable])
        return summary_from_counts(kinds_of_facts(counts))

    def _all(self) -> Counter[NodeCapacityKind]:
        if self._counts is None:
            self._counts = self._kinds.count([*self._nodes, *self._startable])
        return self._counts


def counted_resources(counts: Mapping[NodeCapacityKind, int]) -> tuple[Resources, Resources]:
    """What nodes counted by facts have together, with and without broken devices. Equal are one object."""
    devices = broken = cpus = memory_bytes = 0
    extras: list[tuple[str, int]] = []
    for facts, number in counts.items():
        devices += facts.devices * number
        broken += facts.broken * number
        cpus += facts.kind.cpus * number
        memory_bytes += facts.kind.memory_bytes * number
        extras += [(name, amount * number) for name, amount in facts.kind.extras]
    whole = Resources(devices * MILLI_PER_DEVICE, cpus, memory_bytes, extras_of(extras))
    return whole, replace(whole, milli=whole.milli - broken * MILLI_PER_DEVICE) if broken else whole
