"""Where output streams of attempts are kept: append by offset, read by offset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from phalanx.core.ids import Epoch, JobId


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamKey:
    """One stream of one attempt: "rank-3", "steps-0", "supervisor-0"."""

    job_id: JobId
    epoch: Epoch
    stream: str


class Logs(Protocol):
    """Streams only grow. `append` is idempotent by offset, so that a resent chunk neither doubles nor leaves a gap."""

    def append(self, chunks: list[tuple[StreamKey, int, bytes]]) -> dict[StreamKey, int]:
        """Append what is new of each chunk and answer where each stream ends, durable when this returns.

        A chunk that starts past its stream's end is not written: the end returned tells the sender where to go on.

        Raises:
            StoreRefused: the disk took nothing more; ends of the durable part are found again by an empty append.
        """
        ...

    def end(self, key: StreamKey) -> int:
        """Bytes held; 0 for an unknown stream."""
        ...

    def read(self, key: StreamKey, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end."""
        ...

    def streams(self, job_id: JobId) -> list[StreamKey]:
        """All streams of a job, ordered by epoch and by stream with its number read as a number."""
        ...

    def close(self) -> None:
        """Release files; harmless twice."""
        ...

    def delete(self, job_id: JobId) -> None:
        """Remove all streams of a job. Harmless twice."""
        ...
