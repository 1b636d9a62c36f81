"""The data of a replay's charts: fleet use in equal time steps, and waits by job size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from phalanx.simulator.report import ReplayReport, quantile
from phalanx.simulator.results import ReplayResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy's replay of the trace."""

    policy: str
    report: ReplayReport
    parts: tuple[ReplayResult, ...]

    @property
    def start_s(self) -> float:
        """Time of the first submit."""
        return min(outcome.job.submit_s for part in self.parts for outcome in part.jobs)

    @property
    def end_s(self) -> float:
        """Time of the last end."""
        return max(outcome.end_s for part in self.parts for outcome in part.jobs)

    @property
    def gpus(self) -> int:
        """GPUs of the whole fleet."""
        return sum(part.gpus for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimeSeries:
    """The fleet over time, averaged over equal steps: share of own and rented GPUs in use, waiting jobs, and GPUs that were rented."""

    times_s: tuple[float, ...]  # middle of each step
    gpu_share: tuple[float, ...]
    waiting: tuple[float, ...]
    rented: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGroup:
    """Waits of the jobs in one range of sizes, in seconds."""

    sizes: str
    jobs: int
    mean_s: float
    p99_s: float


def fleet_time_series(run: PolicyRun, *, start_s: float, end_s: float, steps: int) -> FleetTimeSeries:
    """Average the run from `start_s` to `end_s` over `steps` steps. Cost: linear in the points of its curves."""
    step_s = (end_s - start_s) / steps or 1.0
    held, waiting, rented = [0.0] * steps, [0.0] * steps, [0.0] * steps
    for part in run.parts:
        points = [*part.curve, (end_s, 0, 0)]
        for (from_s, gpus, jobs), (to_s, _, _) in pairwise(points):
            _spread(held, gpus, (from_s - start_s) / step_s, (to_s - start_s) / step_s)
            _spread(waiting, jobs, (from_s - start_s) / step_s, (to_s - start_s) / step_s)
        for node in part.rented:
            _spread(rented, node.gpus, (node.since_s - start_s) / step_s, (node.until_s - start_s) / step_s)
    return FleetTimeSeries(
        times_s=tuple(start_s + (step + 0.5) * step_s for step in range(steps)),
        gpu_share=tuple(value / (run.gpus + more) for value, more in zip(held, rented, strict=True)),
        waiting=tuple(waiting),
        rented=tuple(rented),
    )


def _spread(steps: list[float], value: int, start: float, end: float) -> None:
    """Add a value that lasts from `start` to `end`, in units of steps."""
    if not value:
        return
    end = min(end, float(len(steps)))
    at = start
    while at < end:
        step = int(at)
        until = min(end, step + 1.0)
        steps[step] += value * (until - at)
        at = until


def waits_by_size(run: PolicyRun) -> list[WaitGroup]:
    """Group waits by powers of two of the requested GPUs; omit empty groups."""
    groups: dict[int, list[float]] = {}
    for part in run.parts:
        for outcome in part.jobs:
            groups.setdefault(outcome.job.gpus.bit_length() - 1, []).append(outcome.wait_s)
    found = []
    for power, waits in sorted(groups.items()):
        waits.sort()
        low, high = 1 << power, (2 << power) - 1
        found.append(
            WaitGroup(
                sizes=f"{low}" if low == high else f"{low}-{high}",
                jobs=len(waits),
                mean_s=sum(waits) / len(waits),
                p99_s=quantile(waits, 0.99),
            )
        )
    return found


def log_ticks(seconds: Sequence[float]) -> list[float]:
    """Return tick values of a logarithmic time axis, up to the first that is not below all `seconds`."""
    known = [1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0, 365 * 86_400.0]
    most = max(seconds, default=1.0)
    return known[: next((at + 1 for at, value in enumerate(known) if value >= most), len(known))]


def format_short(seconds: float) -> str:
    """Format a time in at most six characters: 45 s, 10 min, 6 h, 7 d."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
