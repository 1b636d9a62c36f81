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
from phalanx.core.state.commands import (
    CleanUpAttempt,
    Command,
    PrepareTasks,
    StartTasks,
    StopTasks,
)
from phalanx.core.state.reports import (
    CheckpointSaved,
    MemberReady,
    MemberStarted,
    MemberStopped,
    ProgressReported,
    Report,
    TaskExited,
)
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import TaskExit
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.pace import StepPace

_PORT: Final = 29500  # torchrun's default; never bound here
_SERVICE_PORT: Final = 8000  # of replicas; likewise


@dataclass(slots=True)
class ReplayGang:
    """One live attempt as seen by its supervisors.

    Attributes:
        started_nodes: number of nodes on which its tasks have started.
        running: whether its tasks run on every node.
        has_run: whether they ever did.
        name: of its job.
    """

    epoch: Epoch
    generation: Generation
    allocation: Allocation
    started_nodes: int = 0
    running: bool = False
    has_run: bool = False
    name: str = ""


class GangEvent(enum.Enum):
    """An event of a gang."""

    STARTED = "started"  # all tasks run
    STOPPED = "stopped"  # stopped on request while it ran, after a save
    ENDED = "over"  # the controller has ended its attempt


@dataclass(slots=True)
class SupervisorReplies:
    """The supervisors' replies to one outbox.

    Attributes:
        reports: reports in the order of the commands.
        gang_events: gang events in order.
    """

    reports: list[Report] = field(default_factory=list)
    gang_events: list[tuple[GangEvent, JobId]] = field(default_factory=list)


class ReplaySupervisors:
    """All nodes' supervisors.

    Attributes:
        gangs: live attempts by job.
        paces: of jobs that report their progress, by name, until they start for the first time and report it.
    """

    def __init__(self) -> None:
        self.gangs: dict[JobId, ReplayGang] = {}
        self.paces: dict[str, StepPace] = {}

    def execute(self, commands: Iterable[Command], now_s: float) -> SupervisorReplies:
        """Execute the commands of one step at once."""
        replies = SupervisorReplies()
        for command in commands:
            if isinstance(command, PrepareTasks):
                replies.reports.append(self._prepare(command))
            elif isinstance(command, StartTasks):
                self._start(command, now_s, replies)
            elif isinstance(command, StopTasks):
                self._stop(command, now_s, replies)
            elif isinstance(command, CleanUpAttempt) and command.job_id in self.gangs:
                del self.gangs[command.job_id]
                replies.gang_events.append((GangEvent.ENDED, command.job_id))
        return replies

    def finish_job(self, job_id: JobId, now_s: float) -> list[Report]:
        """Report that every task of the job exited with code 0."""
        gang = self.gangs[job_id]
        reports: list[Report] = []
        for grant in gang.allocation.grants:
            reports += _exits(job_id, gang, grant, now_s, by_us=False)
            reports.append(_stopped(job_id, gang, grant, now_s))
        gang.running = False
        return reports

    def _prepare(self, command: PrepareTasks) -> Report:
        gang = self.gangs.get(command.job_id)
        if gang is None or gang.epoch != command.epoch or gang.generation != command.generation:
            gang = ReplayGang(
                epoch=command.epoch,
                generation=command.generation,
                allocation=command.allocation,
                name=command.spec.name,
            )
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
            service_port=0 if command.replica is None or not first else _SERVICE_PORT,
        )

    def _start(self, command: StartTasks, now_s: float, replies: SupervisorReplies) -> None:
        gang = self.gangs[command.job_id]
        gang.started_nodes += 1
        if gang.started_nodes == len(gang.allocation.grants):
            gang.running = gang.has_run = True
            replies.gang_events.append((GangEvent.STARTED, command.job_id))
        replies.reports.append(
            MemberStarted(
                job_id=command.job_id,
                epoch=command.epoch,
                generation=command.generation,
                node_id=command.node_id,
                at_s=now_s,
            )
        )
        pace = self.paces.pop(gang.name, None) if gang.running else None
        if pace is not None:
            replies.reports.append(
                ProgressReported(
                    job_id=command.job_id, epoch=gang.epoch, generation=gang.generation, step=pace.steps, pace=pace
                )
            )

    def _stop(self, command: StopTasks, now_s: float, replies: SupervisorReplies) -> None:
        """Stop the whole gang at the first command: a save needs all ranks, so all nodes stop together."""
        gang = self.gangs[command.job_id]
        grant = gang.allocation.grant_on(command.node_id)
        assert grant is not None, command
        if gang.running:
            gang.running = False
            replies.gang_events.append((GangEvent.STOPPED, command.job_id))
            replies.reports.append(_saved(command, gang, now_s))
        if gang.has_run:
            replies.reports += _exits(command.job_id, gang, grant, now_s, by_us=True)
        replies.reports.append(_stopped(command.job_id, gang, grant, now_s))


def _exits(job_id: JobId, gang: ReplayGang, grant: NodeGrant, now_s: float, *, by_us: bool) -> Sequence[Report]:
    return [
        TaskExited(
            job_id=job_id,
            epoch=gang.epoch,
            generation=gang.generation,
            exit=TaskExit(
                rank=rank, node_id=grant.node_id, code=0, signal=None, requested_by_phalanx=by_us, ended_s=now_s
            ),
        )
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks)
    ]


def _stopped(job_id: JobId, gang: ReplayGang, grant: NodeGrant, now_s: float) -> Report:
    return MemberStopped(job_id=job_id, epoch=gang.epoch, generation=gang.generation, node_id=grant.node_id, at_s=now_s)


def _saved(command: StopTasks, gang: ReplayGang, now_s: float) -> Report:
    """Report the checkpoint saved at the stop; its step is the attempt's epoch, which only grows."""
    path = f"/simulated/{command.job_id}/epoch-{gang.epoch}"
    resume = PublishedCheckpoint(epoch=gang.epoch, step=int(gang.epoch), path=path, digest=path, saved_s=now_s)
    return CheckpointSaved(
        job_id=command.job_id, generation=gang.generation, node_id=gang.allocation.grants[0].node_id, resume=resume
    )
