"""One server of the fleet, and what keeps new work off it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.nic import Nic
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
class Others:
    """What is held on a node of a shared engine outside Phalanx.

    Attributes:
        devices: indices that nobody of ours is given; where the engine picks devices only their number says something.
        who: for people, as "Slurm job 812 of alice".
    """

    devices: tuple[int, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    who: tuple[str, ...] = ()


NO_OTHERS: Final = Others()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server. Times are Unix seconds.

    Attributes:
        supervisor_id: the life of the supervisor that last said hello; a restarted one has another.
        address: where other nodes reach its ranks.
        boot_id: the kernel's; a change means that nothing from before still runs.
        virtual: its devices are slots on CPU.
        down_cause: why it is DOWN, for people; empty while UP.
        per_attempt: its engine brings a supervisor for each attempt; the node itself has none, and no lease.
        others: what is held here outside Phalanx.
        nics: its network ports, as its supervisor found them when it started.
        probe_port: where its supervisor answers other nodes' probes of the link between them; 0 where it does not.
        slow: what the last calibration found too slow, for people; work goes here only if nothing else fits. Empty for a sound node.
        sees_head_files: it has proven that the head's checkpoints and outputs lie under the same paths here.
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
    per_attempt: bool = False
    others: Others = NO_OTHERS
    slow: str = ""
    nics: tuple[Nic, ...] = ()
    probe_port: int = 0
    sees_head_files: bool = False

    @property
    def schedulable(self) -> bool:
        """Whether new allocations may land here."""
        return self.state is NodeState.UP and self.cordon is None
