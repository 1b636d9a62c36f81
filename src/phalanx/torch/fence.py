"""The fence: no step is begun and nothing is committed past the lease.

The supervisor keeps the deadline in the lease page. A host that was stopped may wake between its ranks and its supervisor, so
each rank looks for itself: before each step and before each commit `Fence.pass_` blocks while the deadline is past, and ends the
process at once when the page speaks for another epoch. Without a page the fence is open.
"""

from __future__ import annotations

import os
import time
from typing import Final

from phalanx.wire.rank import LeasePage, StopReason, boottime_ns

EXIT_SUPERSEDED: Final = 75
"""How a rank ends that a newer epoch replaced: EX_TEMPFAIL, nothing is wrong with the job itself."""

_POLL_S: Final = 0.01
"""Short against a step and a lease (seconds); 100 reads of shared memory a second cost nothing measurable."""


class Fence:
    """One rank's view of its lease page.

    Args:
        page: None where the rank runs without a supervisor.
        epoch: the epoch this rank was started under.
        generation: the in-place restart this rank belongs to.
    """

    def __init__(self, page: LeasePage | None, *, epoch: int, generation: int) -> None:
        self._page = page
        self._epoch = epoch
        self._generation = generation

    @classmethod
    def attach(cls, path: str | None, *, epoch: int, generation: int) -> Fence:
        """The fence of the page at `path`; an open one when `path` is None.

        Raises:
            RuntimeError: the environment names a page that cannot be mapped; running on unfenced could make steps that a
                newer epoch makes as well.
        """
        if path is None:
            return cls(None, epoch=epoch, generation=generation)
        try:
            page = LeasePage.attach(path)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"lease page {path} cannot be attached ({error}); a rank started by a supervisor does not run without it: "
                "start the job again, or unset PHALANX_LEASE_PAGE to run by hand"
            ) from error
        return cls(page, epoch=epoch, generation=generation)

    def pass_(self) -> tuple[int, int]:
        """Block until the lease holds; end the process if it can never hold again.

        Returns:
            The CLOCK_BOOTTIME reading in ns that was found before the deadline, which is the instant from which the coming
            step counts as begun, and the ns for which the fence was shut (0 if it was open).
        """
        arrived_ns = now_ns = boottime_ns()
        while not self._holds(now_ns):
            time.sleep(_POLL_S)
            now_ns = boottime_ns()
        return now_ns, now_ns - arrived_ns

    def stop(self) -> StopReason:
        """What the supervisor asks for; NONE without a page. Ends the process when superseded."""
        if self._page is None:
            return StopReason.NONE
        self._leave_if_superseded(self._page)
        asked = self._page.read("stop")
        try:
            return StopReason(asked)
        except ValueError:  # a reason a newer supervisor knows; it wants an end all the same
            return StopReason.CANCELLED

    def job_deadline_ns(self) -> int:
        """CLOCK_BOOTTIME at which the job's time limit ends; 0 without one."""
        return 0 if self._page is None else self._page.read("job_deadline_ns")

    def checkpoints_asked(self) -> int:
        """How many times the supervisor has asked for a checkpoint now."""
        return 0 if self._page is None else self._page.read("checkpoint_now")

    def _holds(self, now_ns: int) -> bool:
        if self._page is None:
            return True
        self._leave_if_superseded(self._page)
        return now_ns < self._page.read("deadline_ns")

    def _leave_if_superseded(self, page: LeasePage) -> None:
        """End this process at once, without cleaning up: a newer epoch or generation runs, nothing done here may count."""
        current = page.read("epoch") == self._epoch and page.read("generation") == self._generation
        if not current or page.read("stop") == StopReason.SUPERSEDED:
            os._exit(EXIT_SUPERSEDED)
