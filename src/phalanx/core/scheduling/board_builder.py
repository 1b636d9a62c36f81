"""Builds an empty board from the records of a fleet, and updates its usage outside Phalanx on shared engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from phalanx.core.fleet.capacity import nodes_resources
from phalanx.core.fleet.node import ForeignUsage
from phalanx.core.ids import JobId, NodeId, QueueId
from phalanx.core.resources import NO_RESOURCES, Resources, extras_of
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.feasibility.cluster_limits import ClusterLimits
from phalanx.core.scheduling.fleet_index import FleetIndex
from phalanx.core.scheduling.pool import DevicePool
from phalanx.core.scheduling.quota import FairShareTree
from phalanx.core.scheduling.sharing.mig_pool import MigPool
from phalanx.core.state.snapshot import EMPTY_USAGE, Usage
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import seats_of
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, QueueUsage


class ClusterSnapshot(ClusterLimits, Protocol):
    """The state as the scheduler reads it: a world, or a snapshot of one. Never modified here."""

    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def usage(self) -> Mapping[NodeId, Usage]: ...  # noqa: D102
    @property
    def jobs(self) -> Mapping[JobId, Job]: ...  # noqa: D102
    @property
    def attempts(self) -> Mapping[JobId, Attempt]: ...  # noqa: D102
    @property
    def queue_usage(self) -> Mapping[QueueId, QueueUsage]: ...  # noqa: D102
    @property
    def licence_usage(self) -> Mapping[str, int]: ...  # noqa: D102


def free_licences(snapshot: ClusterSnapshot) -> dict[str, int]:
    """Free seats of each licence by the records."""
    return {
        licence.id: licence.total - snapshot.licence_usage.get(licence.id, 0) for licence in snapshot.licences.values()
    }


def foreign_devices_in_use(fit: FleetIndex, snapshot: ClusterSnapshot, node_ids: Iterable[NodeId]) -> dict[int, int]:
    """Devices in use that belong to no attempt, for each number of the nodes. Cost: the nodes, and one pass over all attempts."""
    own_usage: dict[NodeId, set[int]] = {node_id: set() for node_id in node_ids}
    for attempt in snapshot.attempts.values():
        for grant in attempt.allocation.grants:
            if grant.node_id in own_usage:
                own_usage[grant.node_id].update(grant.devices)
    found: dict[int, int] = {}
    for node_id, own in own_usage.items():
        held = snapshot.usage.get(node_id, EMPTY_USAGE).devices - own
        for number in fit.numbers_of_node[node_id]:
            counted = held and number not in fit.divisible  # slices of others are in the record of the device
            found[number] = sum(index in held for index in fit.healthy_devices[number]) if counted else 0
    return found


def apply_foreign_usage(
    board: Board, fit: FleetIndex, snapshot: ClusterSnapshot, before: Mapping[NodeId, ForeignUsage]
) -> set[int]:
    """Update the board for nodes whose foreign usage was `before`; returns the numbers where it increased."""
    increased: set[int] = set()
    for number, count in foreign_devices_in_use(fit, snapshot, before).items():
        node = fit.nodes[number]
        old, new = before[node.id], node.foreign_usage
        more = count - board.foreign_devices.get(number, 0)
        grown = new.host - old.host
        board.set_foreign_usage(number, count, cpus=grown.cpus, memory_bytes=grown.memory_bytes)
        if more > 0 or not grown.fits(NO_RESOURCES):
            increased.add(number)
    return increased


def build_board(fit: FleetIndex, snapshot: ClusterSnapshot, restart_cost_s: float, wall_s: float) -> Board:
    """The board of a fleet: attempts are still to be adopted, usage outside Phalanx is already taken."""
    usage = {node_id: snapshot.usage.get(node_id, EMPTY_USAGE) for node_id in fit.numbers_of_node}
    free = {node.id: node.host - usage[node.id].host for node in fit.nodes}
    for attempt in snapshot.attempts.values():
        for grant in attempt.allocation.grants:
            if grant.node_id in free:
                free[grant.node_id] += grant.host
    cpus = [free[node.id].cpus for node in fit.nodes]
    memory = [free[node.id].memory_bytes for node in fit.nodes]
    extras = {
        name: [dict(free[node.id].extras).get(name, 0) for node in fit.nodes]
        for name in sorted({name for node in fit.nodes for name, _ in node.extras})
    }
    sizes = fit.device_counts
    pools = [_pool(fit, own, cpus, memory, extras) for own in range(len(fit.device_models))]
    quotas = None
    if any(_has_limits(queue) for queue in snapshot.queues.values()) or len(snapshot.queues) > 1:
        quotas = FairShareTree(
            snapshot.queues.values(),
            nodes_resources(snapshot.nodes.values(), healthy=True)
            + Resources(extras=extras_of(seats_of(snapshot.licences))),
            snapshot.queue_usage.values(),
            wall_s,
        )
    board = Board(
        sizes,
        restart_cost_s=restart_cost_s,
        pools=pools,
        pool_of_node=fit.model_of_node,
        quotas=quotas,
        cpus=cpus,
        memory=memory,
        extras=extras,
        licences={licence.id: licence.total for licence in snapshot.licences.values()},
        twins=fit.twins,
        tree=fit.tree,
        has_lendable_quota=any(
            queue.quota_gpus is not None or queue.other_quotas for queue in snapshot.queues.values()
        ),
    )
    for number, count in foreign_devices_in_use(fit, snapshot, fit.numbers_of_node).items():
        board.set_foreign_usage(number, count)
    return board


def _pool(fit: FleetIndex, kind: int, cpus: list[int], memory: list[int], extras: dict[str, list[int]]) -> DevicePool:
    """The nodes of one kind, all free."""
    counts = zip(fit.device_counts, fit.model_of_node, strict=True)
    sizes = [size if of == kind else -1 for size, of in counts]
    divisible = {number: own for number, own in fit.divisible.items() if fit.model_of_node[number] == kind}
    if divisible:
        return MigPool(sizes, divisible, tree=fit.tree, cpus=cpus, memory=memory, extras=extras)
    return DevicePool(sizes, tree=fit.tree, cpus=cpus, memory=memory, extras=extras)


def _has_limits(queue: Queue) -> bool:
    """Whether the queue has any limit or weight. What it does about waste, and when it rents or moves jobs, are none."""
    return replace(queue, priority=0, open=True, idle=None, alarms=(), burst=None, min_stay_s=None) != Queue(
        id=queue.id
    )
