"""`phalanx attach`: follows the output of a running job."""

from __future__ import annotations

import click

from phalanx.cli.connect import FOLLOW_PATIENCE_S, connect
from phalanx.cli.jobs.follow import follow
from phalanx.cli.jobs.leaving import leave
from phalanx.cli.jobs.logs import check_rank, print_tail
from phalanx.cli.jobs.named import job_named
from phalanx.cli.words import RANK


@click.command()
@click.argument("job", metavar="JOB")
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
    job_id = job_named(head, job)
    try:
        attempts = head.job(job_id).attempts
        check_rank(job_id, rank, attempts)
        tasks = sum(grant.tasks for grant in attempts[-1].grants) if attempts else None
        cursor = print_tail(head, job_id, rank=rank, tail=tail, tasks=tasks)
        return follow(connect(FOLLOW_PATIENCE_S), job_id, rank=rank, cursor=cursor, tasks=tasks)
    except KeyboardInterrupt:
        return leave(head, job_id)
