"""Reads the output of a job from the head: all of it, or the last lines of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from phalanx.core.errors import BadRequest
from phalanx.wire.api.jobs import AttemptView
from phalanx.wire.api.output import LogChunk, LogsReply

if TYPE_CHECKING:
    from phalanx.client import Client

_TAIL_BYTES_A_LINE: Final = 256  # first estimate; increased until there are enough lines
_TAIL_BYTES_MAX: Final = 16 << 20


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


def all_pages(head: Client, job_id: str, rank: str, epoch: int | None, cursor: str = "") -> Iterator[LogsReply]:
    """Yield all pages of a job's output from the cursor on."""
    page = head.logs(job_id, rank=rank, epoch=epoch, cursor=cursor)
    yield page
    while page.more:
        page = head.logs(job_id, rank=rank, epoch=epoch, cursor=page.cursor)
        yield page


def tail_page(head: Client, job_id: str, rank: str, epoch: int | None, tail: int) -> LogsReply:
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
