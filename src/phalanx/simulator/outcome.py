"""What became of each job of a replay, and of the fleet: filled by the replays, read by the report and the drawings."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.simulator.trace import TraceJob


@dataclass(slots=True)
class Outcome:
    """What became of one job."""

    job: TraceJob
    first_start_s: float = -1.0
    end_s: float = -1.0
    wait_max_s: float = 0.0  # longest unbroken wait
    stops: int = 0
    moves: int = 0

    @property
    def jct_s(self) -> float:
        """From submit to end."""
        return self.end_s - self.job.submit_s

    @property
    def wait_s(self) -> float:
        """Everything that was not its own run: waiting, and work done twice."""
        return self.end_s - self.job.submit_s - self.job.duration_s


@dataclass(slots=True)
class Replayed:
    """One replay's outcomes by submit order, and the fleet's curve."""

    outcomes: list[Outcome]
    gpus: int
    preemptions: int = 0
    moves: int = 0
    lost_gpu_s: float = 0.0
    decisions: int = 0
    curve: list[tuple[float, int, int]] = field(default_factory=list)  # (time, GPUs held, jobs waiting)
    refused: list[tuple[TraceJob, str]] = field(default_factory=list)  # jobs no empty fleet could hold, and why
