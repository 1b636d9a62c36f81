"""One attempt of a job, from its start to its end or requeue."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.failure import FailureDiagnosis, FailureEvidence
from phalanx.core.work.job import PublishedCheckpoint

FIRST_GENERATION: Final = Generation(0)


TIME_LIMIT_NOTE: Final = "time limit"  # on exits of tasks that a supervisor itself ended at the job's time limit


class AttemptState(enum.StrEnum):
    """PLACED -> STARTING -> RUNNING -> STOPPING -> ENDED; an in-place restart goes back to PLACED under the same epoch."""

    PLACED = "placed"  # committed; supervisors verify their devices and wait at the barrier
    STARTING = "starting"  # ranks and addresses are assigned
    RUNNING = "running"  # every rank has been exec'd
    STOPPING = "stopping"  # asked to end, or partly ended; waits until every member is accounted for
    ENDED = "ended"


class MemberState(enum.StrEnum):
    """The state of one node's part of the gang."""

    REQUESTED = "asked"
    READY = "ready"
    STARTED = "started"
    STOPPED = "stopped"  # no process of this generation remains on the node
    LOST = "lost"  # the node died, or its lease expired


class EndCause(enum.StrEnum):
    """Why an attempt (or a generation of it) ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the job's own error: non-zero exit
    CRASH = "crash"  # a task died by a signal that Phalanx did not send
    NODE_FAIL = "node_fail"
    START_FAIL = "start_fail"
    # A node failed its preflight: placed again without it, uncharged while there are other nodes to try
    UNFIT = "unfit"
    PREEMPTED = "preempted"
    MOVED = "moved"  # to make room for another job: continues elsewhere at once
    DRAINED = "drained"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    TIMEOUT = "timeout"
    FREEZE = "freeze"  # frozen longer than its collective timeout: restarted, uncharged
    CONTENDED = "contended"  # a shared engine gave the place to other jobs first: placed again, uncharged
    LIMITED = "limited"  # a limit of a shared engine keeps it from starting: waits and tries again, uncharged
    FAULT = "fault"  # a failure rule blames a device or node: placed again without that node
    HANG = "hang"  # no step for far longer than usual: stacks are captured, it restarts in place
    # Another process held the rendezvous port: retried on another port, uncharged a few times
    PORT_TAKEN = "port_taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExit:
    """How one task ended.

    Attributes:
        code: None if a signal ended it.
        requested_by_phalanx: the exit was requested by Phalanx.
        evidence: further signs that its supervisor found; the head stores the diagnosis instead.
        diagnosis: the result of the failure rules; None if the exit was not a failure, or no rules were applied.
    """

    rank: int
    node_id: NodeId
    code: int | None
    signal: int | None
    requested_by_phalanx: bool
    ended_s: float
    note: str = ""
    evidence: FailureEvidence | None = None
    diagnosis: FailureDiagnosis | None = None

    @property
    def shell_code(self) -> int:
        """As a shell reports it: the code, or 128 + signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.requested_by_phalanx and self.shell_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of the gang.

    Attributes:
        port: rendezvous port chosen by node rank 0.
        probe_port: where a supervisor that serves only this attempt answers link probes of its peers; 0 for none.
        bad_links: the bad links to other members that it reported.
        disk_full: it refused because the disk of its node has no room.
    """

    node_id: NodeId
    state: MemberState = MemberState.REQUESTED
    port: int | None = None
    why: str = ""
    probe_port: int = 0
    bad_links: tuple[BadLink, ...] = ()
    disk_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt. Times are Unix seconds.

    Attributes:
        folder: of its logs and checkpoints, inside the job's folder; also with a random key, since epochs are assigned again too.
        generation: in-place restarts so far.
        placed_s: start of billing; GPU-seconds are billed from here to `ended_s`.
        generation_s: when the current generation was requested.
        running_s: when every rank of the current generation was exec'd; None before.
        first_running_s: the same for the first generation.
        resume_from: the checkpoint that its ranks load, verified by node rank 0.
        stop_cause: why it is STOPPING; None until then.
        restart_after_stop: after STOPPING the gang starts again in place.
        causes: of every generation that ended, in order.
        head_stores_copies: some of its nodes do not see the head's files, so the head stores a copy of its checkpoints and outputs. Decided at the
            placement, so that all its nodes do the same.
        service_port: of a replica, the port on which node rank 0 serves; 0 before it is chosen.
        ready: of a replica, whether its port answered the last probes.
        speed: of the job where it runs, as a share of that on its fastest model, as observed before the placement; 1 if it was not.
        ready_s: when `ready` last changed; None before it was first ready.
    """

    job_id: JobId
    epoch: Epoch
    folder: str
    allocation: Allocation
    placed_s: float
    generation: Generation = FIRST_GENERATION
    state: AttemptState = AttemptState.PLACED
    members: tuple[Member, ...] = ()
    generation_s: float = 0.0
    running_s: float | None = None
    first_running_s: float | None = None
    ended_s: float | None = None
    resume_from: PublishedCheckpoint | None = None
    exits: tuple[TaskExit, ...] = ()
    stop_cause: EndCause | None = None
    restart_after_stop: bool = False
    why: str = ""
    exit_code: int | None = None
    causes: tuple[EndCause, ...] = ()
    head_stores_copies: bool = False
    service_port: int = 0
    ready: bool = False
    ready_s: float | None = None
    speed: float = 1.0

    @property
    def serving(self) -> bool:
        """Whether it is a replica that is ready to serve."""
        return self.ready and self.state is AttemptState.RUNNING

    @property
    def holds_allocation(self) -> bool:
        """Whether it still holds its allocation."""
        return self.state is not AttemptState.ENDED
