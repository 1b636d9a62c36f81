"""Records of nodes and their devices, of reservations, and of the fleet's calibration profile."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.fleet.mig import MigProfile, MigSlice, PlacementSource
from phalanx.core.fleet.node import LimitKind, NodeState
from phalanx.core.fleet.node_pool import PoolNodeState
from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, SupervisorId, UserId
from phalanx.wire.api.jobs import ImpossibleJobView


class ShareView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's part of a device. `gpus`: at most 1; `kind`: "mps", "time" or "mig"; `slices`: its MIG slices on the device."""

    job_id: JobId
    gpus: int | float
    kind: str
    slices: list[MigSlice] = []


class MigView(msgspec.Struct, frozen=True, kw_only=True):
    """How a device can be divided by MIG, as its supervisor found it at start.

    Attributes:
        on: MIG mode is on. Only an operator switches it, while the GPU is idle.
        source: of the starts of the profiles.
        profiles: what it can be divided into, with the memory slices at which each can start; empty while MIG mode is off.
        slices: that exist and are not of Phalanx.
        room: by profile, how many fit at once beside these slices and those of jobs.
        closed_reason: why no slices can be made here; empty if they can.
    """

    on: bool
    source: PlacementSource
    profiles: list[MigProfile] = []
    slices: list[MigSlice] = []
    room: dict[str, int] = {}
    closed_reason: str = ""


class PowerLimitsView(msgspec.Struct, frozen=True, kw_only=True):
    """The power limit of a device in watts: now, before a cap (None if Phalanx did not change it), by default, and the range in which it can be set."""

    limit_w: float
    default_w: float
    min_w: float
    max_w: float
    original_w: float | None = None


class PowerCapView(msgspec.Struct, frozen=True, kw_only=True):
    """A cap on the power of each GPU of a node, in watts. `until_s`: None for no end; `applied`: its supervisor has set it."""

    limit_w: float
    by: str
    since_s: float
    until_s: float | None = None
    applied: bool = False


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """A device, the job that holds it, and its newest sample. `ranks`: those on it, if known; `outside`: held outside Phalanx.

    `shares`: the jobs that share it, if they do; then `job_id` is the first of them.

    `nvlinks`: live links to each device of the node by index; `pcie`: "gen5 x16"; `numa`: its memory node; `mig`: None if MIG cannot divide it.
    `power_limits`: None if it has none.
    """

    index: int
    uuid: str
    model: str
    memory_bytes: int
    virtual: bool = False
    healthy: bool = True
    job_id: JobId | None = None
    ranks: list[int] = []
    counter: str = ""
    utilization: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: list[str] = []
    outside: bool = False
    nvlinks: list[int] = []
    pci_bus: str = ""
    pcie: str = ""
    numa: int | None = None
    shares: list[ShareView] = []
    mig: MigView | None = None
    power_limits: PowerLimitsView | None = None


class NicView(msgspec.Struct, frozen=True, kw_only=True):
    """A network port when the supervisor started. `kind`: "ethernet" or "infiniband"; unknown values are None."""

    name: str
    kind: str
    up: bool
    bits_per_s: int | None = None
    numa: int | None = None
    pci_bus: str = ""


class CordonView(msgspec.Struct, frozen=True, kw_only=True):
    """Who cordoned a node, and why."""

    by: str
    why: str
    since_s: float
    drain: bool = False


