"""Node pools: nodes that a provider starts when jobs need them, and the life of each such node.

A pooled node has a record of its own from the moment it is wanted, before any machine or supervisor exists. `Node` says what a supervisor
registered; `PoolNode` says what was ordered from the provider, so that nothing is ordered twice and nothing that runs is forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId, PoolId, UserId

POOL_NODES_MAX: Final = 256  # of one pool
RETURN_WAIT_S: Final = (
    60.0  # a pooled node that is DOWN for longer is released, and ordered again if it is still wanted
)
BACKOFF_S: Final = 30.0  # after the first node that did not come up; doubled by each further one
BACKOFF_MAX_S: Final = 1800.0


class PoolNodeState(enum.StrEnum):
    """Life of a pooled node: REQUESTED -> PROVISIONING -> UP -> DRAINING -> RELEASED, and DOWN from anywhere.

    REQUESTED: recorded; the provider has not confirmed the order. PROVISIONING: the provider starts it. UP: its supervisor has registered.
    DRAINING: it takes no new job, and is released once its jobs have left. DOWN: it did not start, or its supervisor is lost.
    RELEASED: the provider has confirmed that nothing of it runs; the record is removed in the same step.
    """

    REQUESTED = "requested"
    PROVISIONING = "provisioning"
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"
    RELEASED = "released"


COMING_STATES: Final = frozenset({PoolNodeState.REQUESTED, PoolNodeState.PROVISIONING})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTemplate:
    """What a node of a pool offers. `text`: as the operator wrote it, for the provider, such as `h100:8`."""

    text: str
    devices: tuple[Device, ...]
    cpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """A pool. Times are Unix seconds.

    Attributes:
        min_nodes, max_nodes: limits of its size; nodes that are requested or draining count.
        price_per_h: of one node, in US dollars an hour.
        zone: label `zone` of its nodes; empty for none.
        idle_s: a node above the minimum is released after so long without a job.
        start_limit_s: a node that is not up so long after its request is given up.
        next_number: of the next node's name; names are never used again while the pool exists.
        removing: the pool releases all its nodes and then ends.
        failures: nodes given up since the last one that came up.
        failure: why the last one was given up.
        retry_at_s: no node is ordered before.
    """

    id: PoolId
    provider: str
    template: NodeTemplate
    min_nodes: int
    max_nodes: int
    price_per_h: float
    idle_s: float
    start_limit_s: float
    by: UserId
    created_s: float = 0.0
    zone: str = ""
    next_number: int = 0
    removing: bool = False
    failures: int = 0
    failure: str = ""
    retry_at_s: float = 0.0

    @property
    def price_per_device_h(self) -> float:
        """Price of one device in US dollars an hour; of the node if it has none."""
        return self.price_per_h / max(1, len(self.template.devices))

    def waits_s(self, now_s: float) -> float:
        """How long it still orders no node, at `now_s`; 0 if it may. A wait beyond the longest one means that the clock was set."""
        wait_s = self.retry_at_s - now_s
        return wait_s if 0.0 < wait_s <= BACKOFF_MAX_S else 0.0

    def after_failure(self, why: str, now_s: float) -> NodePool:
        """With one more node given up: the next order waits longer."""
        wait_s = min(BACKOFF_S * 2.0 ** min(self.failures, 16), BACKOFF_MAX_S)
        return replace(self, failures=self.failures + 1, failure=why, retry_at_s=now_s + wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """A node of a pool. Times are Unix seconds.

    Attributes:
        token: idempotency token of the order; the provider starts at most one machine for it.
        changed_s: when it entered its state.
        why: why it was ordered, is down, or is released.
        given_up: it is DOWN for good and will be released. A DOWN node that is not may still return.
    """

    id: NodeId
    pool: PoolId
    token: str
    state: PoolNodeState
    requested_s: float
    changed_s: float
    why: str = ""
    given_up: bool = False

    @property
    def leaving(self) -> bool:
        """Whether it takes no new job and will be released."""
        return self.state is PoolNodeState.DRAINING or self.given_up

    def enters(self, state: PoolNodeState, now_s: float, why: str = "", *, given_up: bool = False) -> PoolNode:
        """The node in another state."""
        return replace(self, state=state, changed_s=now_s, why=why, given_up=given_up)


def next_life(member: PoolNode, pool: NodePool, node: Node | None, now_s: float, waited_s: float) -> PoolNode:
    """The pooled node after its supervisor's state and the time were looked at; itself if nothing changes.

    Args:
        member: the pooled node.
        pool: its pool.
        node: what its supervisor registered; None before it did.
        now_s: Unix seconds, for the record.
        waited_s: how long it has been starting, or DOWN, by a clock that is never set.
    """
    up = node is not None and node.state is NodeState.UP
    lost = "its record is gone" if node is None else node.down_cause
    match member.state:
        case PoolNodeState.REQUESTED | PoolNodeState.PROVISIONING:
            if up:
                return member.enters(PoolNodeState.UP, now_s)
            if waited_s >= pool.start_limit_s:
                why = f"it was not up {pool.start_limit_s:g} s after its request"
                return member.enters(PoolNodeState.DOWN, now_s, why, given_up=True)
        case PoolNodeState.UP:
            if not up:
                return member.enters(PoolNodeState.DOWN, now_s, lost)
        case PoolNodeState.DOWN if not member.given_up:
            if up:
                return member.enters(PoolNodeState.UP, now_s)
            if waited_s >= RETURN_WAIT_S:
                why = f"down for {RETURN_WAIT_S:g} s: {member.why}"
                return member.enters(PoolNodeState.DOWN, now_s, why, given_up=True)
        case PoolNodeState.DRAINING:
            if node is not None and not up:
                return member.enters(PoolNodeState.DOWN, now_s, f"{member.why}; {lost}", given_up=True)
        case PoolNodeState.DOWN | PoolNodeState.RELEASED:
            pass
    return member


def members_of(pool_id: PoolId, members: Mapping[NodeId, PoolNode]) -> list[PoolNode]:
    """The nodes of a pool, by id."""
    return sorted((member for member in members.values() if member.pool == pool_id), key=lambda member: member.id)


def template_node(pool: NodePool, node_id: NodeId) -> Node:
    """The node as it will register, by the pool's template."""
    return Node(
        id=node_id,
        engine=pool.provider,
        devices=pool.template.devices,
        cpus=pool.template.cpus,
        memory_bytes=pool.template.memory_bytes,
        state=NodeState.UP,
        labels={"zone": pool.zone} if pool.zone else {},
    )


def startable_nodes(
    pools: Iterable[NodePool], members: Mapping[NodeId, PoolNode], known: Mapping[NodeId, Node]
) -> Iterator[tuple[NodePool, Node]]:
    """Nodes that pools could still bring: ordered ones that have not registered, and one for each further node up to the maximum."""
    for pool in pools:
        if pool.removing:
            continue
        registered = sum(member.id in known for member in members.values() if member.pool == pool.id)
        for number in range(pool.max_nodes - registered):
            yield pool, template_node(pool, NodeId(f"{pool.id}+{number + 1}"))
