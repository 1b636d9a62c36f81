"""Records of node pools."""

from __future__ import annotations

import msgspec

from phalanx.core.fleet.node_pool import PaidBy, PoolNodeState
from phalanx.core.ids import NodeId, PoolId
from phalanx.wire.api.jobs import ImpossibleJobView


class PoolNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a pool.

    Attributes:
        why: why it was ordered, is down, or is released.
        offer: by which it is started; empty if the pool has only one.
        machine: the provider's id of its machine.
        problem: why the provider could not answer the last call for it, or why it is not up yet.
    """

    id: NodeId
    state: PoolNodeState
    requested_s: float
    changed_s: float
    why: str = ""
    offer: str = ""
    machine: str = ""
    problem: str = ""


class PoolOfferView(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get a node of a pool. `refused_until_s`: it is not tried before (Unix seconds), and `why`; 0 if it may be tried now."""

    offer: str
    price_per_h: float
    refused_until_s: float = 0.0
    why: str = ""


class PoolConsoleView(msgspec.Struct, frozen=True, kw_only=True):
    """That the console output of a node is kept which never joined. `at_s`: when it was read (Unix seconds); `chars`: how much is kept."""

    node: NodeId
    machine: str
    at_s: float
    chars: int


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
        cap_per_h: all its nodes together cost at most so many US dollars an hour; None: no cap.
        settings: of its provider.
        offers: the ways to get a node, in the order in which they are tried; empty if there is only one.
        list_problem: why the provider could not list its machines the last time.
        cap_per_month: it orders no node with which it could cost more US dollars in a month (UTC); None: no cap.
        spent_this_month: by its nodes since the month began.
        egress_per_gb: US dollars for each 10^9 bytes that a job copies to its nodes, or back home.
        billed: by the `second`, or by the `hour` that has begun.
        boot_s: from the request of a node until it is up, smoothed over the last ones; 0 before the first.
        consoles: the newest nodes that never joined and whose console output is kept, the oldest first.
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
    cap_per_h: float | None = None
    settings: dict[str, str] = {}
    offers: list[PoolOfferView] = []
    list_problem: str = ""
    cap_per_month: float | None = None
    spent_this_month: float = 0.0
    egress_per_gb: float = 0.0
    billed: PaidBy = PaidBy.SECOND
    boot_s: float = 0.0
    nodes: list[PoolNodeView] = []
    consoles: list[PoolConsoleView] = []


class PoolList(msgspec.Struct, frozen=True, kw_only=True):
    """All node pools by name."""

    pools: list[PoolView]
    next: str = ""


class PoolReply(msgspec.Struct, frozen=True, kw_only=True):
    """One node pool."""

    pool: PoolView


class NodeConsoleReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine of a node printed while it booted: the end, without tokens of the head. `at_s`: when it was read (Unix seconds)."""

    node: NodeId
    machine: str
    at_s: float
    text: str


class PoolBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a pool. Times are durations such as "5m"; amounts are US dollars an hour.

    Attributes:
        provider, node: both empty for a pool that exists: its nodes stay as they are, and with them `zone`, `zones` and `settings`.
        price_per_h: of one node; None for the prices that the provider knows, or 0. Of a pool that exists: None for its price.
        cap_per_h: of all its nodes together; None for no cap.
        cap_per_month: of all its nodes together in a month (UTC), in US dollars; None for no cap, 0 to order none.
        egress_per_gb: US dollars for each 10^9 bytes that a job copies to its nodes, or back home.
        billed: by the `second`, or by the `hour` that has begun.
        zone: where the nodes are; `zones`: where a provider looks for them, in order.
        settings: of the provider, by name.
    """

    max_nodes: int
    provider: str = ""
    node: str = ""
    min_nodes: int = 0
    price_per_h: float | None = None
    cap_per_h: float | None = None
    cap_per_month: float | None = None
    egress_per_gb: float = 0.0
    billed: PaidBy = PaidBy.SECOND
    idle: str = "5m"
    start_limit: str = "10m"
    zone: str = ""
    zones: list[str] = []
    settings: dict[str, str] = {}


class CloudCheckBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider, and the settings that decide which credentials it uses, as for a pool."""

    provider: str
    settings: dict[str, str] = {}


class CloudRightView(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the provider needs to do. `allowed`: None if it cannot be tried without doing it; `why`: what the cloud said."""

    right: str
    allowed: bool | None = None
    why: str = ""


class CloudChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What the credentials of the head may do. `policy`: the least that is to be granted, in the cloud's own language."""

    rights: list[CloudRightView]
    policy: str = ""


class PoolRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """A pool releases its nodes and ends. `impossible`: the waiting jobs that can never start without it, at most 100."""

    impossible: list[ImpossibleJobView] = []
    impossible_more: int = 0
