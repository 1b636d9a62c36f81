"""Jobs that the policy has started but that are not placed yet: their nodes must be freed first. They are placed as soon as that is done."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from phalanx.core.ids import JobId
from phalanx.core.scheduling.board_builder import ClusterSnapshot, free_licences
from phalanx.core.scheduling.board_records import JobEntry
from phalanx.core.scheduling.fleet_index import FleetIndex, PendingUsage
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice
from phalanx.core.state.plan import Placement
from phalanx.core.work.states import JobState

REJECTED_MAX_S: Final = 600.0  # a start whose placement is rejected for this long is cancelled


class PendingPlacements:
    """The jobs, in the order in which they were started. The board already counts their places as taken."""

    __slots__ = ("_entries", "_rejected_since_s")

    def __init__(self) -> None:
        self._entries: dict[JobId, JobEntry] = {}
        self._rejected_since_s: dict[JobId, float] = {}  # first rejection of their placements by the newest state

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._entries

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, job_id: JobId, entry: JobEntry) -> None:
        """The policy has started the job."""
        self._entries[job_id] = entry

    def drop(self, job_id: JobId) -> bool:
        """The job is not due any more; returns whether it was."""
        return self._entries.pop(job_id, None) is not None

    def clear_rejections(self, job_id: JobId) -> None:
        """The job runs, or is gone: drop earlier rejections."""
        self._rejected_since_s.pop(job_id, None)

    def clear(self) -> None:
        """The board is new: nothing is started."""
        self._entries.clear()

    def remove_on_nodes(self, numbers: Collection[int]) -> list[JobEntry]:
        """Remove and return those that were to start on one of these nodes, in order."""
        lost = [
            job_id for job_id, entry in self._entries.items() if any(number in numbers for number, _ in entry.places)
        ]
        return [self._entries.pop(job_id) for job_id in lost]

    def place(self, snapshot: ClusterSnapshot, fit: FleetIndex, most: int) -> list[tuple[JobEntry, Placement]]:
        """Place those whose resources are free by now, at most `most`; they are no longer due."""
        placed: list[tuple[JobEntry, Placement]] = []
        taken = PendingUsage(snapshot.usage, free_licences(snapshot))
        for job_id, entry in list(self._entries.items()):
            if len(placed) >= most:
                break
            job = snapshot.jobs[job_id]
            if job.state is not JobState.PENDING or job_id in snapshot.attempts or entry.need is None:
                continue  # its last attempt is still stopping
            allocation = fit.allocation(entry.need, entry.places, job.spec.role, taken, entry.shared_devices)
            if allocation is None or not taken.has_capacity_for(allocation, snapshot.nodes):
                continue
            taken.add(allocation)
            for device, grant in zip(entry.shared_devices, allocation.grants, strict=False):
                if isinstance(device, SharedDevice):
                    device.index = grant.devices[0]
            del self._entries[job_id]
            placed.append((entry, Placement(job_id=job_id, allocation=allocation)))
        return placed

    def record_rejection(self, job_id: JobId, entry: JobEntry, now_s: float) -> bool:
        """The newest state rejected the placement: the job is due again. False once it has been rejected for `REJECTED_MAX_S`."""
        if now_s - self._rejected_since_s.setdefault(job_id, now_s) < REJECTED_MAX_S:
            self._entries[job_id] = entry
            for device in entry.shared_devices:
                if (
                    isinstance(device, SharedDevice) and device.shares == 1
                ):  # nothing of it is placed: another device may get this index first
                    device.index = -1
            return True
        del self._rejected_since_s[job_id]
        return False
