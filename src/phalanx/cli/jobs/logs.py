"""`phalanx logs`: what tasks wrote, all of it, the end of it, or as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import click
import msgspec

from phalanx.cli.connect import Head, connect
from phalanx.cli.jobs.named import job_named
from phalanx.cli.jobs.output import Output
from phalanx.cli.words import RANK
from phalanx.wire.api import JobDetail, LogChunk, LogsReply

_TAIL_BYTES_A_LINE: Final = 256  # first guess at a line's length; doubled until there are enough
_TAIL_BYTES_MAX: Final = 16 << 20
_PAGE_BYTES: Final = 1 << 20


@click.command()
@click.argument("job", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends; Ctrl-C leaves it alone.")
@click.option("--rank", type=RANK, metavar="RANK", help="One rank, `all`, or `supervisor`; all with a prefix unless there is one task only.")
@click.option("-n", "--tail", type=click.IntRange(0, 100_000), metavar="N", help="Only the last lines of each rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Of one attempt; of all otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print chunks as JSON, one a line.")
def logs(job: str, follow: bool, rank: str | None, tail: int | None, attempt: int | None, as_json: bool) -> int:
    """Print the output of a job's tasks; -f follows it."""
    head = connect()
    job_id = job_named(head, job)
    output = _json if as_json else Output(prefix=_prefixed(head, job_id, rank)).write
    cursor = ""
    last: Output | None = None
    if not as_json:
        last = output.__self__  # type: ignore[attr-defined]  # the bound method's Output, to be finished below
    query = {"rank": rank or "all", **({} if attempt is None else {"epoch": attempt})}
    try:
        pages = _all_of(head, job_id, query) if tail is None else iter([_tail_of(head, job_id, query, tail)])
        for reply in pages:
            for chunk in reply.chunks:
                output(chunk)
            cursor = reply.cursor
        if follow:
            for event in head.events(f"/v1/jobs/{job_id}/logs", cursor=cursor, follow=1, **query):
                if event.name == "log":
                    output(msgspec.json.decode(event.data, type=LogChunk))
                    sys.stdout.flush()
                elif event.name == "end":
                    break
    finally:
        if last is not None:
            last.finish()
    return 0


def print_tail(head: Head, job_id: str, *, rank: str | None, tail: int, tasks: int | None) -> str:
    """Print the last `tail` lines of each rank; the cursor to go on from."""
    output = Output(prefix=rank == "all" or (rank is None and tasks != 1))
    reply = _tail_of(head, job_id, {"rank": rank or "all"}, tail)
    for chunk in reply.chunks:
        output.write(chunk)
    output.finish()
    return reply.cursor


def _prefixed(head: Head, job_id: str, rank: str | None) -> bool:
    if rank is not None:
        return rank == "all"
    attempts = head.get(JobDetail, f"/v1/jobs/{job_id}").attempts
    return not attempts or sum(grant.tasks for grant in attempts[-1].grants) != 1


def _all_of(head: Head, job_id: str, query: dict[str, object]) -> Iterator[LogsReply]:
    reply = head.get(LogsReply, f"/v1/jobs/{job_id}/logs", limit_bytes=_PAGE_BYTES, **query)
    yield reply
    while reply.more:
        reply = head.get(LogsReply, f"/v1/jobs/{job_id}/logs", limit_bytes=_PAGE_BYTES, cursor=reply.cursor, **query)
        yield reply


def _tail_of(head: Head, job_id: str, query: dict[str, object], tail: int) -> LogsReply:
    """The last `tail` whole lines of every stream: asks for more bytes until each stream has them or is there from its start."""
    size = min(_TAIL_BYTES_MAX, max(4096, tail * _TAIL_BYTES_A_LINE))
    while True:
        reply = head.get(LogsReply, f"/v1/jobs/{job_id}/logs", tail_bytes=size, **query)
        streams: dict[tuple[int, str], list[LogChunk]] = {}
        for chunk in reply.chunks:
            streams.setdefault((chunk.epoch, chunk.stream), []).append(chunk)
        enough = all(chunks[0].offset == 0 or sum(chunk.text.count("\n") for chunk in chunks) > tail for chunks in streams.values())
        if enough or size >= _TAIL_BYTES_MAX:
            break
        size = min(_TAIL_BYTES_MAX, size * 4)
    return LogsReply(chunks=[cut for chunks in streams.values() if (cut := _last_lines(chunks, tail)) is not None], cursor=reply.cursor, more=reply.more)


def _last_lines(chunks: list[LogChunk], tail: int) -> LogChunk | None:
    text = "".join(chunk.text for chunk in chunks)
    lines = text.splitlines(keepends=True)[-tail:] if tail else []
    if not lines:
        return None
    return msgspec.structs.replace(chunks[0], offset=chunks[0].offset + len(text.encode()) - len("".join(lines).encode()), text="".join(lines))


def _json(chunk: LogChunk) -> None:
    print(msgspec.json.encode(chunk).decode())
