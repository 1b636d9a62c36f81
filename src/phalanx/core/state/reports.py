"""Reports of supervisors, and observations of engines and of the head itself, as values. The controller receives them beside requests (events.py).

`at_s` is Unix time, in reports that have a time of their own; others happen at the step's `now_s`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.fleet.node import HeldDataset, Node
from phalanx.core.fleet.power_limits import PowerLimits
from phalanx.core.ids import (
    Epoch,
    Generation,
    JobId,
    NodeId,
    PoolId,
    ProjectId,
    ServiceId,
    SupervisorId,
    UserId,
)
from phalanx.core.work.attempt import EndCause, TaskExit
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.pace import StepPace
from phalanx.core.work.seats import Seat
from phalanx.core.work.services.service_load import ServiceLoad
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.core.work.usage.waste_terms import WasteKind

if TYPE_CHECKING:  # supervisors report nothing of these, and their modules would be a twentieth of a supervisor's start
    from phalanx.core.fleet.node_pool import ChargedMachine, ListedMachine
    from phalanx.core.work.usage.monthly_budget import BudgetWarning, MonthlyBudget
    from phalanx.core.work.usage.usage_hour import UsageHour, UsageMark


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRegistered:
    """A supervisor registers, with its node's inventory and the (job, epoch, generation) of each member it runs.

    Attributes:
        seat: for a supervisor that was started for one attempt: it represents this seat, not the node.
        challenge: the challenge that the head sent, as proof that the supervisor is alive; empty at first. None: it supports none.
    """

    node: Node
    supervisor_id: SupervisorId
    running: tuple[tuple[JobId, Epoch, Generation], ...] = ()
    seat: Seat | None = None
    challenge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady:
    """A node passed its preflight and waits at the barrier.

    Attributes:
        bad_links: links to nodes of its gang that failed the probe; with any, the gang does not start.
        clock_off_s: how far its wall clock is ahead of the head's.
        service_port: of a replica, from node rank 0: the port that it reserved for it; 0 for none.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    port: int | None = None
    resume: PublishedCheckpoint | None = None
    bad_links: tuple[BadLink, ...] = ()
    clock_off_s: float = 0.0
    service_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRefused:
    """A node cannot start its member.

    Attributes:
        job_at_fault: the job is at fault (no such file), not the node.
        exit_code: the exit code that a shell would return.
        node_at_fault: the node is at fault and the next job would fail too: it is cordoned.
        disk_full: its fault is that its disk has no room: the cordon ends when it has.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    why: str
    job_at_fault: bool
    exit_code: int = 1
    node_at_fault: bool = False
    disk_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStarted:
    """All tasks of this node have started (exec)."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessChanged:
    """The node that serves a replica's port probed it: the replica became ready, or no longer answers. `why`: the failed probe."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    ready: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepHookEnded:
    """The program of a replica answered its hook: it has freed its devices (`sleep`), or uses them again and is ready. `why`: it failed."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    turn: int
    sleep: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExited:
    """One task ended."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    exit: TaskExit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStopped:
    """No process of this generation is left on the node.

    Attributes:
        port_in_use: rank 0 could not bind; restart without charging the job.
        unsent: streams of which the head does not have all bytes, with their lengths. The node goes on sending them.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    at_s: float
    port_in_use: bool = False
    unsent: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFrozen:
    """The lease expired and was granted again for the same epoch, after the ranks were frozen for `frozen_s`.

    `thawed`: the freeze was short enough and the ranks continue; otherwise the gang restarts in place, uncharged.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    frozen_s: float
    thawed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHung:
    """Ranks of this node run, are not frozen, and made no step for `silent_s`, longer than the `limit_s` learned from their steps.

    Attributes:
        step: the last one reported.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    silent_s: float
    limit_s: float
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A rank wrote a complete checkpoint; it is published once the head commits it under a current epoch."""

    job_id: JobId
    generation: Generation
    node_id: NodeId
    resume: PublishedCheckpoint
    stall_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReported:
    """The newest step whose report is durable at the head; sent rarely, for budgets and the history. `pace`: None until it is known."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    step: int
    pace: StepPace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A save failed; training continues. Reported once until a save succeeds again."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDied:
    """An engine observed the death of a node, or its supervisor leaves.

    `confirmed`: no process is left on it, so its lease need not be awaited. `planned`: it was stopped, which is no failure of the node.
    """

    node_id: NodeId
    supervisor_id: SupervisorId | None
    why: str
    confirmed: bool
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFreed:
    """A node that is cordoned for its full disk has room again, by a sample of its supervisor."""

    node_id: NodeId
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListed:
    """The inventory of an engine that starts supervisors per attempt lists this node as in service."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLost:
    """The engine ended an attempt's seats on these nodes: no process of the attempt is left there."""

    job_id: JobId
    epoch: Epoch
    node_ids: tuple[NodeId, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptWithdrawn:
    """An engine could not start an attempt and withdrew it before any supervisor registered.

    Attributes:
        nodes: the nodes that prevented the start.
        cause: CONTENDED (others took the nodes first), LIMITED (a limit of the engine, which may pass), PREEMPTED (its
            cluster prefers others), UNFIT (a node was lost before the start), START_FAIL (an error of the engine), or FAILED (it would refuse the job again).
    """

    job_id: JobId
    epoch: Epoch
    why: str
    nodes: tuple[NodeId, ...]
    cause: EndCause


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptQueued:
    """The engine's cluster holds a placed attempt in a queue of its own, so that nothing of it runs yet. `why` it waits; empty once it is admitted."""

    job_id: JobId
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReclaimed:
    """The engine's cluster takes back the nodes of an attempt that has started: its processes have their grace to save."""

    job_id: JobId
    epoch: Epoch
    why: str


class ProviderOutcome(enum.StrEnum):
    """What a provider reports of an order: it is being started, could not be, is stopped, will end soon, or ended by itself.

    REFUSED: the offer brings no node now, and nothing was started. UNANSWERED: the call may have been carried out or not. ENDED: it was stopped
    with the head, and is over. CONSOLE: what its machine printed, before it is stopped. DELAYED: why the node is not up yet; without a reason, nothing delays it any more.
    """

    STARTED = "started"
    FAILED = "failed"
    STOPPED = "stopped"
    LEAVING = "leaving"
    LOST = "lost"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    ENDED = "ended"
    DELAYED = "delayed"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderReported:
    """The outcome of an order, by its token.

    Attributes:
        why: of all but STARTED and STOPPED; CONSOLE: why it could not be read.
        offer: that was tried.
        machine: STARTED: the provider's id of the machine, and empty if it has none. Else the only machine that the call was about; empty: all.
        since_s: STARTED: since when the machine is charged. Unix seconds by the provider's clock, 0 if unknown.
        stopped: STOPPED: the machines of the order, all of them have ended.
        console: CONSOLE: as `core.fleet.node_console.console_text` leaves it.
    """

    node_id: NodeId
    token: str
    outcome: ProviderOutcome
    why: str = ""
    offer: str = ""
    machine: str = ""
    since_s: float = 0.0
    stopped: tuple[ChargedMachine, ...] = ()
    console: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesListed:
    """All machines of this head that a provider has by the settings of one pool, of other pools too.

    Attributes:
        asked_boot_s: CLOCK_BOOTTIME when it was asked.
        why: the list could not be read; empty if it is complete.
    """

    pool: PoolId
    asked_boot_s: float
    machines: tuple[ListedMachine, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimited:
    """A supervisor has set the power limits of its GPUs, restored those of before (`milliwatts` None), or could not: `why`."""

    node_id: NodeId
    milliwatts: int | None
    limits: tuple[PowerLimits, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealthReported:
    """A program of the node's operator failed, and `why`; empty if all health checks pass (again).

    Attributes:
        checked: by a health check, whose cordon ends when the check passes; False: by a prolog or an epilog.
    """

    node_id: NodeId
    why: str
    checked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetsHeld:
    """All datasets of which a node has a copy now, by key."""

    node_id: NodeId
    datasets: tuple[HeldDataset, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCounted:
    """The ledger of states has counted up to `mark`: replaces these hours, and the measured use of these attempts."""

    hours: tuple[UsageHour, ...]
    mark: UsageMark
    attempts: tuple[AttemptUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleJob:
    """A job that uses none of its GPUs, in the states that the idle policy of its queue counts.

    Attributes:
        state: that most of its GPUs are in.
        since_ms: since when, by the clock of the ledger of states (Unix milliseconds); it also identifies this time of idleness.
        paused: it is at work now, for too short a time to end this time of idleness.
    """

    job_id: JobId
    epoch: Epoch
    state: WasteKind
    since_ms: int
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleJobsObserved:
    """All jobs that are idle at `at_ms`, of queues with an idle policy; replaces the report before.

    Attributes:
        at_ms: by the same clock.
        quiet: of jobs with an idle limit of their own, those that use no GPU; since when they use no CPU and have no input either.
    """

    at_ms: int
    jobs: tuple[IdleJob, ...]
    quiet: tuple[IdleJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadObserved:
    """The load of services by one gateway now; replaces its report before. `gateway`: its id, drawn when it started; `user`: of its token."""

    user: UserId
    gateway: str
    loads: tuple[tuple[ServiceId, ServiceLoad], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReached:
    """A project has spent `warning.percent` of its budget, or more. Amounts are hundredths of the currency. Idempotent."""

    project_id: ProjectId
    budget: MonthlyBudget
    warning: BudgetWarning
    spent_cents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsReached:
    """The outputs of a project take `percent` of their limit, or more: 80, 100 (an upload was refused), or 0 for less than 80. Idempotent.

    `most`: the jobs with the largest outputs, with their bytes.
    """

    project_id: ProjectId
    limit_bytes: int
    used_bytes: int
    percent: int
    most: tuple[tuple[JobId, int], ...] = ()


Report = (
    SupervisorRegistered
    | MemberReady
    | MemberRefused
    | MemberStarted
    | ReadinessChanged
    | SleepHookEnded
    | TaskExited
    | MemberStopped
    | MemberFrozen
    | MemberHung
    | CheckpointSaved
    | CheckpointFailed
    | ProgressReported
    | NodeDied
    | NodeListed
    | DiskFreed
    | SeatLost
    | AttemptWithdrawn
    | AttemptQueued
    | AttemptReclaimed
    | ProviderReported
    | MachinesListed
    | UsageCounted
    | IdleJobsObserved
    | LoadObserved
    | PowerLimited
    | DatasetsHeld
    | NodeHealthReported
    | BudgetReached
    | OutputsReached
)
