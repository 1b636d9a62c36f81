"""Signals, kills, freezes and thaws a member's processes on two thread pools, each in order per member.

A freeze at the end of a lease never waits for processes that do not die.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias, assert_never

from phalanx.node.logic.actions import Freeze, Kill, ProbeEmpty, Signal, TakeStacks, Thaw
from phalanx.node.logic.happenings import Emptied, FreezeDone, Happening, Killed
from phalanx.node.shell import images
from phalanx.node.shell.hands import Hands
from phalanx.node.shell.preparation import Workshop
from phalanx.node.shell.present import Present
from phalanx.node.shell.watch import Watch

KILL_HANDS: Final = 4
FREEZE_HANDS: Final = 64  # members at once: one that does not stop takes longer than the lease's margin
SIGTERM: Final = 15
FenceAction: TypeAlias = Signal | TakeStacks | Freeze | Thaw | Kill | ProbeEmpty
_log = logging.getLogger(__name__)


class Fence:
    """The thread pools that stop and freeze members.

    Args:
        watch: is notified of freezes and thaws, and takes stacks.
        happened: receives the results.
        after_work: runs a function after all work already queued for the member.
        services: provides the services for taking stacks.
    """

    def __init__(
        self,
        watch: Watch,
        happened: Callable[[Happening], None],
        after_work: Callable[[Present, Callable[[], None]], None],
        services: Callable[[], Workshop],
    ) -> None:
        self._watch, self._happened, self._after_work, self._shop = watch, happened, after_work, services
        self._kills, self._freezes = Hands("fence", KILL_HANDS), Hands("freeze", FREEZE_HANDS)
        self._kills.begin()
        self._freezes.begin()

    def do(self, member: Present, action: FenceAction) -> None:
        """Queue the action, after those queued for this member before."""
        if isinstance(action, Kill):
            member.cancel()
        if isinstance(action, Kill | Signal):
            member.ending = True
        hands = self._kills
        if isinstance(action, Freeze | Thaw):
            self._watch.halted(member, action)
            hands = self._freezes
        hands.submit(action.key, lambda: self._work(member, action))

    def close(self, timeout_s: float) -> None:
        """Accept no more actions, and wait for the current ones."""
        self._kills.close(timeout_s)
        self._freezes.close(timeout_s)

    def _work(self, member: Present, action: FenceAction) -> None:
        if isinstance(action, TakeStacks):
            self._watch.take_stacks(member, self._shop())
            return
        with member.containing:
            processes = member.processes
            match action:
                case Kill():
                    try:
                        if processes is not None:
                            processes.kill()
                    finally:
                        self._after_work(member, lambda: self._confirm_kill(member))
                case Freeze(key=key):
                    member.running.clear()
                    still = False
                    try:
                        still = processes is None or processes.freeze()
                    finally:  # the logic kills members that could not be frozen
                        self._happened(FreezeDone(key=key, still=still))
                case Signal():
                    if processes is not None and member.inside is not None:
                        images.ask_to_end(processes, member.inside)
                    elif processes is not None:
                        processes.signal(SIGTERM)
                case Thaw():
                    if processes is not None:
                        processes.thaw()
                    member.running.set()
                case ProbeEmpty(key=key):
                    if processes is None or processes.empty():
                        self._happened(Emptied(key=key))
                case _:
                    assert_never(action)

    def _confirm_kill(self, member: Present) -> None:
        """Kill again behind all queued preparation and start work: only now is it certain that no process follows."""
        try:
            with member.containing:
                leftover = [] if member.processes is None else member.processes.kill()
        except Exception as error:  # noqa: BLE001  any error: the logic retries the kill
            _log.exception("killing job %s failed", member.key.job_id)
            self._happened(Killed(key=member.key, fault=f"{type(error).__name__}: {error}"))
            return
        self._happened(Killed(key=member.key, leftover=tuple(leftover)))
