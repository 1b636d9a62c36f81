"""Signals, kills, freezes and thaws a member's processes on two thread pools, each in order per member.

A freeze at the end of a lease never waits for processes that do not die.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias, assert_never

from phalanx.node.diagnosis.rank_monitor import RankMonitor
from phalanx.node.logic.actions import (
    CheckEmpty,
    DumpStacks,
    FreezeMember,
    KillMember,
    SendSigterm,
    ThawMember,
)
from phalanx.node.logic.events import (
    FreezeFinished,
    MemberEmptied,
    MemberKilled,
    SupervisorEvent,
)
from phalanx.node.member.member_runtime import MemberRuntime
from phalanx.node.prepare import container_images
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.processes.thread_pool import KeyedThreadPool

KILL_THREADS: Final = 4
FREEZE_THREADS: Final = 64  # members at once: one that does not stop takes longer than the lease's margin
ProcessAction: TypeAlias = SendSigterm | DumpStacks | FreezeMember | ThawMember | KillMember | CheckEmpty
_log = logging.getLogger(__name__)


class MemberProcessControl:
    """The thread pools that stop and freeze members.

    Args:
        watch: is notified of freezes and thaws, and takes stacks.
        happened: receives the results.
        after_work: runs a function after all work already queued for the member.
        services: provides the services for taking stacks.
    """

    def __init__(
        self,
        monitor: RankMonitor,
        on_event: Callable[[SupervisorEvent], None],
        after_work: Callable[[MemberRuntime, Callable[[], None]], None],
        services: Callable[[], NodeServices],
    ) -> None:
        self._watch, self._happened, self._after_work, self._shop = monitor, on_event, after_work, services
        self._kills, self._freezes = KeyedThreadPool("fence", KILL_THREADS), KeyedThreadPool("freeze", FREEZE_THREADS)
        self._kills.start_first_thread()
        self._freezes.start_first_thread()

    def submit(self, member: MemberRuntime, action: ProcessAction) -> None:
        """Queue the action, after those queued for this member before."""
        if isinstance(action, KillMember):
            member.cancel()
        if isinstance(action, KillMember | SendSigterm):
            member.asked_to_end = True
        hands = self._kills
        if isinstance(action, FreezeMember | ThawMember):
            self._watch.on_freeze_or_thaw(member, action)
            hands = self._freezes
        hands.submit(action.key, lambda: self._work(member, action))

    def close(self, timeout_s: float) -> None:
        """Accept no more actions, and wait for the current ones."""
        self._kills.close(timeout_s)
        self._freezes.close(timeout_s)

    def _work(self, member: MemberRuntime, action: ProcessAction) -> None:
        if isinstance(action, DumpStacks):
            self._watch.take_stacks(member, self._shop())
            return
        with member.containment_lock:
            processes = member.processes
            match action:
                case KillMember():
                    try:
                        if processes is not None:
                            processes.kill()
                    finally:
                        self._after_work(member, lambda: self._confirm_kill(member))
                case FreezeMember(key=key):
                    member.not_frozen.clear()
                    still = False
                    try:
                        still = processes is None or processes.freeze()
                    finally:  # the logic kills members that could not be frozen
                        self._happened(FreezeFinished(key=key, frozen=still))
                case SendSigterm():
                    if processes is not None and member.container is not None:
                        container_images.terminate_container_tasks(processes, member.container)
                    elif processes is not None:
                        processes.terminate()
                case ThawMember():
                    if processes is not None:
                        processes.thaw()
                    member.not_frozen.set()
                case CheckEmpty(key=key):
                    if processes is None or processes.empty():
                        self._happened(MemberEmptied(key=key))
                case _:
                    assert_never(action)

    def _confirm_kill(self, member: MemberRuntime) -> None:
        """Kill again behind all queued preparation and start work: only now is it certain that no process follows."""
        try:
            with member.containment_lock:
                leftover = [] if member.processes is None else member.processes.kill()
        except Exception as error:  # noqa: BLE001  any error: the logic retries the kill
            _log.exception("killing job %s failed", member.key.job_id)
            self._happened(MemberKilled(key=member.key, fault=f"{type(error).__name__}: {error}"))
            return
        self._happened(MemberKilled(key=member.key, leftover=tuple(leftover)))