class ReservedView(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation of a node from `start_s` to `end_s`. `holders`: "ada and queue nlp", or "maintenance"; `begun`: it is active.

    `open_ended`: at the start the node is drained until it is returned. `stops`: the jobs on the node that the start stops.
    """

    id: ReservationId
    start_s: float
    end_s: float
    holders: str
    begun: bool = False
    why: str = ""
    open_ended: bool = False
    stops: list[JobId] = []


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node.

    Attributes:
        jobs: that hold resources on it.
        reserved: active and later reservations, by start.
        sampled_s: time of the newest sample of its devices; None if none came since the head started.
        outside: who holds resources of it outside Phalanx, on a shared cluster.
        limits: what enforces CPUs and memory of jobs there; None while no supervisor has run there.
        extras, extras_used: named amounts that it offers, and that jobs hold; sizes in bytes.
        power_cap: None without one.
        mounts_error: why it cannot mount object stores; empty if it can, or does not say.
        power_error: why its power limits could not be set or restored; empty if they could.
        version: release of its supervisor; empty if it is not known.
        provisioning: for which job an autoscaler still has to start the machine of this declared place; empty if that is not so.
        pool, pool_state, price_per_h: the pool that started it, its state there, and its price in US dollars an hour; empty and None if none did.
    """

    id: NodeId
    state: NodeState
    engine: str
    devices: list[DeviceView]
    cpus: int
    memory_bytes: int
    address: str = ""
    hostname: str = ""
    virtual: bool = False
    labels: dict[str, str] = {}
    cordon: CordonView | None = None
    reserved: list[ReservedView] = []
    jobs: list[JobId] = []
    joined_s: float = 0.0
    changed_s: float = 0.0
    down_cause: str = ""
    failures: int = 0
    slow: str = ""
    bad_node: str = ""
    marks: float = 0.0
    supervisor_id: SupervisorId | None = None
    sampled_s: float | None = None
    load_1m: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    outside: list[str] = []
    nics: list[NicView] = []
    limits: LimitKind | None = None
    mounts_error: str = ""
    extras: dict[str, int] = {}
    extras_used: dict[str, int] = {}
    pool: str = ""
    pool_state: PoolNodeState | None = None
    price_per_h: float | None = None
    power_cap: PowerCapView | None = None
    power_error: str = ""
    version: str = ""
    provisioning: str = ""


def node_state(node: NodeView) -> str:
    """Return the state of a node in one word: `up`, or why it takes no new work."""
    if node.state is NodeState.DOWN:
        return "down"
    if node.cordon is None and node.provisioning:
        return "provisioning"
    if node.cordon is None:
        return "reserved" if any(reserved.begun for reserved in node.reserved) else "up"
    if not node.cordon.drain:
        return "cordoned"
    return "draining" if node.jobs else "drained"


class OrderedNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a pool has ordered and whose supervisor has not registered: requested, provisioning, or given up and down or draining.

    Attributes:
        node: what the provider starts, such as "h100-80gb:8".
        model, gpus: of its devices.
        price_per_h: in US dollars an hour, from `requested_s` on.
        why: the jobs that it is for and why it is not up yet, or why it is given up.
    """

    id: NodeId
    state: PoolNodeState
    pool: str
    provider: str
    node: str
    model: str
    gpus: int
    price_per_h: float
    requested_s: float
    changed_s: float
    why: str = ""


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes by id, and those that pools have ordered and that are not there yet."""

    nodes: list[NodeView]
    ordered: list[OrderedNodeView] = []
    next: str = ""


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: NodeView


class NodeRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """A node was removed. `impossible`: the waiting jobs that can never start without it, at most 100; `impossible_more` counts the others."""

    impossible: list[ImpossibleJobView] = []
    impossible_more: int = 0


class LabelsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels by node; an empty value removes a label. If one is invalid, none is changed."""

    labels: dict[NodeId, dict[str, str]]


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cordon_only`: running jobs stay on the node."""

    why: str = ""
    cordon_only: bool = False


class PowerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cap on the power of each GPU, as "300W". `time`: how long, as "8h"; empty for no end."""

    limit: str
    time: str = ""


class ReservationView(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation of nodes from `start_s` to `end_s`. Without users and queues it is `maintenance`: no job may use them.

    `open_ended`: at the start the nodes are drained until an operator returns them; `end_s` has no meaning.
    """

    id: ReservationId
    nodes: list[NodeId]
    start_s: float
    end_s: float
    users: list[UserId] = []
    queues: list[QueueId] = []
    maintenance: bool = False
    begun: bool = False
    why: str = ""
    by: str = ""
    open_ended: bool = False


class ReservationList(msgspec.Struct, frozen=True, kw_only=True):
    """All reservations that have not ended, by start."""

    reservations: list[ReservationView]
    next: str = ""


class ReservationReply(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation."""

    reservation: ReservationView


class ReservationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `maintenance`, or the users and queues that may use the nodes. `time`: the duration, as "4h"; without `start_s` it begins now.

    Maintenance without `time` drains the nodes at the start, until an operator returns them. With `open_cordoned`, nodes that an operator
    cordoned are open to the users and queues until the end, and then cordoned again.
    """

    nodes: list[NodeId]
    open_cordoned: bool = False
    time: str = ""
    start_s: float | None = None
    users: list[UserId] = []
    queues: list[QueueId] = []
    maintenance: bool = False
    why: str = ""


class ProfileReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last calibration, as `core.performance.profile` writes it; None without one.

    Attributes:
        stale: reasons to calibrate again.
        slow: nodes that were slower than their peers.
    """

    profile: dict[str, Any] | None = None
    by: str = ""
    stored_s: float | None = None
    stale: list[str] = []
    slow: list[str] = []


class NodeTestsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one test job measured. `drain`: cordon nodes that fail. `threshold`: share below the median of their kind that fails."""

    profile: dict[str, Any]
    threshold: float | None = None
    drain: bool = True


class NodeTestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The tests of one node, oldest first; `cordoned`: why it is cordoned now."""

    node: NodeId
    tests: list[NodeTestView] = []
    cordoned: str = ""


class NodeTestsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Tests by node."""

    nodes: list[NodeTestsView] = []


class NodeTestView(msgspec.Struct, frozen=True, kw_only=True):
    """One test. `passed`: None if there was nothing to compare with; `threshold` and `peers` as in the record."""

    at_s: float
    by: str
    job: str
    passed: bool | None
    why: str
    threshold: float
    peers: int
    rates: list[NodeRateView]


class NodeRateView(msgspec.Struct, frozen=True, kw_only=True):
    """One rate in FLOP/s or bytes/s, the table's figure for the model, and the median of the kind."""

    what: str
    value: float
    table: float | None = None
    median: float | None = None
    why: str = ""
