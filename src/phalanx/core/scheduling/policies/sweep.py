"""Results of one sweep over the waiting jobs: capacity and quota only shrink within it, so similar and larger jobs need not be tried."""

from __future__ import annotations

from dataclasses import replace

from phalanx.core.scheduling.board import Board
from phalanx.core.scheduling.board_records import JobClass, JobEntry


class SweepResults:
    """Needs that did not fit and classes that were not admitted. A new sweep starts after a displacement."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.closed: set[int] = set()  # classes that cannot start
        self.failed_needs: set[tuple[object, ...]] = set()
        self.smallest_failed: dict[tuple[object, ...], int] = {}
        self.not_admitted: dict[
            tuple[object, ...], int
        ] = {}  # fewest thousandths of GPUs rejected, by queue, user and the rest of the request
        self._failed_limits: dict[
            tuple[object, ...], float
        ] = {}  # greatest cost at which no job could be displaced, by need

    def cannot_start(self, entry: JobEntry) -> bool:
        """Whether the job cannot start, by earlier attempts of this sweep, or is not admitted."""
        klass = entry.job_class
        if klass.number in self.closed:
            return True
        if self.known_to_fail(entry):
            if not entry.avoided_nodes:
                self.closed.add(klass.number)
            return True
        return not self.admits(klass)

    def admits(self, job_class: JobClass) -> bool:
        """Like `Board.admits`; after a rejection, requests of the same queue and user that differ only in at least as many GPUs are rejected without a check."""
        key = (job_class.queue, job_class.user, self._besides_gpus(job_class))
        if job_class.milli >= self.not_admitted.get(key, 1 << 62):
            self.closed.add(job_class.number)
            return False
        if self.board.admits(job_class):
            return True
        if job_class.throttle is None:
            self.not_admitted[key] = job_class.milli
        self.closed.add(job_class.number)
        return False

    def _besides_gpus(self, job_class: JobClass) -> object:
        """What else may be the reason of a rejection."""
        if self.board.quotas is None or not self.board.quotas.others:
            return job_class.licences
        return replace(job_class.asked, milli=0)

    def record_failure(self, entry: JobEntry) -> None:
        """The job did not fit."""
        key = self._size_key(entry)
        if key is None:
            self.failed_needs.add((entry.job_class.needs, entry.job_class.excluded, entry.avoided_nodes))
        else:
            self.smallest_failed[key] = min(self.smallest_failed.get(key, entry.gpus), entry.gpus)

    def known_to_displace_none(self, entry: JobEntry, limit: float) -> bool:
        """Whether another job with these needs found no job to displace at this cost, or at a greater one."""
        return limit <= self._failed_limits.get(_displacement_key(entry), -1.0)

    def record_no_displacement(self, entry: JobEntry, limit: float) -> None:
        """No job could be displaced for it at this cost."""
        self._failed_limits[_displacement_key(entry)] = limit

    def known_to_fail(self, entry: JobEntry) -> bool:
        """Whether a job with the same needs, or with smaller ones, did not fit."""
        key = self._size_key(entry)
        if key is None:
            return (entry.job_class.needs, entry.job_class.excluded, entry.avoided_nodes) in self.failed_needs
        return entry.gpus >= self.smallest_failed.get(key, 1 << 62)

    def _size_key(self, entry: JobEntry) -> tuple[object, ...] | None:
        """Key of needs that fit on one node or on whole nodes: more devices never fit if fewer did not. None: of another shape."""
        klass = entry.job_class
        need = klass.needs[0]
        packed = need.nodes == 1 or need.devices == self.board.pools[need.kinds[0]].node_devices_max
        if (
            len(klass.needs) > 1
            or not packed
            or not need.devices_only
            or entry.avoided_nodes
            or not need.devices
            or need.nodes_max
        ):
            return None
        return (need.kinds, klass.excluded)


def _displacement_key(entry: JobEntry) -> tuple[object, ...]:
    klass = entry.job_class
    return (klass.rank, klass.needs, klass.excluded, entry.avoided_nodes)
