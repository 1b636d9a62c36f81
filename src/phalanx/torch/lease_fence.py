"""The fence: no step begins and no checkpoint is committed after the lease has expired.

The supervisor writes the deadline to the lease page. On a host that was suspended, ranks may wake before their supervisor, so each rank
checks the page itself. Before each step and each commit, `Fence.wait_for_lease` blocks while the deadline has passed, and ends the process at once
if the page belongs to another epoch. Without a page the fence is open.
"""

from __future__ import annotations

import os
import time
from typing import Final

from phalanx.wire.rank import LeasePage, RankStopReason, boottime_ns

EXIT_SUPERSEDED: Final = 75
"""Exit code of a rank that a newer epoch replaced: EX_TEMPFAIL, because the job itself is not at fault."""

_POLL_S: Final = 0.01
"""Short compared with a step and a lease (seconds); 100 reads of shared memory per second have no measurable cost."""


class LeaseFence:
    """The fence of one rank, based on its lease page.

    Args:
        page: None if the rank runs without a supervisor.
        epoch: the epoch of this rank.
        generation: the number of in-place restarts at the start of this rank.
    """

    def __init__(self, page: LeasePage | None, *, epoch: int, generation: int) -> None:
        self._page = page
        self._epoch = epoch
        self._generation = generation

    @classmethod
    def attach(cls, path: str | None, *, epoch: int, generation: int) -> LeaseFence:
        """Return the fence of the page at `path`; an open one if `path` is None.

        Raises:
            RuntimeError: the page cannot be mapped. Without a fence, this rank could repeat steps of a newer epoch.
        """
        if path is None:
            return cls(None, epoch=epoch, generation=generation)
        try:
            page = LeasePage.attach(path)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"lease page {path} cannot be attached ({error}); a rank of a supervisor cannot run without it: "
                "start the job again, or unset PHALANX_LEASE_PAGE to run by hand"
            ) from error
        return cls(page, epoch=epoch, generation=generation)

    def wait_for_lease(self) -> tuple[int, int]:
        """Block until the lease is valid; end the process if it was superseded.

        Returns:
            The CLOCK_BOOTTIME reading in ns before the deadline, at which the next step counts as begun, and the blocked time in ns (0
            if the fence was open).
        """
        arrived_ns = now_ns = boottime_ns()
        while not self._is_valid(now_ns):
            time.sleep(_POLL_S)
            now_ns = boottime_ns()
        return now_ns, now_ns - arrived_ns

    def stop_reason(self) -> RankStopReason:
        """Return the stop reason from the supervisor; NONE without a page. Ends the process if superseded."""
        if self._page is None:
            return RankStopReason.NONE
        self._leave_if_superseded(self._page)
        asked = self._page.read("stop")
        try:
            return RankStopReason(asked)
        except ValueError:  # a reason of a newer supervisor: stop in any case
            return RankStopReason.CANCELLED

    def job_deadline_ns(self) -> int:
        """Return the CLOCK_BOOTTIME in ns at which the time limit of the job ends; 0 without a limit."""
        return 0 if self._page is None else self._page.read("job_deadline_ns")

    def checkpoints_requested(self) -> int:
        """Return the number of checkpoints that the supervisor has requested."""
        return 0 if self._page is None else self._page.read("checkpoint_now")

    def _is_valid(self, now_ns: int) -> bool:
        if self._page is None:
            return True
        self._leave_if_superseded(self._page)
        return now_ns < self._page.read("deadline_ns")

    def _leave_if_superseded(self, page: LeasePage) -> None:
        """End this process at once, without cleaning up, if a newer epoch or generation runs."""
        current = page.read("epoch") == self._epoch and page.read("generation") == self._generation
        if not current or page.read("stop") == RankStopReason.SUPERSEDED:
            os._exit(EXIT_SUPERSEDED)
