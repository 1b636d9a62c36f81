"""Builds an empty board from the records of a fleet: its pools, its quota tree, and usage outside Phalanx."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.ids import NodeId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.fit import Fit
from phalanx.core.scheduling.outside import held_outside
from phalanx.core.scheduling.policy import Seen
from phalanx.core.scheduling.pool import Pool
from phalanx.core.scheduling.quota import QuotaTree
from phalanx.core.state.snapshot import EMPTY_USAGE
from phalanx.core.work.queue import Queue


def new_board(fit: Fit, seen: Seen, restart_cost_s: float, wall_s: float) -> Board:
    """The board of a fleet: attempts are still to be adopted, usage outside Phalanx is already taken."""
    usage = {node_id: seen.usage.get(node_id, EMPTY_USAGE) for node_id in fit.numbers}
    own_usage: dict[NodeId, list[int]] = {}
    for attempt in seen.attempts.values():
        for grant in attempt.allocation.grants:
            booked = own_usage.setdefault(grant.node_id, [0, 0])
            booked[0] += grant.cpus
            booked[1] += grant.memory_bytes
    cpus = [node.cpus - usage[node.id].cpus + own_usage.get(node.id, (0, 0))[0] for node in fit.nodes]
    memory = [node.memory_bytes - usage[node.id].memory_bytes + own_usage.get(node.id, (0, 0))[1] for node in fit.nodes]
    sizes = fit.sizes
    pools = [
        Pool(
            [size if kind == own else -1 for size, kind in zip(sizes, fit.kind, strict=True)],
            tree=fit.tree,
            cpus=cpus,
            memory=memory,
        )
        for own in range(len(fit.kinds))
    ]
    quotas = None
    if any(_has_limits(queue) for queue in seen.queues.values()) or len(seen.queues) > 1:
        quotas = QuotaTree(seen.queues.values(), sum(sizes), seen.spent.values(), wall_s)
    board = Board(
        sizes,
        restart_cost_s=restart_cost_s,
        pools=pools,
        kind=fit.kind,
        quotas=quotas,
        cpus=cpus,
        memory=memory,
        twins=fit.twins,
        tree=fit.tree,
        lends=any(queue.quota_gpus is not None for queue in seen.queues.values()),
    )
    for number, count in held_outside(fit, seen, fit.numbers).items():
        board.hold_outside(number, count)
    return board


def _has_limits(queue: Queue) -> bool:
    """Whether the queue has any limit or weight."""
    return replace(queue, priority=0, open=True) != Queue(id=queue.id)
