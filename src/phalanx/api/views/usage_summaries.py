"""Builds a job's usage summary from the store and the logs. Reports are read in pieces: a long training has gigabytes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from phalanx.api.runtime import ApiRuntime
from phalanx.api.services import HeadServices
from phalanx.core.accounting.reports import read_lines, step_rank
from phalanx.core.accounting.usage_summary import UsageSummary, build_usage_summary
from phalanx.core.errors import TryLater
from phalanx.core.ids import Epoch
from phalanx.core.jsonline import parse_object
from phalanx.core.work.job import Job
from phalanx.ports.logs import Logs, StreamKey, stream_key
from phalanx.wire.rank import ReportKind

# Per attempt: about 1.4 million reports of 190 bytes, as of 8 ranks over 175,000 steps. The rest is reported as unread.
READ_BYTES_MAX: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 2  # each uses a CPU for seconds, and 0.5 KB of memory per step
USAGE_SUMMARIES_PENDING_MAX: Final = 16  # running and waiting; further requests are answered with TryLater
_STREAM: Final = "steps-0"  # of node rank 0, which has rank 0
_THREADS: Final = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="usage")


async def usage_summary_of(runtime: ApiRuntime, job: Job) -> UsageSummary:
    """Build the usage summary on a separate thread pool, so that many usage summaries do not delay other requests.

    Raises:
        TryLater: too many usage summaries were requested at once.
    """
    if runtime.usage_summaries_pending >= USAGE_SUMMARIES_PENDING_MAX:
        raise TryLater(
            f"{USAGE_SUMMARIES_PENDING_MAX} usage summaries are already being built", hint="try again in a moment"
        )
    runtime.usage_summaries_pending += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREADS, read_usage_summary, runtime.services, job)
    finally:
        runtime.usage_summaries_pending -= 1


def read_usage_summary(services: HeadServices, job: Job) -> UsageSummary:
    """Build the current usage summary. At most READ_BYTES_MAX of reports are read per attempt."""
    attempts = services.store.attempts(job.id)
    nodes = {node.id: node for node in services.store.nodes()}
    keys = {each.epoch: stream_key(each, _STREAM) for each in attempts}
    reports = {epoch: relevant_reports(epoch, read_lines(_pieces(services.logs, key))) for epoch, key in keys.items()}
    unread_bytes = sum(max(0, services.logs.end(key) - READ_BYTES_MAX) for key in keys.values())
    return build_usage_summary(
        job, attempts, reports, nodes=nodes, now_s=services.clock.now_s(), unread_bytes=unread_bytes
    )


def relevant_reports(epoch: Epoch, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among lines, except steps of ranks above the lowest so far, which a usage summary does not count.

    Most lines are such steps, and recognizing them costs a tenth of decoding them. An incomplete last line and lines that are not JSON
    objects are left out.
    """
    lowest: int | None = None
    for line in lines:
        if lowest is not None and _is_step_above(lowest, line):
            continue
        report = parse_object(line)
        if report is None:
            continue
        rank = step_rank(epoch, report)
        if rank is not None and (lowest is None or rank < lowest):
            lowest = rank
        yield report


class _StepLine(msgspec.Struct):
    """The fields of a step report that are needed to recognize it."""

    k: str = ""
    rank: int = -1


def _is_step_above(rank: int, line: bytes) -> bool:
    """Whether a line reports a step of a higher rank; False if it cannot be decoded, so that the caller decodes it fully."""
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
