"""Records of nodes and their devices, of reservations, and of what a calibration found of the fleet."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, SupervisorId, UserId


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """A device, what holds it and its newest sample. `ranks` are those placed on it, where that is known; `outside`: others hold it.

    `nvlinks`: live links to each device of the node by index; `pcie`: "gen5 x16"; `numa`: its memory node.
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


class NicView(msgspec.Struct, frozen=True, kw_only=True):
    """A network port as the supervisor found it when it started. `kind`: "ethernet" or "infiniband"; what nobody tells is None."""

    name: str
    kind: str
    up: bool
    bits_per_s: int | None = None
    numa: int | None = None
    pci_bus: str = ""


class CordonView(msgspec.Struct, frozen=True, kw_only=True):
    """Who keeps new work off a node, and why."""

    by: str
    why: str
    since_s: float
    drain: bool = False


class ReservedView(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is set aside for, from `start_s` up to `end_s`. `holders`: "ada and queue nlp", or "maintenance"; `begun`: it is so now."""

    id: ReservationId
    start_s: float
    end_s: float
    holders: str
    begun: bool = False
    why: str = ""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node. `jobs` hold something on it; `reserved`: now or later, first to begin first; `sampled_s` is when its devices were last heard of, None if never in this life; `outside`: who holds some of it on a shared engine."""

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
    lemon: str = ""
    marks: float = 0.0
    supervisor_id: SupervisorId | None = None
    sampled_s: float | None = None
    load_1m: float | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    outside: list[str] = []
    nics: list[NicView] = []


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes by id."""

    nodes: list[NodeView]


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: NodeView


class LabelsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels by node; an empty text takes one away. All of them or, if one is wrong, none."""

    labels: dict[NodeId, dict[str, str]]


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cordon_only`: running jobs stay where they are."""

    why: str = ""
    cordon_only: bool = False


class ReservationView(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes set aside from `start_s` up to `end_s`. With neither users nor queues it is `maintenance`: nobody may use them."""

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


class ReservationList(msgspec.Struct, frozen=True, kw_only=True):
    """All that have not ended, first to begin first."""

    reservations: list[ReservationView]


class ReservationReply(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation."""

    reservation: ReservationView


class ReservationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `maintenance`, or the users and queues the nodes are for. `time` is how long, as "4h"; without `start_s` from now on."""

    nodes: list[NodeId]
    time: str
    start_s: float | None = None
    users: list[UserId] = []
    queues: list[QueueId] = []
    maintenance: bool = False
    why: str = ""


class ProfileReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the last calibration found, as `core.performance.profile` writes it; None where there was none.

    Attributes:
        stale: why it should be made again.
        slow: nodes that gave less than their peers.
    """

    profile: dict[str, Any] | None = None
    by: str = ""
    stored_s: float | None = None
    stale: list[str] = []
    slow: list[str] = []
