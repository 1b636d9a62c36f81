"""A job: the submitted spec, its owner, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.work.dependency import ArrayPosition, Dependency, DependencyKind
from phalanx.core.work.pace import MeasuredPace, StatedEnd
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.states import JobState, WaitReasonCode

NO_EPOCH: Final = Epoch(0)  # a job without an attempt
COPY_NAME: Final = "data-of-"  # of a job that copies data for another, whose id follows
BACKOFF_MAX_S: Final = 60.0  # longest wait between two failed starts


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCheckpoint:
    """A published checkpoint: complete, verified when saved, and made under an epoch that was current then."""

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
        folder: name of the folders with its files. It contains a random key, since a restored database assigns the job's number again.
        seq: submit order, dense and unique.
        parked_s: since when it is parked, which is a hold that only a request ends; None if it is not.
        epoch: of its newest attempt; 0 before the first.
        reason, detail: why it waits, as a word and a sentence; only meaningful while PENDING.
        not_before_s: earliest next start, after a failed one.
        checkpoints: the newest published ones, oldest first, at most two.
        progress_step: highest checkpointed step; restarts without new progress are counted against it.
        failure_count: crashes and lost nodes so far, to estimate the next one.
        charged_restarts: charged restarts since the last progress.
        user_retries: restarts spent on the job's own errors.
        hang_restarts: restarts after hangs since the last progress, which limits how often a job may hang.
        avoided_nodes: nodes that failed this job's last attempts, newest last; used only if nothing else fits.
        moves: times it was moved to make room.
        paces: how fast its steps ran, for each of its newest attempts that reported enough of them, oldest first.
        stated_end: when it ends by its own progress; None if it reports no total of steps.
        attained_s: run time whose work is saved, over the attempts that ended.
        array: its position in an array; None for a single job.
        replica: the service and revision that it is a replica of; None for any other job.
        unmet_dependencies: dependencies that do not hold yet; it starts only when this is empty.
        staged_on: nodes to which its data was copied, or is being copied, before it held GPUs; of a job that makes such a copy, its nodes.
        cancelled_by: set once a cancel is acknowledged; the job never runs again after it.
    """

    id: JobId
    folder: str
    seq: int
    spec: JobSpec
    user: UserId
    project: ProjectId
    queue: QueueId
    submit_s: float
    state: JobState = JobState.PENDING
    reason: WaitReasonCode = WaitReasonCode.NEW
    detail: str = ""
    held: bool = False
    parked_s: float | None = None
    epoch: Epoch = NO_EPOCH
    not_before_s: float = 0.0
    checkpoints: tuple[PublishedCheckpoint, ...] = ()
    progress_step: int = 0
    failure_count: int = 0
    charged_restarts: int = 0
    user_retries: int = 0
    hang_restarts: int = 0
    preemptions: int = 0
    moves: int = 0
    paces: tuple[MeasuredPace, ...] = ()
    stated_end: StatedEnd | None = None
    attained_s: float = 0.0
    array: ArrayPosition | None = None
    replica: ReplicaPosition | None = None
    unmet_dependencies: tuple[Dependency, ...] = ()
    staged_on: tuple[NodeId, ...] = ()
    avoided_nodes: tuple[NodeId, ...] = ()
    started_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    cancelled_by: str = ""

    @property
    def name(self) -> str:
        """The name given, or the command's first word."""
        return self.spec.name

    @property
    def gpu_milli(self) -> int:
        """Thousandths of GPUs as requested, of all roles."""
        return self.spec.role.milli

    @property
    def copies_ahead(self) -> bool:
        """Whether it was made to copy data for others, before they hold GPUs."""
        return bool(self.staged_on) and self.gpu_milli == 0


def dependency_reason(unmet: Sequence[Dependency]) -> WaitReasonCode:
    """The reason of a job with unmet conditions: STAGING if all of them are copies of its data."""
    staging = all(one.kind is DependencyKind.DATA for one in unmet)
    return WaitReasonCode.STAGING if staging else WaitReasonCode.DEPENDENCY
