"""Records of node pools."""

from __future__ import annotations

import msgspec

from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.ids import NodeId, PoolId
from phalanx.wire.api.jobs import ImpossibleJobView


class PoolNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a pool. `why`: why it was ordered, is down, or is released."""

    id: NodeId
    state: PoolNodeState
    requested_s: float
    changed_s: float
    why: str = ""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A node pool.

    Attributes:
        node: what its provider starts, such as "h100-80gb:8".
        devices: of one node.
        price_per_h: of one node, in US dollars an hour.
        cost_per_h: of all nodes that it has now.
        idle_s: a node above the minimum is released after so long without a job.
        start_limit_s: a node that is not up so long after its request is given up.
        failure: why the last node was given up; empty once another came up.
        retry_at_s: no node is ordered before (Unix seconds); 0 without a failure.
    """

    id: PoolId
    provider: str
    node: str
    devices: int
    min_nodes: int
    max_nodes: int
    price_per_h: float
    cost_per_h: float
    idle_s: float
    start_limit_s: float
    zone: str = ""
    removing: bool = False
    failures: int = 0
    failure: str = ""
    retry_at_s: float = 0.0
    nodes: list[PoolNodeView] = []


class PoolList(msgspec.Struct, frozen=True, kw_only=True):
    """All node pools by name."""

    pools: list[PoolView]
    next: str = ""


class PoolReply(msgspec.Struct, frozen=True, kw_only=True):
    """One node pool."""

    pool: PoolView


class PoolBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a pool. Times are durations such as "5m"; `price_per_h`: of one node, in US dollars an hour."""

    provider: str
    node: str
    max_nodes: int
    min_nodes: int = 0
    price_per_h: float = 0.0
    idle: str = "5m"
    start_limit: str = "10m"
    zone: str = ""


class PoolRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """A pool releases its nodes and ends. `impossible`: the waiting jobs that can never start without it, at most 100."""

    impossible: list[ImpossibleJobView] = []
    impossible_more: int = 0
