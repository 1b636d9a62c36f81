"""Events of the attempt machine: supervisors' reports, and events that the controller derives."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId
from phalanx.core.state.reports import (
    AttemptQueued,
    AttemptReclaimed,
    AttemptWithdrawn,
    CheckpointFailed,
    CheckpointSaved,
    MemberFrozen,
    MemberHung,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    ProgressReported,
    ReadinessChanged,
    SleepHookEnded,
    TaskExited,
)
from phalanx.core.work.attempt import EndCause


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """A node of the gang is lost: it died, or its lease expired. Nothing that it still does counts."""

    node_id: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A user, the time limit, a drain or a preemption requests the end of the attempt."""

    cause: EndCause
    why: str
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOverdue:
    """The gang did not start in time; `silent`: nodes that never became ready."""

    silent: tuple[NodeId, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReminderDue:
    """Resend a node's current command, which it may have missed (it or the head restarted).

    `probe_port`, `address`: for a supervisor that has just registered for this attempt, the port on which it answers its peers' probes, and
    where it is reached, if that is not its node's address.
    """

    node_id: NodeId
    probe_port: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRequested:
    """Its service has more replicas awake than wanted: a ready replica runs its sleep hook, one that waits to wake sleeps on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeRequested:
    """Its service wants a sleeping replica awake: it waits for its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeDelayed:
    """The devices of a replica that waits to wake cannot be granted now."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesRegained:
    """The devices of a replica that waits to wake were verified as free, and are granted to it again."""


AttemptEvent = (
    MemberReady
    | MemberRefused
    | MemberStarted
    | ReadinessChanged
    | SleepHookEnded
    | SleepRequested
    | WakeRequested
    | WakeDelayed
    | DevicesRegained
    | TaskExited
    | MemberStopped
    | MemberFrozen
    | MemberHung
    | CheckpointSaved
    | CheckpointFailed
    | ProgressReported
    | MemberLost
    | StopRequested
    | StartOverdue
    | ReminderDue
    | AttemptWithdrawn
    | AttemptQueued
    | AttemptReclaimed
)
