"""What a job asked for and what it used, as the checks of advice read it. None and empty mean unknown, never zero."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.fleet.mig import MigProfile
from phalanx.core.ids import JobId
from phalanx.core.work.gpus import GpuRequest

OBSERVED_MIN: Final = 0.5  # of the run, covered by samples; below that the use is unknown


class Topic(enum.StrEnum):
    """What advice decides. Of the checks that decide the same, one speaks."""

    GPUS = "gpus"
    LOADER = "loader"  # how fast data comes
    CPUS = "cpus"
    MEMORY = "memory"
    TIME = "time"
    CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvidence:
    """One device that the job held alone. `mean` and `peak`: utilization, 0 to 1."""

    mean: float | None = None
    peak: float = 0.0
    memory_peak_bytes: int | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """One node of the job.

    Attributes:
        busy_cpus: CPU time of the job there per second of its run.
        memory_peak_bytes: of all its processes together.
        cpus, memory_bytes, gpus: of the whole node; 0 if it left the fleet.
    """

    devices: tuple[DeviceEvidence, ...] = ()
    busy_cpus: float | None = None
    memory_peak_bytes: int | None = None
    cpus: int = 0
    memory_bytes: int = 0
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvidence:
    """The checkpoints of a job that reports steps.

    Attributes:
        count: complete ones.
        interval_s: of training between two, in the mean; 0 with fewer than two.
        wanted_s: the optimum for the measured stall (`core.recovery.interval`), within the bounds of phalanx.torch; 0 without a checkpoint.
        stall_s: for which one stalls training, in the mean.
        step_s: of one step, in the mean; 0 if unknown.
        trained_s: from the first step to the last.
    """

    count: int
    interval_s: float = 0.0
    wanted_s: float = 0.0
    stall_s: float = 0.0
    step_s: float = 0.0
    trained_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """A GPU model of the fleet: its name in a request, and its memory."""

    model: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvidence:
    """A job, judged by its longest attempt.

    Attributes:
        run_s: from the start of the tasks to the end, or to now.
        held_s: from the placement to then: what the time limit counts.
        gpus: as requested.
        roles: of its gang; flags of the command line name only one.
        service: it is a replica of a service.
        cpus, memory_bytes: requested for each node; 0 for none.
        tasks_per_node: tasks that start on each node; `tasks_fixed`: their number was asked for.
        succeeded: it ended well; another end says nothing about the time that it needs.
        by_state: GPU-seconds of all attempts by state of the ledger.
        counter: of the utilization.
        mig: slices that the fleet makes of the model it used, with the name of that model.
        lesser_kinds: models of the fleet with less computing power than the one it used, the least first.
    """

    job_id: JobId
    run_s: float
    held_s: float
    gpus: GpuRequest
    nodes: tuple[NodeEvidence, ...]
    roles: int = 1
    service: bool = False
    cpus: int = 0
    memory_bytes: int = 0
    tasks_per_node: int = 1
    tasks_fixed: bool = False
    time_limit_s: float | None = None
    succeeded: bool = False
    by_state: Mapping[str, float] = field(default_factory=dict)
    saves: SaveEvidence | None = None
    counter: str = ""
    mig: tuple[tuple[str, MigProfile], ...] = ()
    lesser_kinds: tuple[GpuKind, ...] = ()

    @property
    def devices(self) -> tuple[DeviceEvidence, ...]:
        """All devices, node by node."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds held."""
        return sum(self.by_state.values())

    @property
    def means(self) -> tuple[float, ...]:
        """The mean utilization of each device; empty if that of one is unknown, or a device is shared."""
        means = [device.mean for device in self.devices if device.mean is not None]
        return tuple(means) if self.gpus.share is None and len(means) == len(self.devices) else ()

    @property
    def peak_memory_bytes(self) -> int | None:
        """The highest memory of a device; None if that of one is unknown."""
        peaks = [device.memory_peak_bytes for device in self.devices if device.memory_peak_bytes is not None]
        return max(peaks) if peaks and len(peaks) == len(self.devices) else None

    @property
    def fixed(self) -> bool:
        """Whether one role asks for whole GPUs in one shape, so that another number can be written in its place."""
        plain = self.gpus.share is None and not self.gpus.alternatives and self.gpus.nodes_max is None
        return plain and self.roles == 1

    @property
    def busy_cpus(self) -> float | None:
        """The mean of CPUs in use on a node; None if that of one is unknown."""
        known = [node.busy_cpus for node in self.nodes if node.busy_cpus is not None]
        return sum(known) / len(known) if known and len(known) == len(self.nodes) else None

    @property
    def host_peak_bytes(self) -> int | None:
        """The highest host memory of a node; None if that of one is unknown."""
        known = [node.memory_peak_bytes for node in self.nodes if node.memory_peak_bytes is not None]
        return max(known) if known and len(known) == len(self.nodes) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change for the next run.

    Attributes:
        check: its name in the table of checks.
        measured: what was found, with numbers.
        change: what to do.
        settings: exactly what to write: keys of a job file, which replace those of the same name, each with its value.
        code: what to write in the program instead; "" if it is settings.
        gpu_hours: of this run, that it would have saved.
    """

    check: str
    measured: str
    change: str
    settings: tuple[tuple[str, str], ...] = ()
    code: str = ""
    gpu_hours: float = 0.0
