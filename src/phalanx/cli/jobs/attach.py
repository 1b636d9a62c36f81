"""`phalanx attach`: follows the output of a running job."""

from __future__ import annotations

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.jobs.interrupt import detach_or_cancel
from phalanx.cli.jobs.job_follower import follow_job
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.jobs.log_pages import check_rank
from phalanx.cli.jobs.logs import print_tail
from phalanx.cli.option_types import RANK


@click.command()
@JOB_ARGUMENT
@click.option("--rank", type=RANK, metavar="RANK", help="Output of one rank, or `all`.")
@click.option(
    "--tail",
    type=click.IntRange(0, 100_000),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of earlier lines of each rank to print first.",
)
def attach(job: str, rank: str | None, tail: int) -> int:
    """Follow the output of a job, and exit with its exit code."""
    head = connect()
    job_id = resolve_job(head, job)
    try:
        found = head.job(job_id)
        attempts = found.attempts
        check_rank(job_id, rank, attempts)
        tasks = sum(grant.tasks for grant in attempts[-1].grants) if attempts else None
        cursor = print_tail(head, job_id, rank=rank, tail=tail, tasks=tasks)
        idles = found.job.idle_s is not None
        return follow_job(connect(FOLLOW_PATIENCE_S), job_id, rank=rank, cursor=cursor, tasks=tasks, idles=idles)
    except KeyboardInterrupt:
        return detach_or_cancel(head, job_id)
