"""The supervisor's own view of its lease: it counts from when it *asked*, so that it never believes longer than the head does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

NS_PER_S: Final = 1_000_000_000
THAW_SHARE: Final = 0.5  # of the collective timeout: past that, peers are nearer to giving up than to going on


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease for everything on the node. Times are CLOCK_BOOTTIME; a fresh supervisor holds none."""

    sent_ns: int = 0
    deadline_ns: int = 0

    def over(self, now_ns: int) -> bool:
        """Whether nothing may run on it at `now_ns`."""
        return now_ns >= self.deadline_ns

    def renewed(self, *, sent_ns: int, lease_s: float, now_ns: int) -> Self:
        """The lease after an answer to a request that left at `sent_ns`.

        An answer to an older request, or one that came when its lease was already over again, changes nothing. The newest answer counts
        even where it is shorter than an earlier one: ending early is always safe.
        """
        deadline_ns = sent_ns + int(lease_s * NS_PER_S)
        if sent_ns <= self.sent_ns or deadline_ns <= now_ns:
            return self
        return type(self)(sent_ns=sent_ns, deadline_ns=deadline_ns)


def may_thaw(frozen_ns: int, collective_timeout_s: float) -> bool:
    """Whether ranks frozen for so long may go on as if nothing had been: their peers' collectives still wait."""
    return frozen_ns <= collective_timeout_s * THAW_SHARE * NS_PER_S
