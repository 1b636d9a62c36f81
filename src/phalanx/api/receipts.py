"""A job's receipt from what lies in the store and in the logs. Reports are gone through piece by piece: a long training has gigabytes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from phalanx.api.parts import HeadParts
from phalanx.api.runtime import Runtime
from phalanx.core.accounting.receipt import Receipt, build_receipt
from phalanx.core.accounting.reports import read_lines, step_rank
from phalanx.core.errors import TryLater
from phalanx.core.ids import Epoch
from phalanx.core.jsonline import object_of
from phalanx.core.work.job import Job
from phalanx.ports.logs import Logs, StreamKey
from phalanx.wire.rank import ReportKind

# Of one attempt: some 1.4 million reports of 190 bytes, as of 8 ranks through 175,000 steps. What lies past that is told as unread.
READ_BYTES_MAX: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 2  # each takes a processor for seconds, and half a kilobyte of memory for each step
ASKED_MAX: Final = 16  # those that wait for their turn with them; who comes then tries again
_STREAM: Final = "steps-0"  # of node rank 0, where rank 0 sits
_THREADS: Final = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="receipt")


async def receipt_of(runtime: Runtime, job: Job) -> Receipt:
    """The receipt, made on a thread of its own kind, so that whoever asks for many holds up nobody else.

    Raises:
        TryLater: too many were asked for at once.
    """
    if runtime.receipts_asked >= ASKED_MAX:
        raise TryLater(f"{ASKED_MAX} receipts are being made", hint="try again in a moment")
    runtime.receipts_asked += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, read_receipt, runtime.parts, job)
    finally:
        runtime.receipts_asked -= 1


def read_receipt(parts: HeadParts, job: Job) -> Receipt:
    """The receipt as of now. Of each attempt at most READ_BYTES_MAX of reports are read."""
    attempts = parts.store.attempts(job.id)
    nodes = {node.id: node for node in parts.store.nodes()}
    keys = {each.epoch: StreamKey(job_id=each.job_id, epoch=each.epoch, stream=_STREAM) for each in attempts}
    reports = {epoch: reports_in(epoch, read_lines(_pieces(parts.logs, key))) for epoch, key in keys.items()}
    unread_bytes = sum(max(0, parts.logs.end(key) - READ_BYTES_MAX) for key in keys.values())
    return build_receipt(job, attempts, reports, nodes=nodes, now_s=parts.clock.now_s(), unread_bytes=unread_bytes)


def reports_in(epoch: Epoch, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects among lines of JSON, but for steps of another rank than the lowest so far, which a receipt counts not at all.

    Of a node's ranks one speaks, so that most lines are such, and to see that costs a tenth of reading them. A torn last line and lines
    that are no JSON object are left out.
    """
    lowest: int | None = None
    for line in lines:
        if lowest is not None and _is_step_above(lowest, line):
            continue
        report = object_of(line)
        if report is None:
            continue
        rank = step_rank(epoch, report)
        if rank is not None and (lowest is None or rank < lowest):
            lowest = rank
        yield report


class _StepLine(msgspec.Struct):
    """Of a line that may report a step, what is asked first."""

    k: str = ""
    rank: int = -1


def _is_step_above(rank: int, line: bytes) -> bool:
    """Whether a line reports the step of a higher rank. Of a line that is read elsewise the answer is no: then it is read whole."""
    try:
        found = _STEP_LINE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return found.k == ReportKind.STEP and found.rank > rank


_STEP_LINE: Final = msgspec.json.Decoder(_StepLine)


def _pieces(logs: Logs, key: StreamKey) -> Iterator[bytes]:
    offset = 0
    while piece := logs.read(key, offset, min(_PIECE_BYTES, READ_BYTES_MAX - offset)):
        yield piece
        offset += len(piece)
