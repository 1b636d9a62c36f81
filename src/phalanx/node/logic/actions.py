"""The actions that `Supervisor.step` returns, as values. The shell performs them in order.

Actions on one member run in order within two lanes. *Work* (PrepareMember, SpawnTasks, DrainOutput, RemoveScratch) may take long; *fence* (Signal,
Freeze, Thaw, Kill, CheckEmpty) never waits for it. UpdateLeasePage, Report, Carry and Note are performed immediately.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import Epoch, JobId
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.state.reports import Report as ReportedEvent
from phalanx.node.logic.events import MemberKey
from phalanx.wire.rank import RankStopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMember:
    """Check devices, make folders, check the command, run setup, verify checkpoints, choose a port. Answered by Prepared or Unfit."""

    key: MemberKey
    prepare: PrepareTasks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnTasks:
    """Make the lease page, then start every task. Answered by Spawned or Unfit; a TaskEnded may come before either."""

    key: MemberKey
    prepare: PrepareTasks
    start: StartTasks
    deadline_ns: int
    job_deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLeasePage:
    """Set fields of the member's lease page; None leaves a field unchanged. Stop fields are written before the deadline and any signal.

    Without such a member only `stop` counts: the supervisor keeps the last one as its own result.
    """

    key: MemberKey
    deadline_ns: int | None = None
    stop: RankStopReason | None = None
    stop_by_ns: int | None = None
    save_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSigterm:
    """Send SIGTERM to every process of the member."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Dump the stacks of the member's ranks. Runs in the fence lane, before the actions that end them; bounded in time."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeMember:
    """Freeze the member's processes. Answered by FreezeFinished."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ThawMember:
    """Resume a frozen member."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMember:
    """SIGKILL all processes of the member, start no more, and abort its preparation. Answered by Killed."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEmpty:
    """Check whether the member has processes. Answered by Emptied if none is left, else not answered."""

    key: MemberKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSleepHook:
    """Ask the program of a replica to free its devices (`sleep`), or to use them again. Answered by SleepHookAnswered; bounded in time."""

    key: MemberKey
    turn: int
    sleep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOutput:
    """Close a member without processes: drain its output and reports to the spool. Answered by OutputDrained with the output tail of rank `tail_of`."""

    key: MemberKey
    tail_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveScratch:
    """Remove the attempt's scratch folder and release its resources."""

    job_id: JobId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveCheckpoints:
    """Remove checkpoint folders that retention no longer needs, with the rights of the job's owner `user`."""

    job_id: JobId
    paths: tuple[str, ...]
    user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPowerLimits:
    """Set the power limit of each GPU, until a Unix time or without an end; None restores the limits of before."""

    milliwatts: int | None
    until_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEvent:
    """Send an event to the head, at least once."""

    event: ReportedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendNote:
    """Append a line to the attempt's supervisor stream."""

    job_id: JobId
    epoch: Epoch
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishMembers:
    """Replace the list of members that lease renewals and hellos name."""

    members: tuple[MemberKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLease:
    """Renew the lease now instead of when it is due: frozen ranks, or ranks that wait for a lease, depend on the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitSupervisor:
    """End the supervisor: no member is left."""


SupervisorAction = (
    PrepareMember
    | SpawnTasks
    | UpdateLeasePage
    | SendSigterm
    | DumpStacks
    | FreezeMember
    | ThawMember
    | KillMember
    | CheckEmpty
    | DrainOutput
    | CallSleepHook
    | RemoveScratch
    | RemoveCheckpoints
    | SetPowerLimits
    | SendEvent
    | AppendNote
    | PublishMembers
    | RenewLease
    | ExitSupervisor
)
