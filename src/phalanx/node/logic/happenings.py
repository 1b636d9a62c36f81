"""What a supervisor hears: everything that goes into `Supervisor.step`, as values.

Commands and lease replies come from the head, the rest from the supervisor's own threads. `_ns` is CLOCK_BOOTTIME, `at_s` Unix time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.fleet.fitness import BadLink
from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.state.commands import Command
from phalanx.core.work.failure import Evidence
from phalanx.core.work.job import Resume
from phalanx.node.logic.pace import Silence


class MemberKey(NamedTuple):
    """One node's part of one generation of an attempt. A tuple, because it is the key of every table on the hot path."""

    job_id: JobId
    epoch: Epoch
    generation: Generation


class Place(NamedTuple):
    """Where a generation stands among all of its job: later ones compare greater."""

    epoch: Epoch
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Commanded:
    """The head wants something done."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The head answered a renewal that left at `sent_ns`; `asked` are the epochs it named, `superseded` those that no longer count."""

    sent_ns: int
    lease_s: float
    asked: frozenset[tuple[JobId, Epoch]]
    superseded: frozenset[tuple[JobId, Epoch]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Devices are proven, folders made, setup has run; on node rank 0 a port is chosen and a checkpoint verified.

    With `bad_links` nothing of that was done past the proof: the gang will not start on these nodes.
    """

    key: MemberKey
    port: int | None = None
    resume: Resume | None = None
    bad_links: tuple[BadLink, ...] = ()
    clock_off_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Preparing failed, or a task could not be exec'd.

    `charge`: the job's own fault; `exit_code`: what a shell would say of it; `flaw`: the node's own fault, which the next job would meet too.
    """

    key: MemberKey
    why: str
    charge: bool
    exit_code: int = 1
    flaw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """Every task of the member has been exec'd."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """One task ended. `lost`: whoever waited for it died, so neither code nor signal is known. `evidence`: of an end that may be a failure."""

    key: MemberKey
    rank: int
    code: int | None
    signal: int | None
    ended_ns: int
    at_s: float
    lost: bool = False
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptied:
    """No process of the member is left."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A `Kill` is done, and nothing is at work for the member any more. `leftover`: pids that would not die. `fault`: why nobody knows of any."""

    key: MemberKey
    leftover: tuple[int, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeDone:
    """A `Freeze` is done; `still`: no instruction of the member runs."""

    key: MemberKey
    still: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WoundUp:
    """A `WindUp` is done: output and reports are drained. `tail`: the end of what the rank asked for printed."""

    key: MemberKey
    tail: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReported:
    """Rank 0 reported a whole checkpoint over the report pipe."""

    key: MemberKey
    step: int
    path: str
    digest: str
    size_bytes: int
    stall_s: float
    write_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """The member's ranks have made no step for longer than they ever should."""

    key: MemberKey
    silence: Silence


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """The supervisor itself is asked to end. The second time: at once."""


Happening = (
    Commanded | Renewed | Prepared | Unfit | Spawned | TaskEnded | Emptied | Killed | FreezeDone | WoundUp
    | CheckpointReported | Hung | Terminated
)  # fmt: skip
