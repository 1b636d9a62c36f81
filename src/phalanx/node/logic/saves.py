"""How many of the checkpoints that a member's program reports are told to the head: all of them at any reasonable pace, of a flood the newest.

Each one told is a line of the job's story for good, on the head's disk. Pure, and of one member; `member.py` keeps it and tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.state.events import CheckpointSaved
from phalanx.core.work.job import Resume
from phalanx.node.logic.happenings import CheckpointReported
from phalanx.node.logic.lease import NS_PER_S

PER_S: Final = 5  # steadily; none that is worth resuming from is written and synced faster than every few hundred ms
AT_ONCE: Final = 50  # after a pause: what a program at that pace reports while a busy supervisor does not read for 10 s
PATHS_MAX: Final = 64  # remembered of those passed over between two that are told; no disk takes more, reports alone do
_TOLD: Final = 2  # whose paths are remembered: as many as the head keeps
_EACH_NS: Final = NS_PER_S // PER_S
_AHEAD_NS: Final = (AT_ONCE - 1) * _EACH_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What was told, and what waits. Times are CLOCK_BOOTTIME.

    Attributes:
        told_until_ns: how far what was told reaches, each taking its share of a second; AT_ONCE of them may lie ahead.
        waiting: the newest, while it may not be told yet.
        passed_over: how many gave it their place.
        left: their folders, of which the head will never hear, since the last one that was told.
        told_paths: the newest that were told.
    """

    told_until_ns: int = 0
    waiting: CheckpointReported | None = None
    passed_over: int = 0
    left: tuple[str, ...] = ()
    told_paths: tuple[str, ...] = ()

    @property
    def unneeded(self) -> tuple[str, ...]:
        """Folders of no use once the one that waits is told."""
        needed = {*self.told_paths, "" if self.waiting is None else self.waiting.path}
        return tuple(path for path in dict.fromkeys(self.left) if path not in needed)

    @property
    def due_ns(self) -> int:
        """When the one that waits may be told; 0 where none does."""
        return 0 if self.waiting is None else self.told_until_ns - _AHEAD_NS

    def heard(self, report: CheckpointReported) -> Saves:
        """One more; it takes the place of one that waits."""
        if self.waiting is None:
            return replace(self, waiting=report)
        left = (*self.left, self.waiting.path) if len(self.left) < PATHS_MAX else self.left
        return replace(self, waiting=report, passed_over=self.passed_over + 1, left=left)

    def told(self, now_ns: int) -> Saves:
        """The one that waits is told now."""
        told = () if self.waiting is None else (self.waiting.path,)
        return replace(
            self, waiting=None, left=(), told_paths=(*self.told_paths, *told)[-_TOLD:],
            told_until_ns=max(self.told_until_ns, now_ns) + _EACH_NS,
        )  # fmt: skip


def event_of(report: CheckpointReported, node_id: NodeId) -> CheckpointSaved:
    """What the head is told of it."""
    resume = Resume(
        epoch=report.key.epoch, step=report.step, path=report.path, digest=report.digest, bytes=report.size_bytes,
        saved_s=report.at_s,
    )  # fmt: skip
    return CheckpointSaved(
        job_id=report.key.job_id, generation=report.key.generation, node_id=node_id, resume=resume, stall_s=report.stall_s,
        write_s=report.write_s,
    )  # fmt: skip
