"""The supervisor's view of its lease, which counts from when it *sent* the request, so that it always ends before the head's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

NS_PER_S: Final = 1_000_000_000
THAW_SHARE: Final = 0.5  # of the collective timeout; after a longer freeze the peers are too close to their time-out


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One lease for everything on the node. Times are CLOCK_BOOTTIME; a new supervisor has none."""

    sent_ns: int = 0
    deadline_ns: int = 0

    def over(self, now_ns: int) -> bool:
        """Whether the lease has expired at `now_ns`."""
        return now_ns >= self.deadline_ns

    def renewed(self, *, sent_ns: int, lease_s: float, now_ns: int) -> Self:
        """Return the lease after an answer to a request sent at `sent_ns`.

        An answer to an older request, or one whose lease has already expired, changes nothing. The newest answer counts even if its lease
        is shorter than an earlier one: ending early is always safe.
        """
        deadline_ns = sent_ns + int(lease_s * NS_PER_S)
        if sent_ns <= self.sent_ns or deadline_ns <= now_ns:
            return self
        return type(self)(sent_ns=sent_ns, deadline_ns=deadline_ns)


def may_thaw(frozen_ns: int, collective_timeout_s: float) -> bool:
    """Whether ranks frozen for this long may resume: their peers' collectives still wait."""
    return frozen_ns <= collective_timeout_s * THAW_SHARE * NS_PER_S
