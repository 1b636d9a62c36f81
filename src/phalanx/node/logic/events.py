"""The events that `Supervisor.step` handles, as values.

Commands and lease replies come from the head, the others from the supervisor's own threads. `_ns` is CLOCK_BOOTTIME, `at_s` Unix time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.state.commands import Command
from phalanx.core.work.failure import FailureEvidence, MemoryOveruse
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.node.logic.hang_detector import Hang


class MemberKey(NamedTuple):
    """The key of one node's part of one generation of an attempt. A tuple, because tables on the hot path use it as their key."""

    job_id: JobId
    epoch: Epoch
    generation: Generation


class GenerationId(NamedTuple):
    """A generation of a job across its attempts; later ones compare greater."""

    epoch: Epoch
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    """The head sent a command."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """The head answered a renewal sent at `sent_ns`. `requested`: the epochs in the request; `superseded`: those that are no longer current."""

    sent_ns: int
    lease_s: float
    requested: frozenset[tuple[JobId, Epoch]]
    superseded: frozenset[tuple[JobId, Epoch]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPrepared:
    """Devices are checked, folders made, setup has run; on node rank 0 a port is chosen and a checkpoint verified.

    Node rank 0 of a replica has also reserved its `service_port`.

    With `bad_links` only the checks were done: the gang will not start on these nodes.
    """

    key: MemberKey
    port: int | None = None
    resume: PublishedCheckpoint | None = None
    bad_links: tuple[BadLink, ...] = ()
    clock_off_s: float = 0.0
    service_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStartFailed:
    """Preparation failed, or a task could not be exec'd.

    `charge`: the job is at fault; `exit_code`: as a shell reports it; `flaw`: the node is at fault, so that the next job would fail too;
    `disk_full`: because its disk has no room.
    """

    key: MemberKey
    why: str
    charge: bool
    exit_code: int = 1
    flaw: bool = False
    disk_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSpawned:
    """Every task of the member has been exec'd."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """One task ended. `status_unknown`: the process that waited for it died, so code and signal are unknown. `evidence`: of a possible failure."""

    key: MemberKey
    rank: int
    code: int | None
    signal: int | None
    ended_ns: int
    at_s: float
    status_unknown: bool = False
    evidence: FailureEvidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEmptied:
    """No process of the member is left."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKilled:
    """A `Kill` is done and no work for the member is under way. `leftover`: pids that survived. `fault`: why the kill itself failed."""

    key: MemberKey
    leftover: tuple[int, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeFinished:
    """A `FreezeMember` is done; `frozen`: no process of the member runs."""

    key: MemberKey
    frozen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDrained:
    """A `DrainOutput` is done: output and reports are drained, checkpoints and output files are sent.

    `tail`: the end of the requested rank's output. `unsent`: as in `MemberStopped`.
    """

    key: MemberKey
    tail: bytes = b""
    unsent: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReported:
    """Rank 0 reported a complete checkpoint through the report pipe."""

    key: MemberKey
    step: int
    path: str
    digest: str
    size_bytes: int
    stall_s: float
    write_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetected:
    """The member's ranks have made no step for longer than the limit of `HangDetector`."""

    key: MemberKey
    hang: Hang


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryExceeded:
    """The member's processes need more memory than its job asked for on this node."""

    key: MemberKey
    use: MemoryOveruse


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessProbed:
    """A replica's port began to answer, or stopped answering. `why`: the failed probe."""

    key: MemberKey
    ready: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepHookAnswered:
    """A `CallSleepHook` is done. `why`: it failed; "" if the program has freed its devices, or uses them again and is ready."""

    key: MemberKey
    turn: int
    sleep: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRequested:
    """The supervisor is asked to end; the second time immediately."""


SupervisorEvent = (
    CommandReceived
    | LeaseRenewed
    | MemberPrepared
    | MemberStartFailed
    | TasksSpawned
    | TaskEnded
    | MemberEmptied
    | MemberKilled
    | FreezeFinished
    | OutputDrained
    | CheckpointReported
    | HangDetected
    | MemoryExceeded
    | ReadinessProbed
    | SleepHookAnswered
    | TerminationRequested
)
