"""What happened: everything the controller hears, as values.

Requests come from users through the API (each is answered), reports from supervisors, observations from engines.
`at_s` is Unix time where the fact has its own time; otherwise the step's `now_s` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.fleet.calibration import Calibration
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.fitness import BadLink
from phalanx.core.fleet.node import Node
from phalanx.core.ids import (
    Epoch,
    Generation,
    JobId,
    NodeId,
    ProjectId,
    QueueId,
    ReservationId,
    SupervisorId,
    TokenId,
    UserId,
)
from phalanx.core.work.attempt import Cause, TaskExit
from phalanx.core.work.job import JobState, Resume
from phalanx.core.work.people import Token, User, UserRole
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.seat import Seat
from phalanx.core.work.spec import JobSpec

# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new job, or a whole array. `key` is the caller's idempotency key; the same key and body give the same job.

    Attributes:
        parents: what the store knows of the jobs that are depended on, by the name used; of an array every element. Ended jobs leave
            the loop's memory, so that only with these it can tell one that ended long ago from one that never was.
    """

    spec: JobSpec
    user: UserId
    project: ProjectId
    queue: QueueId
    key: str = ""
    body_sha256: str = ""
    parents: Mapping[JobId, Mapping[JobId, JobState]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End the job for good. Idempotent."""

    job_id: JobId
    by: UserId
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Keep a pending job from starting; `held=False` releases it."""

    job_id: JobId
    held: bool
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Stop the running attempt (saving first) and wait again."""

    job_id: JobId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Replace what may change of a job; None leaves a field."""

    job_id: JobId
    by: UserId
    name: str | None = None
    priority: int | None = None
    time_limit_s: float | None = None
    queue: QueueId | None = None
    begin_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CordonNode:
    """Keep new work off a node; with `drain` its running jobs are requeued after saving."""

    node_id: NodeId
    by: UserId
    why: str
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UncordonNode:
    """Undo a cordon or drain. Idempotent."""

    node_id: NodeId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNodes:
    """Say of nodes where they lie, or whatever else. An empty text takes a label away; labels not named stay."""

    labels: Mapping[NodeId, Mapping[str, str]]
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetNode:
    """Remove a node that is down and holds nothing."""

    node_id: NodeId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutUser:
    """Add a user or change one."""

    user: User


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeUser:
    """Add a plain user or change one; None leaves a field. `by`: the admin who asks; None for the head itself."""

    user_id: UserId
    role: UserRole | None = None
    disabled: bool | None = None
    by: UserId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeProject:
    """Add a project or change one; None leaves a field. `as_admin`: the caller administers the head, not this project alone."""

    project_id: ProjectId
    by: UserId
    as_admin: bool
    members: frozenset[UserId] | None = None
    admins: frozenset[UserId] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutProject:
    """Add a project or change one."""

    project: Project


@dataclass(frozen=True, slots=True, kw_only=True)
class PutQueue:
    """Add a queue or change one."""

    queue: Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeQueue:
    """Add a queue or change one; None leaves a field."""

    queue_id: QueueId
    priority: int | None = None
    open: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutQueues:
    """Add or change some queues and remove others, all or nothing. Those named in `as_open` stay open or closed as they are."""

    queues: tuple[Queue, ...] = ()
    remove: tuple[QueueId, ...] = ()
    as_open: frozenset[QueueId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReservation:
    """Set nodes aside. The same one again is harmless."""

    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReservation:
    """Give a reservation's nodes back, also before it begins."""

    reservation_id: ReservationId
    by: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class PutCalibration:
    """Keep what a calibration found in place of what is kept."""

    calibration: Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRules:
    """Replace the operators' failure rules; an empty list removes them."""

    document: FailureRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PutToken:
    """Add a token (by its hash)."""

    token: Token


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeToken:
    """End a token, and with `made_too` all that were made with it. Idempotent."""

    token_id: TokenId
    made_too: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensUsed:
    """When tokens were last used, Unix seconds. From the head itself, sparsely."""

    used_s: Mapping[TokenId, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStop:
    """The head is about to stop on purpose: grant every supervisor a lease of `lease_s`."""

    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAll:
    """`down --cancel-jobs`."""

    by: UserId


Request = (
    Submit
    | Cancel
    | Hold
    | Requeue
    | Update
    | CordonNode
    | UncordonNode
    | LabelNodes
    | ForgetNode
    | PutUser
    | PutProject
    | PutQueue
    | ChangeQueue
    | PutQueues
    | PutReservation
    | EndReservation
    | PutCalibration
    | PutRules
    | PutToken
    | RevokeToken
    | TokensUsed
    | ChangeUser
    | ChangeProject
    | PlanStop
    | CancelAll
)

# ---- reports of supervisors and observations of engines ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A supervisor presents itself: the node as it finds it and the (job, epoch, generation) it carries.

    Attributes:
        seat: of a supervisor that was brought for one attempt; it speaks for its part of that and not for the node.
        challenge: what the head told it to say again, as a sign that it lives; empty at first. None: it knows of no challenge.
    """

    node: Node
    supervisor_id: SupervisorId
    carries: tuple[tuple[JobId, Epoch, Generation], ...] = ()
    seat: Seat | None = None
    challenge: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReady:
    """A node has proven itself and waits at the barrier.

    Attributes:
        bad_links: to nodes of its gang that it does not reach as it should: then the gang does not start.
        clock_off_s: how far its wall clock is ahead of the head's.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    port: int | None = None
    resume: Resume | None = None
    bad_links: tuple[BadLink, ...] = ()
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRefused:
    """A node cannot start its part.

    Attributes:
        charge: the job's own fault (no such file), not the node's.
        exit_code: what a shell would say of it.
        flaw: the node's own fault (its disk is full), which the next job would meet too: it is kept out.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    why: str
    charge: bool
    exit_code: int = 1
    flaw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStarted:
    """All tasks of this node are exec'd."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExited:
    """One task ended."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    exit: TaskExit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStopped:
    """No process of this generation is left on the node. `port_in_use`: rank 0 could not bind: again, uncharged."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    at_s: float
    port_in_use: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFroze:
    """The lease ran out and came back with the epoch current, after a freeze of `frozen_s`.

    `thawed`: short enough, the ranks go on; otherwise the gang restarts in place, uncharged.
    """

    job_id: JobId
    epoch: Epoch
    generation: Generation
    node_id: NodeId
    frozen_s: float
    thawed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberHung:
    """Ranks of this node live, are not frozen, and have made no step for `silent_s`, past the `limit_s` learned from their steps.

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
    """A rank made a whole checkpoint; it counts once committed here under a current epoch."""

    job_id: JobId
    generation: Generation
    node_id: NodeId
    resume: Resume
    stall_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """The newest step whose report is durable at the head; sent sparsely, for budgets and the story."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    """A save did not come whole; training goes on. Told once until a save succeeds again."""

    job_id: JobId
    epoch: Epoch
    generation: Generation
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDead:
    """An engine saw the node die. `confirmed`: nothing of it runs any more, no lease need be waited for."""

    node_id: NodeId
    supervisor_id: SupervisorId | None
    why: str
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A node of an engine that brings supervisors per attempt, as the engine's own inventory has it: it takes work."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLost:
    """The engine ended what carried an attempt on these nodes: nothing of it runs there any more."""

    job_id: JobId
    epoch: Epoch
    node_ids: tuple[NodeId, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """An engine could not begin an attempt, and took it back whole before any supervisor came.

    Attributes:
        nodes: those that stood in the way.
        cause: CONTENDED (others were faster), START_FAIL (the engine's doing), or FAILED (it would refuse the same job again).
    """

    job_id: JobId
    epoch: Epoch
    why: str
    nodes: tuple[NodeId, ...]
    cause: Cause


Report = (
    Hello
    | MemberReady
    | MemberRefused
    | MemberStarted
    | TaskExited
    | MemberStopped
    | MemberFroze
    | MemberHung
    | CheckpointSaved
    | CheckpointFailed
    | Progressed
    | NodeDead
    | NodeSeen
    | SeatLost
    | Withdrawn
)
Event = Request | Report
