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
COUNT_MAX: Final = 1 << 60  # of anything on one server; an exbibyte of memory


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
        runs_as: its supervisor runs jobs as the accounts of their owners; this one is its own, which alone sees the head's folders. Empty
            where all jobs run as one account.
        marks: what recently counted against it, as a sum that fades (`core.recovery.lemon`); as of `marked_s`.
        lemon: why it fails gangs more than others do, for people; work goes here only if nothing else fits. Empty for a sound node.
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
    runs_as: str = ""
    marks: float = 0.0
    marked_s: float = 0.0
    lemon: str = ""

    def miscounted(self) -> str:
        """Which of the counts that a supervisor gave can be none; empty for a node that can be counted with."""
        counts = {
            "cpus": self.cpus, "memory_bytes": self.memory_bytes, "others.cpus": self.others.cpus,
            "others.memory_bytes": self.others.memory_bytes, "probe_port": self.probe_port, "failures": self.failures,
            **{f"devices[{at}].index": one.index for at, one in enumerate(self.devices)},
            **{f"devices[{at}].memory_bytes": one.memory_bytes for at, one in enumerate(self.devices)},
        }  # fmt: skip
        found = next((f"{name} is {count}" for name, count in counts.items() if not 0 <= count <= COUNT_MAX), "")
        if not found and len({one.index for one in self.devices}) < len(self.devices):
            found = "two devices have one index"
        return found

    @property
    def last_choice(self) -> bool:
        """Whether work comes here only if nothing else fits."""
        return bool(self.slow or self.lemon)

    @property
    def schedulable(self) -> bool:
        """Whether new allocations may land here."""
        return self.state is NodeState.UP and self.cordon is None
