"""`phalanx submit`: submits a job. Imports only what the request needs; the whole command takes about 0.1 s."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli.connection import connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_options import F, job_options
from phalanx.cli.jobs.request.job_request import DoubleDashCommand, JobRequest, job_request
from phalanx.cli.jobs.request.sendable_job import sendable_mapping
from phalanx.cli.option_types import DURATION
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, NeverFits

if TYPE_CHECKING:
    from phalanx.client import Client, Submission


_AFTERWARDS: Final = (
    click.option("--wait", is_flag=True, help="Wait until the job ends, and exit with its exit code."),
    click.option(
        "--timeout",
        type=DURATION,
        metavar="TIME",
        help="With --wait: exit with 124 after this time; the job continues.",
    ),
    click.option("--dry-run", is_flag=True, help="Submit nothing; print expected nodes, start and GPU-hours."),
    click.option("--json", "as_json", is_flag=True, help="Print the job as JSON."),
    click.option("--quiet", is_flag=True, help="Print only the id of the job."),
)


def wait_options(command: F) -> F:
    """Add the options that say what is printed after the submission, and whether to wait."""
    for option in reversed(_AFTERWARDS):
        command = option(command)
    return command


@click.command(cls=DoubleDashCommand)
@job_options
@wait_options
@click.pass_context
def submit(
    context: click.Context, /, wait: bool, timeout: str | None, dry_run: bool, as_json: bool, quiet: bool, **given: Any
) -> int:
    """Submit a command or a job file, and return.

    \b
    phalanx submit --gpus 2x8 -- python train.py --lr 3e-4
    phalanx submit --array 0-99%8 --depends-on 17 -- python eval.py
    phalanx submit job.yaml
    """  # noqa: D301 - click reads the backspace character itself
    wanted = job_request(context, given)
    with wanted.own_faults_first():
        head = connect()
    if wanted.is_service:
        if wait or dry_run:
            raise BadRequest("--wait, --dry-run: a service does not end", hint="phalanx show NAME --watch follows it")
        from phalanx.cli.serve.services import submit_service

        submit_service(head, wanted, as_json=as_json, quiet=quiet)
        return 0
    return submit_and_wait(head, wanted, wait=wait, timeout=timeout, dry_run=dry_run, as_json=as_json, quiet=quiet)


def submit_and_wait(
    head: Client, wanted: JobRequest, *, wait: bool, timeout: str | None, dry_run: bool, as_json: bool, quiet: bool
) -> int:
    """Submit a job, print it, and wait for its end if asked; with `dry_run` only print what would happen. Return the exit code."""
    if wanted.plan_request is not None:
        from phalanx.cli.plan.job_plan import resolve_plan

        wanted = resolve_plan(head, wanted)
    if dry_run:
        wanted.judge()
        from phalanx.cli.jobs.dry_run import show_dry_run

        show_dry_run(head, wanted, as_json=as_json)
        return 0
    taken = submit_job(head, wanted)
    for line in taken.warnings:
        warn(f"warning: {line}")
    if as_json:
        from phalanx.cli.list_output import to_json

        print(to_json({"job": taken.job, "notes": taken.notes, "warnings": taken.warnings}, indent=2))
    elif quiet:
        print(taken.id)
    else:
        print(strip_control(f"job {taken.id} submitted: {taken.name}"))
        for note in taken.notes:
            print(f"  {note}")
        if not wait:
            print(f"next: phalanx {'show' if wanted.is_array else 'attach'} {taken.id}")
    sys.stdout.flush()
    if not wait:
        return 0
    from phalanx.cli.jobs.job_end import wait_for_end
    from phalanx.core.units import parse_duration_s

    return wait_for_end(head, taken.id, None if timeout is None else parse_duration_s(timeout))


def submit_job(head: Client, wanted: JobRequest) -> Submission:
    """Submit a job, with a copy of its working directory if needed.

    All retries use one idempotency key, so that there is only one job.

    Raises:
        PhalanxError: the head rejects the job, or does not answer.
    """
    with wanted.own_faults_first():
        mapping = sendable_mapping(head, wanted)
    try:
        with wanted.own_faults_first():
            return head.submit(mapping)
    except (BadRequest, NeverFits) as error:
        if wanted.slurm_names is not None:
            from phalanx.cli.jobs.request.sbatch_script import node_shapes, too_large

            if larger := too_large(mapping, node_shapes(head), wanted.slurm_names):
                raise larger from error
        raise
