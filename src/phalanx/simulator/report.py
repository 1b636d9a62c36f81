"""The report of a replay: completion times, waits, utilisation, preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from phalanx.simulator.results import ReplayedJob, ReplayResult

LARGE_GPUS = 8  # "large" as in published tables: at least a whole node


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Times in seconds. A job's wait is its completion time minus its run time, so it includes lost work. `stops_per_job`: preemptions and moves.

    `utilization`: of the fleet over the makespan and of the nodes that were rented; `rented_usd`: what these cost in US dollars.
    """

    jobs: int
    avg_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    avg_wait_s: float
    p99_wait_s: float
    avg_wait_large_s: float
    max_wait_s: float
    max_unbroken_wait_s: float
    makespan_s: float
    utilization: float
    preemptions: int
    moves: int
    stops_per_job: float
    lost_gpu_s: float
    rented_usd: float
    rented_gpu_s: float
    rented_nodes: int
    wall_s: float

    def as_dict(self) -> dict[str, float]:
        """Return the fields for `--json`."""
        return asdict(self)


def build_report(replayed: Sequence[ReplayResult], *, wall_s: float) -> ReplayReport:
    """Build one report over one replay, or over one per virtual cluster."""
    outcomes: list[ReplayedJob] = [outcome for part in replayed for outcome in part.jobs]
    jcts = sorted(outcome.jct_s for outcome in outcomes)
    waits = sorted(outcome.wait_s for outcome in outcomes)
    large = [outcome.wait_s for outcome in outcomes if outcome.job.gpus >= LARGE_GPUS]
    makespan_s = max(outcome.end_s for outcome in outcomes) - min(outcome.job.submit_s for outcome in outcomes)
    lost = sum(part.lost_gpu_s for part in replayed)
    used = sum(outcome.ran_s * outcome.job.gpus for outcome in outcomes) + lost
    preemptions, moves = sum(part.preemptions for part in replayed), sum(part.moves for part in replayed)
    rented = [node for part in replayed for node in part.rented]
    rented_gpu_s = sum(node.gpus * (node.until_s - node.since_s) for node in rented)
    return ReplayReport(
        jobs=len(outcomes),
        avg_jct_s=sum(jcts) / len(jcts),
        median_jct_s=quantile(jcts, 0.5),
        p99_jct_s=quantile(jcts, 0.99),
        avg_wait_s=sum(waits) / len(waits),
        p99_wait_s=quantile(waits, 0.99),
        avg_wait_large_s=sum(large) / len(large) if large else 0.0,
        max_wait_s=waits[-1],
        max_unbroken_wait_s=max(outcome.longest_wait_s for outcome in outcomes),
        makespan_s=makespan_s,
        utilization=used / (sum(part.gpus for part in replayed) * makespan_s + rented_gpu_s) if makespan_s else 0.0,
        preemptions=preemptions,
        moves=moves,
        stops_per_job=(preemptions + moves) / len(outcomes),
        lost_gpu_s=lost,
        rented_usd=sum(node.cost for node in rented),
        rented_gpu_s=rented_gpu_s,
        rented_nodes=len(rented),
        wall_s=wall_s,
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    """Interpolate linearly, as NumPy's default; return 0 for an empty list."""
    if not ascending:
        return 0.0
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)
