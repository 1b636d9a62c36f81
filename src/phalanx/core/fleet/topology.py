"""Network topology: a tree of levels, read from the labels of the nodes. Gang placement looks up here which nodes are near each other.

A node states its position by labels named after the levels (`leaf: l3`, `rack: r17`). Only levels that some node is labelled with exist; the
node itself is the last level, which always exists and is never listed. Domains nest: a domain is its path, so rack `r1` under leaf `a` and
rack `r1` under leaf `b` are two. A node without a label at a level that others have is alone in a domain of its own under its parent, and
likewise at every level further in: two nodes of unknown position must not count as near, even if both name the same rack of an unknown leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.node import Node

# Outermost first; node labels. "nvlink" is an NVLink domain of several nodes (a rack of NVL72); links inside a node need no
# level, since devices of one node are always nearer to each other than any two nodes.
LEVELS: Final = ("spine", "leaf", "rack", "nvlink")
NODE_LEVEL: Final = "node"  # the last level, implied: what a user writes to keep a gang on one node

_Path = tuple[
    tuple[int, str], ...
]  # (0, label), or (1, node id) for a domain of the node's own, which no label can collide with


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyTree:
    """The domains of a fleet, by position: the n-th node of the sequence it was built from.

    Attributes:
        levels: names of the levels that exist, outermost first; empty if no node has topology labels.
        domains: per level, the domain of each node. Domains of a level are numbered from 0 in the order of their paths.
        names: per level, each domain's path for messages ("s0/l3"); a domain without a label is named after its only node.
        node_ids: id of each node.
    """

    levels: tuple[str, ...]
    domains: tuple[tuple[int, ...], ...]
    names: tuple[tuple[str, ...], ...]
    node_ids: tuple[str, ...]

    def level(self, name: str) -> int:
        """Number of the level; `len(levels)` for "node", -1 if this fleet has no such level."""
        if name == NODE_LEVEL:
            return len(self.levels)
        return self.levels.index(name) if name in self.levels else -1

    def order_keys(self) -> tuple[tuple[int, str], ...]:
        """A sort key for each position: sorted by it, neighbours in the tree are adjacent, and each domain is one contiguous run."""
        innermost = self.domains[-1] if self.domains else (0,) * len(self.node_ids)
        return tuple(zip(innermost, self.node_ids, strict=True))

    def sorted_positions(self) -> tuple[int, ...]:
        """Positions sorted by `order_keys`."""
        keys = self.order_keys()
        return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def build_topology_tree(nodes: Sequence[Node]) -> TopologyTree:
    """The tree that the labels describe. A node given twice (one number per kind of device) is in the same domains twice."""
    levels = tuple(level for level in LEVELS if any(node.labels.get(level) for node in nodes))
    paths = [_path(node, levels) for node in nodes]
    domains, names = [], []
    for depth in range(1, len(levels) + 1):
        known = sorted({path[:depth] for path in paths})
        number = {path: position for position, path in enumerate(known)}
        domains.append(tuple(number[path[:depth]] for path in paths))
        names.append(tuple("/".join(word for _, word in path) for path in known))
    return TopologyTree(
        levels=levels, domains=tuple(domains), names=tuple(names), node_ids=tuple(str(node.id) for node in nodes)
    )


def _path(node: Node, levels: Sequence[str]) -> _Path:
    labels = [node.labels.get(level, "") for level in levels]
    return tuple((0, label) if label else (1, str(node.id)) for label in labels)
