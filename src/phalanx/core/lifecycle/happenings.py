"""What the attempt machine reacts to beside supervisors' reports: facts that the controller derives."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId
from phalanx.core.state.events import (
    CheckpointFailed,
    CheckpointSaved,
    MemberFroze,
    MemberHung,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    Progressed,
    TaskExited,
    Withdrawn,
)
from phalanx.core.work.attempt import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """A node of the gang is gone: it died, or its lease is over. Nothing of it runs or will ever count."""

    node_id: NodeId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWanted:
    """Someone wants the attempt to end: a user, the time limit, a drain, a preemption."""

    cause: Cause
    why: str
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOverdue:
    """The barrier was not passed in time; `silent` nodes never got ready."""

    silent: tuple[NodeId, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Remind:
    """A node may have missed its command (it or the head restarted): say again what it should be doing.

    `probe_port`: of a supervisor that has just come for this attempt alone, where it answers its peers' probes.
    """

    node_id: NodeId
    probe_port: int = 0


Happening = (
    MemberReady
    | MemberRefused
    | MemberStarted
    | TaskExited
    | MemberStopped
    | MemberFroze
    | MemberHung
    | CheckpointSaved
    | CheckpointFailed
    | Progressed
    | MemberLost
    | StopWanted
    | StartOverdue
    | Remind
    | Withdrawn
)
