"""Submits the jobs without GPUs that run the `on_end` commands of jobs that have ended."""

from __future__ import annotations

from typing import Final

from phalanx.controller.requests import submits
from phalanx.controller.step_context import StepContext
from phalanx.core.ids import UserId
from phalanx.core.state.events import SubmitJob
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job import Job
from phalanx.core.work.job_file.on_end import END_NAME, ENDED_VARIABLES, OnEnd
from phalanx.core.work.spec import JobSpec, LaunchMode, Role

_BY: Final = UserId("on_end")
_REASON_CHARS_MAX: Final = 1000


def submit_end_jobs(context: StepContext) -> None:
    """Submit one for each job that ended since the last call, in the commit that ends it: a crash neither loses it nor makes a second one."""
    ended, context.ended_with_command = context.ended_with_command, []
    for before in ended:
        job = context.world.jobs[before.id]
        if job.spec.on_end is None:
            continue
        spec = _spec(context, job, job.spec.on_end)
        after = submits.put_end_job(context, SubmitJob(spec=spec, user=job.user, project=job.project, queue=job.queue))
        text = f"job {after.id} ({after.name}) runs its on_end command"
        context.change.add_history(
            HistoryLine(seq=0, at_s=context.now.wall_s, kind="on_end", text=text, job_id=job.id, by=_BY)
        )


def _spec(context: StepContext, job: Job, command: OnEnd) -> JobSpec:
    """What the job's own processes had, but no GPUs, no data and no setup: a setup that failed would also fail here."""
    spec = job.spec
    output_dir = f"{spec.outputs or context.settings.output_root}/{job.folder}"
    return JobSpec(
        name=f"{END_NAME}{job.id}",
        role=Role(script=command.script, gpus=GpuRequest(total=0, nodes=1), launch=LaunchMode.FIXED, tasks_per_node=1),
        workdir=spec.workdir,
        upload=spec.upload,
        env=(*spec.env, *_variables(job, output_dir)),
        secrets=spec.secrets,
        requirements=spec.requirements,
        software=spec.software,
        image=spec.image,
        project=spec.project,
        queue=spec.queue,
        priority=spec.priority,
        time_limit_s=command.time_limit_s,
        labels=spec.labels,
        nodelist=spec.nodelist,
        exclude=spec.exclude,
    )


def _variables(job: Job, output_dir: str) -> tuple[tuple[str, str], ...]:
    """The variables that describe how a job ended. `output_dir`: the head's folder with its outputs."""
    newest = job.checkpoints[-1] if job.checkpoints else None
    ran_s = 0.0 if job.started_s is None or job.ended_s is None else max(0.0, job.ended_s - job.started_s)
    found = {
        "JOB": job.id,
        "NAME": job.name,
        "STATE": job.state.value,
        "EXIT_CODE": "" if job.exit_code is None else str(job.exit_code),
        "REASON": "".join(char if char.isprintable() else " " for char in job.detail)[:_REASON_CHARS_MAX],
        "CANCELLED_BY": job.cancelled_by,
        "SECONDS": f"{ran_s:.0f}",
        "ATTEMPTS": str(job.epoch),
        "STEP": "" if newest is None else str(newest.step),
        "CHECKPOINT": "" if newest is None else newest.path,
        "OUTPUT_DIR": output_dir,
    }
    return tuple((ENDED_VARIABLES + name, value) for name, value in found.items())
