"""How many of the checkpoints that a member's program reports are told to the head: all of them at any reasonable pace, of a flood the newest.

Each one told is a line of the job's story for good, on the head's disk. Pure, and of one member; `member.py` keeps it and tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from phalanx.node.logic.happenings import CheckpointReported
from phalanx.node.logic.lease import NS_PER_S

PER_S: Final = (
    5  # steadily; no checkpoint that is worth resuming from is written and synced faster than every few hundred ms
)
AT_ONCE: Final = 50  # after a pause: what a program at that pace reports while a busy supervisor does not read for 10 s
_EACH_NS: Final = NS_PER_S // PER_S
_AHEAD_NS: Final = (AT_ONCE - 1) * _EACH_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What was told, and what waits. Times are CLOCK_BOOTTIME.

    Attributes:
        told_until_ns: how far what was told reaches, each taking its share of a second; AT_ONCE of them may lie ahead.
        waiting: the newest, while it may not be told yet.
        passed_over: how many gave it their place.
    """

    told_until_ns: int = 0
    waiting: CheckpointReported | None = None
    passed_over: int = 0

    @property
    def due_ns(self) -> int:
        """When the one that waits may be told; 0 where none does."""
        return 0 if self.waiting is None else self.told_until_ns - _AHEAD_NS

    def heard(self, report: CheckpointReported) -> Saves:
        """One more; it takes the place of one that waits."""
        return replace(self, waiting=report, passed_over=self.passed_over + (self.waiting is not None))

    def told(self, now_ns: int) -> Saves:
        """The one that waits is told now."""
        return replace(self, waiting=None, told_until_ns=max(self.told_until_ns, now_ns) + _EACH_NS)
