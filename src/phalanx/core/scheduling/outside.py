"""Usage outside Phalanx on a shared engine: counted when the board is built, updated by the difference when it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.core.fleet.node import Others
from phalanx.core.ids import NodeId
from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.fit import Fit
from phalanx.core.scheduling.policy import Seen
from phalanx.core.state.snapshot import EMPTY_USAGE


def held_outside(fit: Fit, seen: Seen, node_ids: Iterable[NodeId]) -> dict[int, int]:
    """Devices in use that belong to no attempt, for each number of the nodes. Cost: the nodes, and one pass over all attempts."""
    own_usage: dict[NodeId, set[int]] = {node_id: set() for node_id in node_ids}
    for attempt in seen.attempts.values():
        for grant in attempt.allocation.grants:
            if grant.node_id in own_usage:
                own_usage[grant.node_id].update(grant.devices)
    found: dict[int, int] = {}
    for node_id, own in own_usage.items():
        held = seen.usage.get(node_id, EMPTY_USAGE).devices - own
        for number in fit.numbers[node_id]:
            found[number] = sum(index in held for index in fit.indices[number]) if held else 0
    return found


def take_difference(board: Board, fit: Fit, seen: Seen, before: Mapping[NodeId, Others]) -> set[int]:
    """Update the board for nodes whose foreign usage was `before`; returns the numbers where it increased."""
    increased: set[int] = set()
    for number, count in held_outside(fit, seen, before).items():
        node = fit.nodes[number]
        old, new = before[node.id], node.others
        more = count - board.outside.get(number, 0)
        cpus, memory_bytes = new.cpus - old.cpus, new.memory_bytes - old.memory_bytes
        board.hold_outside(number, count, cpus=cpus, memory_bytes=memory_bytes)
        if more > 0 or cpus > 0 or memory_bytes > 0:
            increased.add(number)
    return increased
