"""`phalanx logs`: prints the output of tasks: all, the last lines, or as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.array_logs import print_array_logs
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.jobs.log_pages import all_pages, check_rank, tail_page
from phalanx.cli.jobs.log_printer import JsonPrinter, LogPrinter
from phalanx.cli.option_types import RANK
from phalanx.cli.serve.services import find_service
from phalanx.core.errors import BadRequest
from phalanx.wire.api.jobs import AttemptView
from phalanx.wire.api.services import replica_state

if TYPE_CHECKING:
    from phalanx.client import Client


@click.command()
@JOB_ARGUMENT
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends; Ctrl-C stops following.")
@click.option(
    "--rank",
    type=RANK,
    metavar="RANK",
    help="One rank, `all`, or `supervisor`. Default: all, with a prefix if there are several tasks.",
)
@click.option(
    "--stacks", is_flag=True, help="Print the stacks of all ranks from when the job hung, instead of its output."
)
@click.option("-n", "--tail", type=click.IntRange(0, 100_000), metavar="N", help="Only the last lines of each rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only of this attempt.")
@click.option("--json", "as_json", is_flag=True, help="Print chunks as JSON, one per line.")
def logs(
    job: str, follow: bool, rank: str | None, stacks: bool, tail: int | None, attempt: int | None, as_json: bool
) -> int:
    """Print the output of a job's tasks, of all elements of an array, or of each replica of a service; -f follows it."""
    if stacks and rank is not None:
        raise BadRequest("--stacks prints the stacks of every rank", hint="leave --rank out")
    rank = "stacks" if stacks else rank
    head = connect()
    service = find_service(head, job)
    if service is not None and len(service.replicas) > 1 and not follow:
        for replica in service.replicas:
            if not as_json:
                print(
                    f"==> replica {replica.id}, revision {replica.revision}, {replica_state(replica)} <==", flush=True
                )
            _print_job(head, replica.id, rank=rank, tail=tail, attempt=attempt, follow=False, as_json=as_json)
        return 0
    job_id = resolve_job(head, job) if service is None or not service.replicas else service.replicas[-1].id
    if service is not None and len(service.replicas) > 1:
        others = ", ".join(one.id for one in service.replicas[:-1])
        warn(f"following replica {job_id}; the others are {others}")
    _print_job(head, job_id, rank=rank, tail=tail, attempt=attempt, follow=follow, as_json=as_json)
    return 0


def _print_job(
    head: Client, job_id: str, *, rank: str | None, tail: int | None, attempt: int | None, follow: bool, as_json: bool
) -> None:
    """Print the output of one job, or of all elements of an array, and follow it."""
    found = head.job(job_id)
    if found.job.states:
        print_array_logs(head, found.job, rank=rank, tail=tail, attempt=attempt, follow=follow, as_json=as_json)
        return
    attempts = found.attempts
    check_rank(job_id, rank, [one for one in attempts if attempt in (None, one.epoch)])
    printer = JsonPrinter() if as_json else LogPrinter(prefix=_prefixed(attempts, rank))
    cursor = ""
    pages = (
        all_pages(head, job_id, rank or "all", attempt)
        if tail is None
        else iter([tail_page(head, job_id, rank or "all", attempt, tail)])
    )
    try:
        for page in pages:
            for chunk in page.chunks:
                printer.write(chunk.epoch, chunk.stream, chunk.text)
            cursor = page.cursor
            if page.note:
                warn(page.note)
        if follow:
            printer.flush()
            for event in connect(FOLLOW_PATIENCE_S).follow_logs(
                job_id, rank=rank or "all", epoch=attempt, cursor=cursor
            ):
                if event.kind == "log":
                    printer.write(event.fields["epoch"], event.fields["stream"], event.fields["text"])
                    printer.flush()
    finally:
        printer.finish()


def print_tail(head: Client, job_id: str, *, rank: str | None, tail: int, tasks: int | None) -> str:
    """Print the last `tail` lines of each rank; return the cursor after them."""
    output = LogPrinter(prefix=rank == "all" or (rank is None and tasks != 1))
    reply = tail_page(head, job_id, rank or "all", None, tail)
    for chunk in reply.chunks:
        output.write(chunk.epoch, chunk.stream, chunk.text)
    output.finish()
    return reply.cursor


def _prefixed(attempts: Sequence[AttemptView], rank: str | None) -> bool:
    if rank is not None:
        return rank in ("all", "stacks")
    return not attempts or sum(grant.tasks for grant in attempts[-1].grants) != 1
