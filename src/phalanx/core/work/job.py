"""A job: what a user submitted, who it belongs to, and how far it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.work.dependency import ArrayPlace, Dependency
from phalanx.core.work.spec import JobSpec

NO_EPOCH: Final = Epoch(0)  # of a job that has had no attempt


class JobState(enum.StrEnum):
    """PENDING waits (again); the last four are terminal and never change."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"

    @property
    def terminal(self) -> bool:
        """Whether the job is over for good."""
        return self in TERMINAL


BACKOFF_MAX_S: Final = 60.0  # longest wait between two failed starts
TERMINAL: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT})


class Reason(enum.StrEnum):
    """Why a job waits: the one dominant reason."""

    NEW = "new"  # not judged yet
    RESOURCES = "resources"  # fits the fleet, not what is free now
    NO_NODES = "no_nodes"  # no node is up
    NODES_DOWN = "nodes_down"  # would fit if nodes that are down or cordoned came back
    HELD = "held"
    QUEUE_CLOSED = "queue_closed"
    BACKOFF = "backoff"  # waits a moment after a failed start
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    CRASH = "crash"
    START_FAIL = "start_fail"
    REQUEUED = "requeued"
    DRAINED = "drained"  # its node was drained under it
    CONTENDED = "contended"  # a shared engine gave its place to others
    MOVED = "moved"  # goes on elsewhere in a moment
    DEPENDENCY = "dependency"  # other jobs must end first
    BEGIN_TIME = "begin_time"  # not before a time its owner gave
    ARRAY_LIMIT = "array_limit"  # enough elements of its array run
    QUOTA = "quota"  # its queue holds all it may
    USER_LIMIT = "user_limit"  # its user holds all he may in its queue
    BUDGET = "budget"  # its queue has spent its GPU-hours of the period
    TOPOLOGY = "topology"  # enough is free, but no one domain holds it
    PRIORITY = "priority"  # others go first to the room there is
    RESERVATION = "reservation"  # nodes are set aside
    CLAIMED = "claimed"  # its room is being cleared: others save and leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A published checkpoint: whole, verified when saved, and made under an epoch that was current then."""

    epoch: Epoch
    step: int
    path: str
    digest: str
    bytes: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job. Times are Unix seconds.

    Attributes:
        seq: submit order, dense and unique.
        epoch: of its newest attempt; 0 before the first.
        reason, detail: why it waits, as a word and a sentence; only meaningful while PENDING.
        not_before_s: earliest next start, after a failed one.
        checkpoints: the newest published ones, oldest first, at most two.
        progress_step: highest step kept so far; restarts without new progress are counted against it.
        losses: crashes and lost nodes so far, for the estimate of the next one.
        stalls: restarts since the last progress, all causes but uncharged ones.
        user_retries: restarts spent on the job's own errors.
        hangs: of them without progress since, so that a job that hangs again and again ends.
        avoid: nodes that failed this job's last attempts, newest last; used only if nothing else fits.
        moves: times it was moved to make room.
        attained_s: time run whose work is kept, over the attempts that ended.
        array: its place in an array; None for a job of its own.
        unmet: dependencies that do not hold yet; it starts only when there is none.
        cancelled_by: set once a cancel is acknowledged; the job never runs again after it.
    """

    id: JobId
    seq: int
    spec: JobSpec
    user: UserId
    project: ProjectId
    queue: QueueId
    submit_s: float
    state: JobState = JobState.PENDING
    reason: Reason = Reason.NEW
    detail: str = ""
    held: bool = False
    epoch: Epoch = NO_EPOCH
    not_before_s: float = 0.0
    checkpoints: tuple[Resume, ...] = ()
    progress_step: int = 0
    losses: int = 0
    stalls: int = 0
    user_retries: int = 0
    hangs: int = 0
    preemptions: int = 0
    moves: int = 0
    attained_s: float = 0.0
    array: ArrayPlace | None = None
    unmet: tuple[Dependency, ...] = ()
    avoid: tuple[NodeId, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    cancelled_by: str = ""

    @property
    def name(self) -> str:
        """The name given, or the command's first word."""
        return self.spec.name
