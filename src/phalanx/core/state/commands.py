"""What shall be done: everything the controller asks of supervisors, as values. Each may arrive twice or never; all are idempotent."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.dependency import ArrayPlace
from phalanx.core.work.job import Resume
from phalanx.core.work.spec import JobSpec
from phalanx.core.work.surroundings import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Prove the devices of this node's grant, make the scratch folder, and answer `MemberReady` or `MemberRefused`.

    Attributes:
        candidates: published checkpoints, newest first; node rank 0 verifies and names the one to resume from.
        checkpoint_dir, output_dir: where the head sees them; where `kept`, each node has folders of its own and the head keeps a copy.
        probe_ports: by node rank, where that node's supervisor answers probes of the link to it; 0 where it does not, or not yet.
        restarts: attempts and in-place restarts so far (PHALANX_RESTART_COUNT).
        hangs: restarts after a hang since the last progress.
        surroundings: of a job with a plan (PHALANX_MACHINE); None for others.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    spec: JobSpec
    allocation: Allocation
    addresses: tuple[str, ...]  # by node rank
    candidates: tuple[Resume, ...]
    checkpoint_dir: str
    output_dir: str
    deadline_s: float | None
    restarts: int
    mtbf_s: float
    user: str = ""
    array: ArrayPlace | None = None
    surroundings: Surroundings | None = None
    probe_ports: tuple[int, ...] = ()
    kept: bool = False
    hangs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTasks:
    """Pass the barrier: every node was ready. `port` is node rank 0's, `resume` what it verified."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    port: int
    resume: Resume | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTasks:
    """SIGTERM, then after `grace_s` SIGKILL; answer `MemberStopped` when nothing of that generation is left.

    `reason` is a `wire.rank.StopReason` name in lower case, written to the lease page before the signal: `phalanx.torch` catches
    SIGTERM, saves and leaves within the grace; a bare script ends as SIGTERM ends it.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """The attempt is over: remove its scratch folder and cgroup."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Remove checkpoint folders that retention no longer keeps. `user`: the job's owner."""

    node_id: NodeId
    job_id: JobId
    paths: tuple[str, ...]
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNow:
    """Ask the ranks to save at their next step."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch


Command = Prepare | StartTasks | StopTasks | Forget | DeleteCheckpoints | SaveNow
