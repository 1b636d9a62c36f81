"""The record of one node's part of one generation of an attempt, and its phases. `member.py` changes it.

    PREPARING -> READY -> STARTING -> RUNNING -> LINGERING -.
         |         |         |           |  '-> STOPPING ---+-> KILLING -> CLOSING -> STOPPED
         '---------+---------+-----------'------------------'

Freezing is independent of the phase (`frozen_ns`): ranks may be frozen while they run, stop, or linger.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.state.reports import SleepHookEnded
from phalanx.core.work.allocation import NodeGrant
from phalanx.node.logic.actions import SupervisorAction
from phalanx.node.logic.checkpoint_report_limiter import CheckpointReportLimiter
from phalanx.node.logic.events import GenerationId, MemberKey, MemberPrepared, MemberStartFailed, TaskEnded
from phalanx.node.logic.lease import NS_PER_S


class MemberPhase(enum.StrEnum):
    """The phases of a member."""

    PREPARING = "preparing"
    READY = "ready"  # waits at the gang barrier, or past it for a lease
    STARTING = "starting"
    RUNNING = "running"
    LINGERING = "lingering"  # every task ended by itself; their child processes have until `timer_ns`
    STOPPING = "stopping"  # SIGTERM is sent; SIGKILL follows at `timer_ns`
    KILLING = "killing"
    CLOSING = "closing"  # nothing runs; output is being drained
    STOPPED = "stopped"  # reported; only the scratch folder is left


LEASE_INDEPENDENT_PHASES: Final = frozenset({MemberPhase.KILLING, MemberPhase.CLOSING, MemberPhase.STOPPED})
"""Phases that an expired lease does not affect: all remaining processes are being killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClock:
    """The time of a step: CLOCK_BOOTTIME for decisions, Unix time for reports."""

    ns: int
    unix_s: float

    def after(self, seconds: float) -> int:
        """CLOCK_BOOTTIME `seconds` from now."""
        return self.ns + int(seconds * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMember:
    """See the module. Times are CLOCK_BOOTTIME, 0 for "not yet".

    Attributes:
        grant: this node's part of the allocation.
        timer_ns: when the current phase times out; 0 without a time-out.
        ready: the result of preparation; repeated when the head asks again.
        start: the start command, once the barrier is passed; stored while no lease permits the start.
        spawned_ns: when the tasks were started.
        ended: ranks whose end is reported.
        held_exits: ends seen while other tasks were still starting.
        stop_requested_ns: when we first asked the tasks to end; later ends count as caused by us.
        frozen_ns: end of the lease whose expiry froze it; 0 while it is not frozen.
        bind_failed: rank 0 failed within the first seconds; its output may show that the port was in use.
        refusal: why it cannot run; reported once none of its processes is left.
        checkpoint_reports: the checkpoints that its program reported.
        superseded: a newer epoch is current: end this one and report none of its results as current.
        forgotten: the head has asked to forget the attempt, or never will ask.
        out_of_memory: its processes are killed because they need more memory than the job asked for: the job's own failure.
        hook_turn: turn of the last sleep or wake hook; 0 before the first.
        hook_answer: its answer; None while it runs.
    """

    key: MemberKey
    prepare: PrepareTasks
    grant: NodeGrant
    job_deadline_ns: int = 0
    phase: MemberPhase = MemberPhase.PREPARING
    timer_ns: int = 0
    ready: MemberPrepared | None = None
    start: StartTasks | None = None
    spawned_ns: int = 0
    ended: frozenset[int] = field(default=frozenset())
    held_exits: tuple[TaskEnded, ...] = ()
    stop_requested_ns: int = 0
    stop_why: str = ""
    frozen_ns: int = 0
    bind_failed: bool = False
    refusal: MemberStartFailed | None = None
    checkpoint_reports: CheckpointReportLimiter = field(default_factory=CheckpointReportLimiter)
    superseded: bool = False
    forgotten: bool = False
    out_of_memory: bool = False
    hook_turn: int = 0
    hook_answer: SleepHookEnded | None = None

    @property
    def generation_id(self) -> GenerationId:
        """Its epoch and generation, comparable."""
        return GenerationId(self.key.epoch, self.key.generation)

    @property
    def all_ended(self) -> bool:
        """Whether all tasks of this node have ended."""
        return len(self.ended) >= self.grant.tasks


MemberTransition: TypeAlias = tuple[LocalMember, list[SupervisorAction]]
