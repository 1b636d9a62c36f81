"""The value of a job to the default policy: how soon it ends, times the weight of its class; and what a stop of the job costs."""

from __future__ import annotations

from typing import Final

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobClass, JobEntry
from phalanx.core.scheduling.estimates.hazard_table import HazardTable, SimilarJobs, bin_of
from phalanx.core.scheduling.policies.parameters import PolicyParameters

URGENT_VALUE: Final = 1e6  # per GPU of an overdue job: above any index, which is at most 1 per second times the boost
PROGRESS_MIN_S: Final = (
    600.0  # served for less, a job is young by what similar jobs did, and its pace is that of a few steps
)
REST_MIN_S: Final = 15.0  # of a stated rest: a job that ends within one round ends now


class JobValues:
    """The values of the jobs of one board. It holds no policy, so that a policy that holds it is in no reference cycle: see `Trial.release`."""

    __slots__ = ("_weights", "board", "parameters", "table")

    def __init__(self, board: Board, table: HazardTable, parameters: PolicyParameters) -> None:
        self.board, self.table, self.parameters = board, table, parameters
        self._weights: dict[int, float] = {}  # by the number of the class

    def begin_pass(self) -> None:
        """Compute the weights of classes again: shares of queues have changed."""
        self._weights.clear()

    def group(self, entry: JobEntry) -> SimilarJobs:
        """The jobs from which the policy learns how soon this one ends."""
        if entry.similar_jobs is None:
            entry.similar_jobs = self.table.burst(entry.job_class.label, max(1, entry.job_class.gpus), entry.submit_s)
        return entry.similar_jobs

    def value(self, entry: JobEntry, now_s: float) -> float:
        """The value of the job: the higher, the sooner it ends. Urgent jobs are above all others."""
        value = self.weight(entry.job_class) * self.end_rate(entry, now_s)
        return value + URGENT_VALUE * max(1, entry.gpus) if entry.overdue or entry.lost_nodes else value

    def end_rate(self, entry: JobEntry, now_s: float) -> float:
        """The rate at which it ends, per second of service: by its own progress, else that of similar jobs."""
        served_s = entry.service_s(now_s)
        if entry.stated_end is not None and served_s >= PROGRESS_MIN_S:
            rest_s = entry.stated_end.rest_s(served_s)
            if rest_s is not None:
                return 1.0 / max(rest_s, REST_MIN_S)
        # Lost work must be repeated, but the job does not count as young for it.
        index = self.table.index_of(entry.similar_jobs or self.group(entry), now_s)
        return index[bin_of(max(served_s, entry.service_max_s))]

    def weight(self, job_class: JobClass) -> float:
        """The weight of the class: whole nodes count more, queues that have used their share less. Cached for one pass."""
        weight = self._weights.get(job_class.number)
        if weight is None:
            weight = (
                self.parameters.gang_weight
                if job_class.gpus >= self.board.pools[job_class.needs[0].kinds[0]].node_devices_max
                else 1.0
            )
            if self.board.quotas is not None:
                weight *= self.board.quotas.fair_share_factor(job_class.queue, job_class.user)
            self._weights[job_class.number] = weight
        return weight

    def price(self, entry: JobEntry, now_s: float) -> float:
        """The cost of stopping the job: its value, increased by the work that it would repeat."""
        again_s = self.board.restart_cost_s + entry.unsaved_s(now_s)
        return self.value(entry, now_s) * (1.0 + again_s / self.parameters.run_min_s)
