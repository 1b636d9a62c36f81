"""The report of a replay by virtual cluster, the queue of a job: who waited while whose jobs ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from phalanx.simulator.report import LARGE_GPUS
from phalanx.simulator.results import ReplayedJob, ReplayResult


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """One queue's jobs. Times in seconds; waits as in `ReplayReport`.

    Attributes:
        queue: the virtual cluster; "" for jobs without one.
        gpu_h: GPU-hours of their kept work.
        gpu_share: the same as a share of that of all jobs.
        wait_share: GPU-hours that they waited, as a share of those of all jobs; above `gpu_share` the queue paid for others.
    """

    queue: str
    jobs: int
    gpu_h: float
    gpu_share: float
    wait_share: float
    avg_jct_s: float
    avg_wait_s: float
    avg_wait_large_s: float
    max_wait_s: float
    stops_per_job: float

    def as_dict(self) -> dict[str, float | str]:
        """Return the fields for `--json`."""
        return asdict(self)


def queue_reports(replayed: Sequence[ReplayResult]) -> list[QueueReport]:
    """Return a report for each queue, the one with the most work first."""
    by_queue: dict[str, list[ReplayedJob]] = {}
    for part in replayed:
        for outcome in part.jobs:
            by_queue.setdefault(outcome.job.virtual_cluster, []).append(outcome)
    ran = {queue: sum(one.ran_s * one.job.gpus for one in jobs) for queue, jobs in by_queue.items()}
    waited = {queue: sum(one.wait_s * one.job.gpus for one in jobs) for queue, jobs in by_queue.items()}
    ran_total, waited_total = sum(ran.values()), sum(waited.values())
    found = []
    for queue in sorted(by_queue, key=lambda queue: (-ran[queue], queue)):
        jobs = by_queue[queue]
        large = [one.wait_s for one in jobs if one.job.gpus >= LARGE_GPUS]
        found.append(
            QueueReport(
                queue=queue,
                jobs=len(jobs),
                gpu_h=ran[queue] / 3600.0,
                gpu_share=ran[queue] / ran_total if ran_total else 0.0,
                wait_share=waited[queue] / waited_total if waited_total > 0.0 else 0.0,
                avg_jct_s=sum(one.jct_s for one in jobs) / len(jobs),
                avg_wait_s=sum(one.wait_s for one in jobs) / len(jobs),
                avg_wait_large_s=sum(large) / len(large) if large else 0.0,
                max_wait_s=max(one.wait_s for one in jobs),
                stops_per_job=sum(one.preemptions + one.moves for one in jobs) / len(jobs),
            )
        )
    return found
