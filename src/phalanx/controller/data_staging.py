"""Copies the data of waiting jobs to their nodes before they hold GPUs: by jobs without GPUs, on which the waiting jobs then depend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.requests import submits
from phalanx.controller.step_context import StepContext
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.ids import JobId, NodeId, UserId
from phalanx.core.lifecycle import job as jobs
from phalanx.core.lifecycle.dependencies import first_reason
from phalanx.core.scheduling.staging_targets import StagingTarget
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.world import World
from phalanx.core.work.dependency import Dependency, DependencyKind
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import COPY_NAME, Job
from phalanx.core.work.job_file.requirements import NO_REQUIREMENTS
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import JobState

STAGER: Final = UserId("data")  # `by` of cancels that are decided here
PLACED_WITHIN_S: Final = 30.0  # else the jobs that wait for the copy go on without it


@dataclass(slots=True)
class StagingKeeper:
    """See the module. The records say everything; in memory is only which jobs copy now, and since when they wait for a place.

    Attributes:
        _copying: the live jobs that copy, and since when each waits for its place (CLOCK_BOOTTIME).
    """

    world: World
    _copying: dict[JobId, float] = field(default_factory=dict)

    def start(self, boot_s: float) -> None:
        """Find the copies under way in a loaded world."""
        self._copying = {job.id: boot_s for job in self.world.jobs.values() if _copies_now(job)}

    def update(self, context: StepContext) -> None:
        """Stop copies that no job waits for, and those that got no place or lost it: the jobs that wait then start without them."""
        for job_id, since_s in list(self._copying.items()):
            job = self.world.jobs.get(job_id)
            if job is None or not _copies_now(job):  # it has ended, or its creation was undone
                del self._copying[job_id]
                continue
            late = job.epoch > 0 or context.now.boot_s - since_s > PLACED_WITHIN_S
            ended = job.detail if job.epoch > 0 else ""
            if not self.world.relations.dependents.get(_condition(job_id)):
                why = "no job waits for this data any more"
            elif job.state is JobState.PENDING and late:
                why = ended or "its nodes have no place for it"
            else:
                continue
            context.apply(jobs.cancel(context.case(job_id), STAGER, why, context.facts))

    def stage(self, context: StepContext, targets: Iterable[StagingTarget]) -> None:
        """Begin the copies, or join jobs to those of the same data under way. A job that can do neither may start without."""
        for target in targets:
            job = self.world.jobs[target.job_id]
            copy = self._copy_under_way(job, target.nodes)
            if copy is None and target.nodes:
                copy = self._begin(context, job, target.nodes)
            if copy is not None:
                self._wait_for(context, job, copy)

    def _copy_under_way(self, job: Job, nodes: tuple[NodeId, ...]) -> Job | None:
        """A live copy of the same data by the same user on these nodes."""
        for job_id in self._copying:
            copy = self.world.jobs.get(job_id)
            if copy is None or not _copies_now(copy) or copy.cancelled_by:
                continue
            if _owner_and_data(copy) == _owner_and_data(job) and set(nodes) <= set(copy.staged_on):
                return copy
        return None

    def _begin(self, context: StepContext, job: Job, nodes: tuple[NodeId, ...]) -> Job:
        request = SubmitJob(spec=_spec_of_copy(job, nodes), user=job.user, project=job.project, queue=job.queue)
        copy = submits.put_staging_job(context, request, nodes)
        self._copying[copy.id] = context.now.boot_s
        return copy

    def _wait_for(self, context: StepContext, job: Job, copy: Job) -> None:
        unmet = (*job.unmet_dependencies, _condition(copy.id))
        reason, detail = first_reason(held=False, unmet=unmet, begin_s=None, now_s=context.now.wall_s)
        context.change.put(
            replace(job, unmet_dependencies=unmet, staged_on=copy.staged_on, reason=reason, detail=detail)
        )
        text = f"job {copy.id} copies its data to {fold_hostlist(list(copy.staged_on))} first, without GPUs"
        context.change.add_history(
            HistoryLine(seq=0, at_s=context.now.wall_s, kind="staging", text=text, job_id=job.id, by=STAGER)
        )


def _condition(job_id: JobId) -> Dependency:
    return Dependency(kind=DependencyKind.DATA, job_id=job_id)


def _copies_now(job: Job) -> bool:
    """Whether it is a live job that was made to copy data for others."""
    return job.copies_ahead and not job.state.terminal


def _owner_and_data(job: Job) -> tuple[object, ...]:
    spec = job.spec
    return (job.user, job.project, job.queue, spec.data, spec.env, spec.secrets, spec.reservation)


def _spec_of_copy(job: Job, nodes: tuple[NodeId, ...]) -> JobSpec:
    """A job that only copies: what reads the source is that of the job itself, the rest is left at its defaults."""
    spec = job.spec
    return JobSpec(
        name=f"{COPY_NAME}{job.id}",
        role=Role(argv=("true",), gpus=GpuRequest(total=0, nodes=len(nodes))),
        workdir="/",
        env=spec.env,
        secrets=spec.secrets,
        requirements=NO_REQUIREMENTS,
        data=spec.data,
        project=spec.project,
        queue=spec.queue,
        priority=spec.priority,
        labels=spec.labels,
        reservation=spec.reservation,
        nodelist=nodes,
    )
