"""One server of the fleet, and the cordon that keeps new work off it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.nic import Nic
from phalanx.core.fleet.power_limits import PowerCap, PowerLimits
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.resources import Extras, Resources


class NodeState(enum.StrEnum):
    """UP: its supervisor renews its lease. DOWN: the node died, or its lease expired. An unknown node counts as DOWN."""

    UP = "up"
    DOWN = "down"


class LimitKind(enum.StrEnum):
    """What enforces the CPUs and the memory of jobs on a node."""

    CGROUP_V2 = "cgroup v2"
    CGROUP_V1 = "cgroup v1"
    WATCHDOG = "affinity and watchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """No new allocations; with `drain` the running ones are moved or awaited too.

    Attributes:
        remedy: the command that ends it, if only that does: a node's engine has it out of service.
    """

    by: str
    why: str
    since_s: float
    drain: bool = False
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDataset:
    """A complete copy of a dataset on a node. `key`: `core.work.job_file.data_sources.dataset_key`; `bytes_per_s`: how fast it was copied, 0 if unknown."""

    key: str
    size_bytes: int
    bytes_per_s: float = 0.0

    @property
    def valid(self) -> bool:
        """Whether its numbers can be true."""
        return 0 <= self.size_bytes <= COUNT_MAX and 0.0 <= self.bytes_per_s <= COUNT_MAX and len(self.key) <= _KEY_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignUsage:
    """Resources of a node on a shared engine that jobs outside Phalanx use.

    Attributes:
        devices: indices that are not given to our jobs; only their count matters if the engine itself picks the devices.
        owners: for messages, as "Slurm job 812 of alice".
    """

    devices: tuple[int, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    owners: tuple[str, ...] = ()

    @property
    def host(self) -> Resources:
        """What is used besides devices."""
        return Resources(0, self.cpus, self.memory_bytes)


NO_FOREIGN_USAGE: Final = ForeignUsage()
DATASETS_MAX: Final = 256  # that a node reports; 16 KiB of its record
_KEY_MAX: Final = 64  # characters
COUNT_MAX: Final = 1 << 60  # of anything on one server; an exbibyte of memory


SITE_LABEL: Final = "site"
HOME_SITE: Final = "home"  # for messages: the site of nodes without that label


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A server. Times are Unix seconds.

    Attributes:
        supervisor_id: the incarnation of the supervisor that last registered; a restarted supervisor has another id.
        address: where other nodes reach its ranks.
        boot_id: the kernel's; a change means that no earlier process still runs.
        virtual: its devices are slots on the CPU.
        down_cause: why it is DOWN, for messages; empty while UP.
        per_attempt: its engine starts a supervisor for each attempt; the node itself has no supervisor and no lease.
        foreign_usage: usage by jobs outside Phalanx.
        nics: its network ports, as its supervisor found them at start.
        probe_port: where its supervisor answers link probes of other nodes; 0 if it does not.
        slow_reason: what the last calibration measured as too slow, for messages; the node is used only if nothing else fits. Empty for a good node.
        supervisor_account: the supervisor's own account, if it runs jobs under their owners' accounts; only this account sees the head's folders. Empty
            if all jobs run under one account.
        fault_score: decaying sum of recent faults (`core.recovery.bad_nodes`), computed at `fault_score_s`.
        bad_node_reason: why it fails gangs more often than other nodes, for messages; the node is used only if nothing else fits. Empty for a good node.
        shares_head_files: verified that the head's checkpoints and outputs have the same paths here.
        extras: named amounts that it offers, as its operator gave them: scratch space, network ports.
        limits: what enforces the limits of jobs, as its supervisor found at start; None before one reported it.
        power_limits: of each GPU that has one.
        power_cap: what an operator set; None without a cap.
        power_error: why the limits could not be set or restored, for messages.
        datasets: the datasets of which it has a copy, by key.
        version: release of its supervisor; empty of one that does not say.
        mounts_error: why it cannot mount object stores, and what to do, for messages; empty if it can, or does not say.
        provisioning_reason: of a declared place: for whom its engine's cluster still has to start the machine; empty if it has one, or none is needed.
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
    failure_count: int = 0
    per_attempt: bool = False
    foreign_usage: ForeignUsage = NO_FOREIGN_USAGE
    slow_reason: str = ""
    nics: tuple[Nic, ...] = ()
    probe_port: int = 0
    shares_head_files: bool = False
    supervisor_account: str = ""
    fault_score: float = 0.0
    fault_score_s: float = 0.0
    bad_node_reason: str = ""
    limits: LimitKind | None = None
    extras: Extras = ()
    power_limits: tuple[PowerLimits, ...] = ()
    power_cap: PowerCap | None = None
    power_error: str = ""
    version: str = ""
    datasets: tuple[HeldDataset, ...] = ()
    provisioning_reason: str = ""
    mounts_error: str = ""

    @property
    def site(self) -> str:
        """The network that it shares with the other nodes of its site: a gang never spans two sites. Empty for the site of most nodes."""
        return self.labels.get(SITE_LABEL, "")

    def invalid_count(self) -> str:
        """Which count reported by the supervisor is invalid; empty if all are valid."""
        counts = {
            "cpus": self.cpus,
            "memory_bytes": self.memory_bytes,
            "others.cpus": self.foreign_usage.cpus,
            "others.memory_bytes": self.foreign_usage.memory_bytes,
            "probe_port": self.probe_port,
            "failures": self.failure_count,
            **{f"extras.{name}": amount for name, amount in self.extras},
            **{f"devices[{at}].index": one.index for at, one in enumerate(self.devices)},
            **{f"devices[{at}].memory_bytes": one.memory_bytes for at, one in enumerate(self.devices)},
        }
        found = next((f"{name} is {count}" for name, count in counts.items() if not 0 <= count <= COUNT_MAX), "")
        if not found and len({one.index for one in self.devices}) < len(self.devices):
            found = "two devices have the same index"
        if not found and not all(one.valid for one in self.power_limits):
            found = "power_limits has a value that is no power"
        divided = ((at, one.mig.invalid()) for at, one in enumerate(self.devices) if one.mig is not None)
        return found or next((f"devices[{at}].mig has {wrong}" for at, wrong in divided if wrong), "")

    @property
    def host(self) -> Resources:
        """What the node has besides devices."""
        return Resources(0, self.cpus, self.memory_bytes, self.extras)

    @property
    def last_choice(self) -> bool:
        """Whether the node is used only if nothing else fits."""
        return bool(self.slow_reason or self.bad_node_reason)

    @property
    def cordoned_by_engine(self) -> bool:
        """Whether its engine keeps it out of service, so that only the engine's own tools return it."""
        return self.cordon is not None and self.cordon.by == self.engine

    @property
    def schedulable(self) -> bool:
        """Whether new allocations may use the node."""
        return self.state is NodeState.UP and self.cordon is None
