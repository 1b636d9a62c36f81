"""Limit how many of a member's checkpoint reports reach the head: all at a reasonable rate, only the newest of a flood.

Each report becomes a permanent line of the job's story on the head's disk. Pure, and per member; `member.py` stores it and reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.events import CheckpointSaved
from phalanx.core.work.job import Resume
from phalanx.node.logic.happenings import CheckpointReported
from phalanx.node.logic.lease import NS_PER_S

PER_S: Final = 5  # sustained; no useful checkpoint is written and synced faster than every few hundred ms
AT_ONCE: Final = 50  # burst: reports at that rate while a busy supervisor does not read for 10 s
PATHS_MAX: Final = (
    64  # paths stored of skipped checkpoints between two reports; a disk cannot write more, only a flood of reports can
)
_PATHS_REPORTED: Final = 2  # reported checkpoints whose paths are stored: as many as the head keeps
_INTERVAL_NS: Final = NS_PER_S // PER_S
_BURST_NS: Final = (AT_ONCE - 1) * _INTERVAL_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Reported and waiting checkpoints: a token bucket. Times are CLOCK_BOOTTIME.

    Attributes:
        told_until_ns: time up to which the rate is used; each report adds 1 / PER_S, and it may run AT_ONCE reports ahead of now.
        waiting: the newest checkpoint, while it may not be reported yet.
        passed_over: how many checkpoints newer ones replaced before they were reported.
        left: folders of those replaced since the last report; the head never learns of them.
        told_paths: the newest that were reported.
    """

    told_until_ns: int = 0
    waiting: CheckpointReported | None = None
    passed_over: int = 0
    left: tuple[str, ...] = ()
    told_paths: tuple[str, ...] = ()

    @property
    def unneeded(self) -> tuple[str, ...]:
        """Folders that can be removed once the waiting checkpoint is reported."""
        needed = {*self.told_paths, "" if self.waiting is None else self.waiting.path}
        return tuple(path for path in dict.fromkeys(self.left) if path not in needed)

    @property
    def due_ns(self) -> int:
        """When the waiting checkpoint may be reported; 0 without one."""
        return 0 if self.waiting is None else self.told_until_ns - _BURST_NS

    def heard(self, report: CheckpointReported) -> Saves:
        """Add a checkpoint; it replaces one that waits."""
        if self.waiting is None:
            return replace(self, waiting=report)
        left = (*self.left, self.waiting.path) if len(self.left) < PATHS_MAX else self.left
        return replace(self, waiting=report, passed_over=self.passed_over + 1, left=left)

    def told(self, now_ns: int) -> Saves:
        """Mark the waiting checkpoint as reported."""
        reported = () if self.waiting is None else (self.waiting.path,)
        return replace(
            self,
            waiting=None,
            left=(),
            told_paths=(*self.told_paths, *reported)[-_PATHS_REPORTED:],
            told_until_ns=max(self.told_until_ns, now_ns) + _INTERVAL_NS,
        )


def event_of(report: CheckpointReported, node_id: NodeId) -> CheckpointSaved:
    """Build the event that reports the checkpoint to the head."""
    resume = Resume(
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
