"""All supervisors of the simulated fleet: they answer the controller's commands at once, as healthy nodes would.

One object stands for all nodes. Preparing, starting and stopping processes takes no time here, so a replay only shows waiting and
scheduling; the replay itself adds the cost of a stop.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import Epoch, Generation, JobId
from phalanx.core.state.commands import Command, Forget, Prepare, StartTasks, StopTasks
from phalanx.core.state.events import CheckpointSaved, MemberReady, MemberStarted, MemberStopped, Report, TaskExited
from phalanx.core.work.allocation import Allocation, Grant
from phalanx.core.work.attempt import TaskExit
from phalanx.core.work.job import Resume

_PORT: Final = 29500  # torchrun's default; never bound here


@dataclass(slots=True)
class Gang:
    """One live attempt as seen by its supervisors.

    Attributes:
        started: number of nodes on which its tasks have started.
        runs: whether its tasks run on every node.
        ran: whether they ever did.
    """

    epoch: Epoch
    generation: Generation
    allocation: Allocation
    started: int = 0
    runs: bool = False
    ran: bool = False


class Course(enum.Enum):
    """An event of a gang."""

    STARTED = "started"  # all tasks run
    STOPPED = "stopped"  # stopped on request while it ran, after a save
    OVER = "over"  # the controller has ended its attempt


@dataclass(slots=True)
class Heard:
    """The supervisors' replies to one outbox.

    Attributes:
        reports: reports in the order of the commands.
        courses: gang events in order.
    """

    reports: list[Report] = field(default_factory=list)
    courses: list[tuple[Course, JobId]] = field(default_factory=list)


class Supervisors:
    """All nodes' supervisors.

    Attributes:
        gangs: live attempts by job.
    """

    def __init__(self) -> None:
        self.gangs: dict[JobId, Gang] = {}

    def hear(self, commands: Iterable[Command], now_s: float) -> Heard:
        """Execute the commands of one step at once."""
        replies = Heard()
        for command in commands:
            if isinstance(command, Prepare):
                replies.reports.append(self._prepare(command))
            elif isinstance(command, StartTasks):
                self._start(command, now_s, replies)
            elif isinstance(command, StopTasks):
                self._stop(command, now_s, replies)
            elif isinstance(command, Forget) and command.job_id in self.gangs:
                del self.gangs[command.job_id]
                replies.courses.append((Course.OVER, command.job_id))
        return replies

    def finish(self, job_id: JobId, now_s: float) -> list[Report]:
        """Report that every task of the job exited with code 0."""
        gang = self.gangs[job_id]
        reports: list[Report] = []
        for grant in gang.allocation.grants:
            reports += _exits(job_id, gang, grant, now_s, by_us=False)
            reports.append(_stopped(job_id, gang, grant, now_s))
        gang.runs = False
        return reports

    def _prepare(self, command: Prepare) -> Report:
        gang = self.gangs.get(command.job_id)
        if gang is None or gang.epoch != command.epoch or gang.generation != command.generation:
            gang = Gang(epoch=command.epoch, generation=command.generation, allocation=command.allocation)
            self.gangs[command.job_id] = gang
        first = gang.allocation.grants[0].node_id == command.node_id
        resume = command.candidates[0] if first and command.candidates else None
        return MemberReady(
            job_id=command.job_id,
            epoch=command.epoch,
            generation=command.generation,
            node_id=command.node_id,
            port=_PORT if first else None,
            resume=resume,
        )

    def _start(self, command: StartTasks, now_s: float, replies: Heard) -> None:
        gang = self.gangs[command.job_id]
        gang.started += 1
        if gang.started == len(gang.allocation.grants):
            gang.runs = gang.ran = True
            replies.courses.append((Course.STARTED, command.job_id))
        replies.reports.append(
            MemberStarted(
                job_id=command.job_id,
                epoch=command.epoch,
                generation=command.generation,
                node_id=command.node_id,
                at_s=now_s,
            )
        )

    def _stop(self, command: StopTasks, now_s: float, replies: Heard) -> None:
        """Stop the whole gang at the first command: a save needs all ranks, so all nodes stop together."""
        gang = self.gangs[command.job_id]
        grant = gang.allocation.on(command.node_id)
        assert grant is not None, command
        if gang.runs:
            gang.runs = False
            replies.courses.append((Course.STOPPED, command.job_id))
            replies.reports.append(_saved(command, gang, now_s))
        if gang.ran:
            replies.reports += _exits(command.job_id, gang, grant, now_s, by_us=True)
        replies.reports.append(_stopped(command.job_id, gang, grant, now_s))


def _exits(job_id: JobId, gang: Gang, grant: Grant, now_s: float, *, by_us: bool) -> Sequence[Report]:
    return [
        TaskExited(
            job_id=job_id,
            epoch=gang.epoch,
            generation=gang.generation,
            exit=TaskExit(rank=rank, node_id=grant.node_id, code=0, signal=None, by_us=by_us, at_s=now_s),
        )
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks)
    ]


def _stopped(job_id: JobId, gang: Gang, grant: Grant, now_s: float) -> Report:
    return MemberStopped(job_id=job_id, epoch=gang.epoch, generation=gang.generation, node_id=grant.node_id, at_s=now_s)


def _saved(command: StopTasks, gang: Gang, now_s: float) -> Report:
    """Report the checkpoint saved at the stop; its step is the attempt's epoch, which only grows."""
    path = f"/simulated/{command.job_id}/epoch-{gang.epoch}"
    resume = Resume(epoch=gang.epoch, step=int(gang.epoch), path=path, digest=path, saved_s=now_s)
    return CheckpointSaved(
        job_id=command.job_id, generation=gang.generation, node_id=gang.allocation.grants[0].node_id, resume=resume
    )
