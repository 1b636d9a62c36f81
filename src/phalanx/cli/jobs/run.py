"""`phalanx run`: submits a job and follows it."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.request.job_options import job_options
from phalanx.cli.jobs.request.job_request import DoubleDashCommand, job_request
from phalanx.cli.jobs.submit import submit_job
from phalanx.cli.option_types import RANK
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest


@click.command(cls=DoubleDashCommand)
@job_options
@click.option("-d", "--detach", is_flag=True, help="Do not follow the job.")
@click.option(
    "--rank",
    type=RANK,
    metavar="RANK",
    help="Output of one rank, or `all`. Default: all, with a prefix if there are several tasks.",
)
@click.option(
    "--tty", "--pty", "terminal", is_flag=True, default=None, help="Run it on a terminal, and attach this one."
)
@click.option("--dry-run", is_flag=True, help="Submit nothing; print expected nodes, start and GPU-hours.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@click.pass_context
def run(context: click.Context, /, detach: bool, rank: str | None, dry_run: bool, as_json: bool, **given: Any) -> int:
    """Run a command or a job file, print its output, and exit with its exit code.

    The first Ctrl-C detaches, a second one within 2 s cancels the job.

    \b
    phalanx run --gpus 16 -- python train.py
    phalanx run job.yaml
    """  # noqa: D301 - click reads the backspace character itself
    terminal = given.get("terminal")
    if terminal and not detach:
        from phalanx.cli.sessions.terminal_session import check_terminal

        check_terminal()
        given["env"] = [("TERM", os.environ.get("TERM", "")), *given["env"]] if os.environ.get("TERM") else given["env"]
    wanted = job_request(context, given)
    if wanted.is_service:
        raise BadRequest("run cannot follow a service, which has no end", hint="use phalanx submit FILE")
    if wanted.plan_request is not None:
        from phalanx.cli.plan.job_plan import resolve_plan

        wanted = resolve_plan(connect(), wanted)
    if dry_run:
        wanted.judge()
        from phalanx.cli.jobs.dry_run import show_dry_run

        show_dry_run(connect(), wanted, as_json=as_json)
        return 0
    if as_json:
        raise BadRequest("--json needs --dry-run", hint="phalanx submit --json prints the job")
    if wanted.is_array and not detach:
        raise BadRequest("--array: run cannot follow the output of an array", hint="use phalanx submit --wait")
    with wanted.own_faults_first():
        head = connect()
    taken = submit_job(head, wanted)
    print(strip_control(f"job {taken.id} ({taken.name}): {'; '.join(taken.notes)}"), file=sys.stderr, flush=True)
    for line in taken.warnings:
        warn(f"warning: {line}")
    if detach:
        verb = "show" if wanted.is_array else "shell" if terminal else "attach"
        print(f"next: phalanx {verb} {taken.id}", file=sys.stderr)
        return 0
    if terminal:
        from phalanx.cli.sessions.terminal_session import attach_terminal

        return attach_terminal(head, taken.id, idles=wanted.idles)
    try:
        # Imported after the submission, to start the job sooner.
        from phalanx.cli.jobs.job_follower import follow_job

        return follow_job(
            connect(FOLLOW_PATIENCE_S),
            taken.id,
            rank=rank,
            tasks=taken.tasks,
            idles=wanted.idles,
        )
    except KeyboardInterrupt:
        from phalanx.cli.jobs.interrupt import detach_or_cancel

        return detach_or_cancel(head, taken.id)
