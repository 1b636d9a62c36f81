"""`phalanx update|cancel|hold|release|park|resume|requeue`: changes one or several jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.completion import complete_jobs
from phalanx.cli.connection import connect
from phalanx.cli.errors import print_error
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.list_output import to_json
from phalanx.cli.option_types import DURATION
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, PhalanxError, Unreachable
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView

if TYPE_CHECKING:
    from phalanx.client import Client

_JOBS = click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")


@click.command()
@click.argument("job", metavar="JOB|SERVICE", shell_complete=complete_jobs)
@click.argument("file", metavar="[FILE]", required=False)
@click.option(
    "--to", "revision", type=click.IntRange(1), metavar="REVISION", help="Revision of a service to return to."
)
@click.option("--copy", is_flag=True, help="With FILE: upload a copy of the working directory.")
@click.option("--name", metavar="NAME", help="New name.")
@click.option("--priority", type=int, metavar="N", help="Higher starts first.")
@click.option("-t", "--time", type=DURATION, metavar="TIME", help="New time limit, counted from the start.")
@click.option("-q", "--queue", metavar="QUEUE", help="New queue.")
@click.option("-b", "--begin", metavar="WHEN", help="Earliest start: 2h (from now), 16:00, 2026-12-01T08:00, now.")
@_JSON
def update(job: str, file: str | None, revision: int | None, copy: bool, as_json: bool, **changes: Any) -> None:
    """Change a job, or all elements of an array that have not ended. Of a service, roll out the revision of a job file.

    \b
    phalanx update 17 --priority 5
    phalanx update web web.yaml
    phalanx update web --to 1
    """  # noqa: D301 - click reads the backspace character itself
    body = {key: value for key, value in changes.items() if value is not None}
    if file is not None or revision is not None:
        if body:
            raise BadRequest(
                f"--{next(iter(body))}: a service is changed by its file", hint=f"phalanx update {job} FILE"
            )
        from phalanx.cli.serve.services import update_service

        update_service(job, file, revision, copy=copy, as_json=as_json)
        return
    if not body:
        raise BadRequest("nothing to change", hint="give --name, --priority, --time, --queue or --begin")
    if "begin" in body:
        from phalanx.cli.jobs.request.begin_time import with_zone

        body["begin"] = with_zone(body["begin"], time.time())
    head = connect()
    changed = head.update(resolve_job(head, job), **body)
    print(to_json(changed, indent=2) if as_json else f"job {changed.id} updated: {', '.join(body)}")


@click.command()
@_JOBS
@click.option("--why", metavar="TEXT", default="", help="Reason, stored in the history of the job.")
@_JSON
def cancel(jobs: tuple[str, ...], why: str, as_json: bool) -> int:
    """Cancel jobs: SIGTERM, then SIGKILL after the grace. Ended jobs are unchanged. The name of a service stops the service."""
    from phalanx.cli.serve.services import find_service

    named = [word for word in jobs if not word.replace("_", "", 1).isdigit()]
    services = {word for word in named if (found := find_service(connect(), word)) and not found.service.stopped_by}
    for word in jobs:
        if word in services:
            stopped = connect().stop_service(word)
            print(to_json({"service": stopped}, indent=2) if as_json else f"service {stopped.name} is being stopped")
    jobs = tuple(word for word in jobs if word not in services)
    if not jobs:
        return 0
    return _each(jobs, "cancel", lambda head, job_id: head.cancel(job_id, why), as_json=as_json)


@click.command()
@_JOBS
@_JSON
def hold(jobs: tuple[str, ...], as_json: bool) -> int:
    """Hold waiting jobs until `phalanx release`."""
    return _each(jobs, "hold", lambda head, job_id: head.hold(job_id), as_json=as_json)


@click.command()
@_JOBS
@_JSON
def release(jobs: tuple[str, ...], as_json: bool) -> int:
    """Release held jobs."""
    return _each(jobs, "release", lambda head, job_id: head.release(job_id), as_json=as_json)


@click.command()
@_JOBS
@_JSON
def park(jobs: tuple[str, ...], as_json: bool) -> int:
    """Stop jobs after a checkpoint, and keep them without GPUs until `phalanx resume`."""
    return _each(jobs, "park", lambda head, job_id: head.park(job_id), as_json=as_json)


@click.command()
@_JOBS
@_JSON
def resume(jobs: tuple[str, ...], as_json: bool) -> int:
    """Queue parked jobs again."""
    return _each(jobs, "resume", lambda head, job_id: head.resume(job_id), as_json=as_json)


@click.command()
@_JOBS
@_JSON
def requeue(jobs: tuple[str, ...], as_json: bool) -> int:
    """Stop running jobs after a checkpoint, and queue them again."""
    return _each(jobs, "requeue", lambda head, job_id: head.requeue(job_id), as_json=as_json)


def _each(words: tuple[str, ...], verb: str, change: Callable[[Client, str], JobView], *, as_json: bool) -> int:
    """Change every job, also after an error; return the exit code of the first error."""
    head = connect()
    code, done = 0, []
    for word in words:
        try:
            job = change(head, resolve_job(head, word))
        except Unreachable:
            raise
        except PhalanxError as error:
            failed = print_error(error.message, error.hint, error.exit_code)
            code = code or failed
            continue
        done.append(job)
        if not as_json:
            print(strip_control(_summary(job, verb)))
    if as_json:
        print(to_json(done, indent=2))
    return code


def _summary(job: JobView, verb: str) -> str:
    if job.states:
        done = {"cancel": "cancelled", "hold": "held", "park": "parked"}.get(verb, f"{verb.removesuffix('e')}ed")
        return f"array {job.id}: all elements that allow it are {done} ({job.detail}); next: phalanx show {job.id}"
    match verb:
        case "cancel":
            if job.state is JobState.CANCELLED:
                return f"job {job.id} is cancelled"
            return (
                f"job {job.id} has already ended: {job.state}"
                if job.state.terminal
                else f"job {job.id} is being cancelled"
            )
        case "hold":
            return f"job {job.id} is held; release it with phalanx release {job.id}"
        case "release":
            runs = job.state is JobState.RUNNING
            return f"job {job.id} runs, and was not held" if runs else f"job {job.id} is released"
        case "park":
            done = "is parked" if job.parked_s is not None else "is being stopped and parked"
            return f"job {job.id} {done}; resume it with phalanx resume {job.id}"
        case "resume":
            return f"job {job.id} {'runs' if job.state is JobState.RUNNING else 'is queued again'}"
        case _:
            return f"job {job.id} is being stopped and requeued"
