"""The results of a replay, per job and for the fleet: filled by the replays, read by report and charts."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.simulator.rented_nodes import RentedNode
from phalanx.simulator.trace import TraceJob

PROGRESS_EVERY: Final = 1024  # ends between two reports of progress


class ReplayEvent(enum.StrEnum):
    """An event of a job in a replay."""

    START = "start"
    STOP = "stop"  # preempted, or moved: then a start follows at once
    END = "end"


ReplayListener = Callable[[float, ReplayEvent, TraceJob, tuple[tuple[str, int], ...]], None]
"""Called with the time in seconds, the event, the job, and of a start the nodes with the number of GPUs on each."""


@dataclass(slots=True)
class ReplayedJob:
    """The result of one job. Negative times are not known yet."""

    job: TraceJob
    first_start_s: float = -1.0
    end_s: float = -1.0
    longest_wait_s: float = 0.0  # longest unbroken wait
    preemptions: int = 0
    moves: int = 0
    ran_s: float = 0.0  # run time of kept work, on the GPUs that it had

    @property
    def jct_s(self) -> float:
        """Job completion time, from submit to end."""
        return self.end_s - self.job.submit_s

    @property
    def wait_s(self) -> float:
        """Completion time minus the run time on the fastest model: waiting, lost work, and time on slower GPUs."""
        return self.end_s - self.job.submit_s - self.job.run_time_min_s


@dataclass(slots=True)
class ReplayResult:
    """The result of one replay: jobs in submit order, and fleet use over time."""

    jobs: list[ReplayedJob]
    gpus: int
    preemptions: int = 0
    moves: int = 0
    lost_gpu_s: float = 0.0
    decisions: int = 0
    curve: list[tuple[float, int, int]] = field(default_factory=list)  # (time, GPUs held, jobs waiting)
    rented: list[RentedNode] = field(default_factory=list)
    unplaceable: list[tuple[TraceJob, str]] = field(default_factory=list)  # jobs that can never start, with the reason
