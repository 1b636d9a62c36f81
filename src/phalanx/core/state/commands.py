"""Commands that the controller sends to supervisors, as values. Each may arrive twice or never; all are idempotent."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.work.allocation import Allocation
from phalanx.core.work.dependency import ArrayPosition
from phalanx.core.work.gang_topology import GangTopology
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.services.service_terms import ReplicaPosition
from phalanx.core.work.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareTasks:
    """Check the granted devices, create the scratch folder, and answer `MemberReady` or `MemberRefused`.

    Attributes:
        candidates: published checkpoints, newest first; node rank 0 verifies them and reports which one to resume from.
        checkpoint_dir, output_dir: paths on the head, or addresses in an object store; with `kept`, each node has its own folders and the head stores a copy.
        probe_ports: by node rank, the port on which that supervisor answers link probes; 0 if it does not, or not yet.
        restarts: attempts and in-place restarts so far (PHALANX_RESTART_COUNT).
        hangs: restarts after a hang since the last progress.
        surroundings: topology of the gang, for a job with a plan (PHALANX_MACHINE); None for others.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    spec: JobSpec
    allocation: Allocation
    addresses: tuple[str, ...]  # by node rank
    candidates: tuple[PublishedCheckpoint, ...]
    checkpoint_dir: str
    output_dir: str
    deadline_s: float | None
    restarts: int
    mtbf_s: float
    user: str = ""
    array: ArrayPosition | None = None
    surroundings: GangTopology | None = None
    probe_ports: tuple[int, ...] = ()
    kept: bool = False
    hangs: int = 0
    replica: ReplicaPosition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTasks:
    """Start the ranks: every node is ready. `port`: of node rank 0; `resume`: the checkpoint that it verified.

    `service_port`: of a replica, the port on which node rank 0 serves; 0 for any other job. `addresses`: those of `PrepareTasks` by node
    rank, if a supervisor has brought its own since; empty otherwise.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    port: int
    resume: PublishedCheckpoint | None
    service_port: int = 0
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTasks:
    """Send SIGTERM, after `grace_s` SIGKILL; answer `MemberStopped` when no process of that generation is left.

    `reason` is the name of a `wire.rank.RankStopReason` in lower case, written to the lease page before the signal. `phalanx.torch` handles
    SIGTERM: it saves and exits within the grace period. A script without it is ended by SIGTERM.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUpAttempt:
    """Remove the scratch folder and cgroup of an attempt that has ended."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Delete checkpoint folders that are past retention. `user`: the job's owner."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSleepHook:
    """Ask a replica's program to free its devices (`sleep`), or to use them again; answer `SleepHookEnded`. Sent to its first node.

    `turn`: `Attempt.sleep_turn`. A node ignores a lower turn than its last, and repeats its answer for the same one.
    """

    node_id: NodeId
    job_id: JobId
    epoch: Epoch
    generation: Generation
    turn: int
    sleep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitPower:
    """Set the power limit of each GPU, until a Unix time or without an end; None restores the limits of before. Answer `PowerLimited`."""

    node_id: NodeId
    milliwatts: int | None
    until_s: float | None


AttemptCommand = PrepareTasks | StartTasks | StopTasks | CleanUpAttempt | SaveNow | RunSleepHook
Command = AttemptCommand | DeleteCheckpoints | LimitPower


class ProviderAction(enum.StrEnum):
    """What a provider is asked to do with an order; LIST: to list the machines that it has by the settings of a pool, whose name is the token."""

    START = "start"
    STOP = "stop"
    LIST = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderCall:
    """A call of a pool's provider. As the other commands, it is sent after the commit and may be sent again: its token makes it idempotent.

    `offer`, `settings`, `machine`, `known_machine`: as in `ports.provider.NodeOrder`. `console`: read what the machine printed before it is stopped.
    """

    provider: str
    action: ProviderAction
    node_id: NodeId
    token: str
    template: str
    zone: str
    pool: str = ""
    offer: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    machine: str = ""
    known_machine: str = ""
    console: bool = False
