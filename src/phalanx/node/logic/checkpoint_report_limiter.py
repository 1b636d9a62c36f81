"""Limit how many of a member's checkpoint reports reach the head: all at a reasonable rate, only the newest of a flood.

Each report becomes a permanent line of the job's history on the head's disk. Pure, and per member; `member.py` stores it and reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.reports import CheckpointSaved
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.logic.events import CheckpointReported
from phalanx.node.logic.lease import NS_PER_S

REPORTS_PER_S: Final = 5  # sustained; no useful checkpoint is written and synced faster than every few hundred ms
BURST_MAX: Final = 50  # burst: reports at that rate while a busy supervisor does not read for 10 s
PATHS_MAX: Final = (
    64  # paths stored of skipped checkpoints between two reports; a disk cannot write more, only a flood of reports can
)
_PATHS_REPORTED: Final = 2  # reported checkpoints whose paths are stored: as many as the head keeps
_INTERVAL_NS: Final = NS_PER_S // REPORTS_PER_S
_BURST_NS: Final = (BURST_MAX - 1) * _INTERVAL_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReportLimiter:
    """Reported and waiting checkpoints: a token bucket. Times are CLOCK_BOOTTIME.

    Attributes:
        reported_until_ns: time up to which the rate is used; each report adds 1 / REPORTS_PER_S, and it may run BURST_MAX reports ahead of now.
        pending: the newest checkpoint, while it may not be reported yet.
        skipped: how many checkpoints newer ones replaced before they were reported.
        skipped_paths: folders of those replaced since the last report; the head never learns of them.
        reported_paths: the newest that were reported.
    """

    reported_until_ns: int = 0
    pending: CheckpointReported | None = None
    skipped: int = 0
    skipped_paths: tuple[str, ...] = ()
    reported_paths: tuple[str, ...] = ()

    @property
    def removable_paths(self) -> tuple[str, ...]:
        """Folders that can be removed once the waiting checkpoint is reported."""
        needed = {*self.reported_paths, "" if self.pending is None else self.pending.path}
        return tuple(path for path in dict.fromkeys(self.skipped_paths) if path not in needed)

    @property
    def due_ns(self) -> int:
        """When the waiting checkpoint may be reported; 0 without one."""
        return 0 if self.pending is None else self.reported_until_ns - _BURST_NS

    def add(self, report: CheckpointReported) -> CheckpointReportLimiter:
        """Add a checkpoint; it replaces one that waits."""
        if self.pending is None:
            return replace(self, pending=report)
        left = (*self.skipped_paths, self.pending.path) if len(self.skipped_paths) < PATHS_MAX else self.skipped_paths
        return replace(self, pending=report, skipped=self.skipped + 1, skipped_paths=left)

    def mark_reported(self, now_ns: int) -> CheckpointReportLimiter:
        """Mark the waiting checkpoint as reported."""
        reported = () if self.pending is None else (self.pending.path,)
        return replace(
            self,
            pending=None,
            skipped_paths=(),
            reported_paths=(*self.reported_paths, *reported)[-_PATHS_REPORTED:],
            reported_until_ns=max(self.reported_until_ns, now_ns) + _INTERVAL_NS,
        )


def checkpoint_event(report: CheckpointReported, node_id: NodeId) -> CheckpointSaved:
    """Build the event that reports the checkpoint to the head."""
    resume = PublishedCheckpoint(
        epoch=report.key.epoch,
        step=report.step,
        path=report.path,
        digest=report.digest,
        bytes=report.size_bytes,
        saved_s=report.at_s,
    )
    return CheckpointSaved(
        job_id=report.key.job_id,
        generation=report.key.generation,
        node_id=node_id,
        resume=resume,
        stall_s=report.stall_s,
        write_s=report.write_s,
    )
