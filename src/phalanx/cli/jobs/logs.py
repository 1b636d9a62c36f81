"""`phalanx logs`: what tasks wrote, all of it, the end of it, or as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from phalanx.cli.connect import FOLLOW_PATIENCE_S, connect
from phalanx.cli.faults import warn
from phalanx.cli.jobs.named import job_named
from phalanx.cli.jobs.output import Output
from phalanx.cli.words import RANK
from phalanx.core.errors import BadRequest
from phalanx.wire.api.jobs import AttemptView
from phalanx.wire.api.output import LogChunk, LogsReply

if TYPE_CHECKING:
    from phalanx.client import Client

_TAIL_BYTES_A_LINE: Final = 256  # first guess at a line's length; doubled until there are enough
_TAIL_BYTES_MAX: Final = 16 << 20


@click.command()
@click.argument("job", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; Ctrl-C leaves it alone.")
@click.option(
    "--rank",
    type=RANK,
    metavar="RANK",
    help="One rank, `all`, or `supervisor`; all with a prefix unless there is one task only.",
)
@click.option("--stacks", is_flag=True, help="Where each rank stood when the job hung, in place of its output.")
@click.option("-n", "--tail", type=click.IntRange(0, 100_000), metavar="N", help="Only the last lines of each rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Of one attempt; of all otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print chunks as JSON, one a line.")
def logs(
    job: str, follow: bool, rank: str | None, stacks: bool, tail: int | None, attempt: int | None, as_json: bool
) -> int:
    """Print the output of a job's tasks; -f follows it."""
    if stacks and rank is not None:
        raise BadRequest("--stacks prints those of every rank", hint="leave --rank out")
    rank = "stacks" if stacks else rank
    head = connect()
    job_id = job_named(head, job)
    lives = head.job(job_id).attempts
    check_rank(job_id, rank, [life for life in lives if attempt in (None, life.epoch)])
    printer = _Json() if as_json else Output(prefix=_prefixed(lives, rank))
    cursor = ""
    pages = (
        _all_of(head, job_id, rank or "all", attempt)
        if tail is None
        else iter([_tail_of(head, job_id, rank or "all", attempt, tail)])
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
    return 0


def print_tail(head: Client, job_id: str, *, rank: str | None, tail: int, tasks: int | None) -> str:
    """Print the last `tail` lines of each rank; the cursor to go on from."""
    output = Output(prefix=rank == "all" or (rank is None and tasks != 1))
    reply = _tail_of(head, job_id, rank or "all", None, tail)
    for chunk in reply.chunks:
        output.write(chunk.epoch, chunk.stream, chunk.text)
    output.finish()
    return reply.cursor


def check_rank(job_id: str, rank: str | None, attempts: Sequence[AttemptView]) -> None:
    """Whether a job that was placed has such a rank.

    Raises:
        BadRequest: it has not; says which there are.
    """
    tasks = max((sum(grant.tasks for grant in attempt.grants) for attempt in attempts), default=0)
    if rank is None or not rank.isdigit() or not tasks or int(rank) < tasks:
        return
    has = f"ranks 0-{tasks - 1}" if tasks > 1 else "rank 0 only"
    raise BadRequest(f"job {job_id} has {has}", hint=f"there is no rank {rank}; --rank all prints every one")


def _prefixed(attempts: Sequence[AttemptView], rank: str | None) -> bool:
    if rank is not None:
        return rank in ("all", "stacks")
    return not attempts or sum(grant.tasks for grant in attempts[-1].grants) != 1


def _all_of(head: Client, job_id: str, rank: str, epoch: int | None) -> Iterator[LogsReply]:
    page = head.logs(job_id, rank=rank, epoch=epoch)
    yield page
    while page.more:
        page = head.logs(job_id, rank=rank, epoch=epoch, cursor=page.cursor)
        yield page


def _tail_of(head: Client, job_id: str, rank: str, epoch: int | None, tail: int) -> LogsReply:
    """The last `tail` whole lines of every stream: asks for more bytes until each stream has them or is there from its start."""
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
        chunks=[cut for parts in streams.values() if (cut := _last_lines(parts, tail)) is not None], cursor=page.cursor,
        note=page.note,
    )  # fmt: skip


def _last_lines(chunks: list[LogChunk], tail: int) -> LogChunk | None:
    text = "".join(chunk.text for chunk in chunks)
    # Split at line ends alone: a progress bar's \r stays inside its line.
    lines = [line for line in text.split("\n")[-tail - 1 :] if tail]
    kept = (
        "\n".join(lines if lines and lines[-1] else lines[-tail - 1 :])
        if text.endswith("\n")
        else "\n".join(lines[-tail:])
    )
    if not kept:
        return None
    return msgspec.structs.replace(chunks[0], offset=chunks[-1].end - len(kept.encode()), end=chunks[-1].end, text=kept)


class _Json:
    """Prints pieces of streams as JSON, one a line."""

    def write(self, epoch: int, stream: str, text: str) -> None:
        """Print one piece."""
        print(msgspec.json.encode({"epoch": epoch, "stream": stream, "text": text}).decode())

    def flush(self) -> None:
        """Hand it on now."""
        sys.stdout.flush()

    def finish(self) -> None:
        """Nothing is held back."""
        sys.stdout.flush()
