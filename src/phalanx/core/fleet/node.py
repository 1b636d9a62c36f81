"""One server of the fleet, and what keeps new work off it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phalanx.core.fleet.device import Device
from phalanx.core.ids import NodeId, SupervisorId


class NodeState(enum.StrEnum):
    """UP: its supervisor renews its lease. DOWN: it died, or its lease ran out. Unknown counts as DOWN."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """No new allocations; with `drain` the running ones are moved or awaited too."""

    by: str
    why: str
    since_s: float
    drain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server. Times are Unix seconds.

    Attributes:
        supervisor_id: the life of the supervisor that last said hello; a restarted one has another.
        address: where other nodes reach its ranks.
        boot_id: the kernel's; a change means that nothing from before still runs.
        virtual: its devices are slots on CPU.
        down_cause: why it is DOWN, for people; empty while UP.
    """

    id: NodeId
    engine: str
    devices: tuple[Device, ...]
    cpus: int
    memory_bytes: int
    state: NodeState
    supervisor_id: SupervisorId | None = None
    address: str = "127.0.0.1"
    hostname: str = ""
    boot_id: str = ""
    virtual: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    cordon: Cordon | None = None
    joined_s: float = 0.0
    changed_s: float = 0.0
    down_cause: str = ""
    failures: int = 0

    @property
    def schedulable(self) -> bool:
        """Whether new allocations may land here."""
        return self.state is NodeState.UP and self.cordon is None
