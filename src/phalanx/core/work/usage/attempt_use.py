"""What an attempt used of its devices and nodes, as its supervisors measured it. Stored beside the attempt, so that it outlives a head."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import Epoch, Generation, JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One device that the attempt held alone; a shared device says nothing about one job.

    Attributes:
        observed_ms: time that its samples cover.
        busy_ms: the utilization, 0 to 1, times that time: their quotient is the mean. None if the device does not report it.
        peak: the highest utilization, 0 to 1.
        memory_peak_bytes: the highest memory of all processes; None if the device does not report it.
        memory_bytes: of the device; 0 if unknown.
    """

    node: NodeId
    index: int
    observed_ms: int = 0
    busy_ms: float | None = None
    peak: float = 0.0
    memory_peak_bytes: int | None = None
    memory_bytes: int = 0

    @property
    def mean(self) -> float | None:
        """The mean utilization, 0 to 1; None if unknown."""
        return None if self.busy_ms is None or not self.observed_ms else self.busy_ms / self.observed_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """The processes of the attempt on one node.

    Attributes:
        generation: the newest that was sampled.
        earlier_cpu_s: CPU time of the generations before it.
        generation_cpu_s: CPU time of that generation so far.
        memory_peak_bytes: the highest memory of all processes together.
        observed_ms: time that the samples cover.
    """

    node: NodeId
    generation: Generation
    earlier_cpu_s: float = 0.0
    generation_cpu_s: float = 0.0
    memory_peak_bytes: int = 0
    observed_ms: int = 0

    @property
    def cpu_s(self) -> float:
        """CPU time of all generations."""
        return self.earlier_cpu_s + self.generation_cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptUse:
    """One attempt. `counter`: of the utilization; devices and nodes without samples are absent."""

    job_id: JobId
    epoch: Epoch
    counter: str
    devices: tuple[DeviceUse, ...]
    nodes: tuple[NodeUse, ...]
