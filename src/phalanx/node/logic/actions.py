"""What a supervisor decides: everything that comes out of `Supervisor.step`, as values. The shell performs them in order.

Actions on one member are performed in the order given within two lanes: *work* (PrepareMember, SpawnTasks, WindUp, CleanUp) may take
long, *fence* (Signal, Freeze, Thaw, Kill, ProbeEmpty) must never wait for it. WritePage, Report, Carry and Note are done at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.state.events import Report as ReportedEvent
from phalanx.node.logic.happenings import MemberKey
from phalanx.wire.rank import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMember:
    """Prove devices, make folders, check the command, run setup, verify checkpoints, choose a port. Answer Prepared or Unfit."""

    key: MemberKey
    prepare: Prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnTasks:
    """Make the lease page, then start every task. Answer Spawned or Unfit; a TaskEnded may come before either."""

    key: MemberKey
    prepare: Prepare
    start: StartTasks
    deadline_ns: int
    job_deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePage:
    """Set fields of the member's lease page; None leaves one. Stop fields go before the deadline and before any signal."""

    key: MemberKey
    deadline_ns: int | None = None
    stop: StopReason | None = None
    stop_by_ns: int | None = None
    save_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send SIGTERM to every process of the member."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStacks:
    """Keep where each rank of the member stands. In the fence lane, before what ends them; bounded."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Stop the member's processes where they are. Answer FreezeDone."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Thaw:
    """Let a frozen member go on."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL all of the member, start nothing more of it, and break off what is being prepared. Answer Killed."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEmpty:
    """Answer Emptied if no process of the member is left; nothing otherwise."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WindUp:
    """Nothing runs any more: close the member, drain its output and reports to the spool. Answer WoundUp, with the tail of `tail_of`."""

    key: MemberKey
    tail_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUp:
    """Remove the attempt's scratch folder and all that is held for it."""

    job_id: JobId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCheckpoints:
    """Remove checkpoint folders that retention no longer keeps. `user`: the job's owner, with whose rights."""

    job_id: JobId
    paths: tuple[str, ...]
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the head, at least once."""

    event: ReportedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the attempt's supervisor stream."""

    job_id: JobId
    epoch: Epoch
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What renewals and hellos name from now on."""

    members: tuple[MemberKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLease:
    """Renew now rather than when it is due: the answer decides over frozen ranks, or over ranks that wait for a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Nothing is left: end the supervisor."""


Action = (
    PrepareMember | SpawnTasks | WritePage | Signal | TakeStacks | Freeze | Thaw | Kill | ProbeEmpty | WindUp | CleanUp | DeleteCheckpoints
    | Report | Note | Carry | RenewLease | Exit
)  # fmt: skip
