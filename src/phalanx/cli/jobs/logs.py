"""`phalanx logs`: prints the output of tasks: all, the last lines, or as it arrives."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.errors import warn
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.jobs.log_printer import LogPrinter
from phalanx.cli.jobs.service_page import replica_state
from phalanx.cli.jobs.services import find_service
from phalanx.cli.option_types import RANK
from phalanx.core.errors import BadRequest
from phalanx.wire.api.jobs import AttemptView
from phalanx.wire.api.output import LogChunk, LogsReply

if TYPE_CHECKING:
    from phalanx.client import Client

_TAIL_BYTES_A_LINE: Final = 256  # first estimate; increased until there are enough lines
_TAIL_BYTES_MAX: Final = 16 << 20


@click.command()
@click.argument("job", metavar="JOB")
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
    """Print the output of a job's tasks, or of each replica of a service; -f follows it."""
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
    """Print the output of one job, and follow it."""
    attempts = head.job(job_id).attempts
    check_rank(job_id, rank, [one for one in attempts if attempt in (None, one.epoch)])
    printer = _JsonPrinter() if as_json else LogPrinter(prefix=_prefixed(attempts, rank))
    cursor = ""
    pages = (
        _all_pages(head, job_id, rank or "all", attempt)
        if tail is None
        else iter([_tail(head, job_id, rank or "all", attempt, tail)])
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
    reply = _tail(head, job_id, rank or "all", None, tail)
    for chunk in reply.chunks:
        output.write(chunk.epoch, chunk.stream, chunk.text)
    output.finish()
    return reply.cursor


def check_rank(job_id: str, rank: str | None, attempts: Sequence[AttemptView]) -> None:
    """Check that a job with attempts has this rank.

    Raises:
        BadRequest: it has not; the message has the range of its ranks.
    """
    tasks = max((sum(grant.tasks for grant in attempt.grants) for attempt in attempts), default=0)
    if rank is None or not rank.isdigit() or not tasks or int(rank) < tasks:
        return
    ranks = f"ranks 0-{tasks - 1}" if tasks > 1 else "rank 0 only"
    raise BadRequest(f"job {job_id} has {ranks}, no rank {rank}", hint="--rank all prints all ranks")


def _prefixed(attempts: Sequence[AttemptView], rank: str | None) -> bool:
    if rank is not None:
        return rank in ("all", "stacks")
    return not attempts or sum(grant.tasks for grant in attempts[-1].grants) != 1


def _all_pages(head: Client, job_id: str, rank: str, epoch: int | None) -> Iterator[LogsReply]:
    page = head.logs(job_id, rank=rank, epoch=epoch)
    yield page
    while page.more:
        page = head.logs(job_id, rank=rank, epoch=epoch, cursor=page.cursor)
        yield page


def _tail(head: Client, job_id: str, rank: str, epoch: int | None, tail: int) -> LogsReply:
    """Return the last `tail` whole lines of every stream. Requests more bytes until each stream has enough lines or is complete."""
    size = min(_TAIL_BYTES_MAX, max(4096, tail * _TAIL_BYTES_A_LINE))
    while True:
        chunks, page = [], head.logs(job_id, rank=rank, epoch=epoch, tail_bytes=size)
        chunks += page.chunks
        while page.more:
            page = head.logs(job_id, rank=rank, epoch=epoch, cursor=page.cursor)
            chunks += page.chunks
        streams: dict[tuple[int, str], list[LogChunk]] = {}
        for chunk in chunks:
            streams.setdefault((chunk.epoch, chunk.stream), []).append(chunk)
        enough = all(
            first[0].offset == 0 or sum(part.text.count("\n") for part in first) > tail for first in streams.values()
        )
        if enough or size >= _TAIL_BYTES_MAX:
            break
        size = min(_TAIL_BYTES_MAX, size * 4)
    return LogsReply(
        chunks=[cut for parts in streams.values() if (cut := _last_lines(parts, tail)) is not None],
        cursor=page.cursor,
        note=page.note,
    )


def _last_lines(chunks: list[LogChunk], tail: int) -> LogChunk | None:
    text = "".join(chunk.text for chunk in chunks)
    # Split at \n only: the \r of a progress bar is part of its line.
    lines = [line for line in text.split("\n")[-tail - 1 :] if tail]
    kept = (
        "\n".join(lines if lines and lines[-1] else lines[-tail - 1 :])
        if text.endswith("\n")
        else "\n".join(lines[-tail:])
    )
    if not kept:
        return None
    return msgspec.structs.replace(chunks[0], offset=chunks[-1].end - len(kept.encode()), end=chunks[-1].end, text=kept)


class _JsonPrinter:
    """Prints chunks of streams as JSON, one per line."""

    def write(self, epoch: int, stream: str, text: str) -> None:
        """Print one chunk."""
        print(msgspec.json.encode({"epoch": epoch, "stream": stream, "text": text}).decode())

    def flush(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()

    def finish(self) -> None:
        """Flush standard output."""
        sys.stdout.flush()
