"""The nodes that cost money, as the scheduler uses them: last, and for a job only where the rule of its queue or project lets it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from phalanx.core.fleet.node_pool import NodePool, priced_nodes
from phalanx.core.ids import NodeId, PoolId, QueueId
from phalanx.core.scheduling.board_builder import ClusterSnapshot
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.order_rules import OrderRules
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue

CHECK_EVERY_S: Final = 10.0  # as often as the line is forecast


class RentedNodes:
    """The nodes of one fleet that cost money.

    Attributes:
        used_last: their names, if there are others with devices at all.
        bits: all of them, as a bitset.
    """

    def __init__(self) -> None:
        self.used_last: frozenset[NodeId] = frozenset()
        self.bits = 0
        self._by_pool: tuple[tuple[NodePool, tuple[NodeId, ...]], ...] = ()
        self._due_s = float("-inf")

    def update(self, snapshot: ClusterSnapshot, fleet: FleetIndex, known: Collection[NodeId]) -> None:
        """Take over which nodes cost money. `known`: the nodes of the scheduler."""
        priced = priced_nodes(snapshot.node_pools, snapshot.pool_nodes)
        owned = any(node.devices and node.id not in priced for node in fleet.nodes)
        self.used_last = priced if owned else frozenset()
        by_pool: dict[PoolId, list[NodeId]] = {}
        for name in sorted(priced.intersection(known)):
            by_pool.setdefault(snapshot.pool_nodes[name].pool, []).append(name)
        self.bits = fleet.bitset_of(priced)
        self._by_pool = tuple((snapshot.node_pools[pool], tuple(names)) for pool, names in by_pool.items())

    def kept_off(self, job: Job, rules: OrderRules[Any], queues: Mapping[QueueId, Queue], fleet: FleetIndex) -> int:
        """The nodes on which the rule of its queue or project lets the job not run, as a bitset."""
        return fleet.bitset_of(
            name for pool, names in self._by_pool if rules.keeps_off(job, pool, queues) for name in names
        )

    def check_is_due(self, now_s: float) -> bool:
        """Whether the rules are to be asked again for the jobs that wait; the next time is set then."""
        if not self._by_pool or now_s < self._due_s:
            return False
        self._due_s = now_s + CHECK_EVERY_S
        return True
