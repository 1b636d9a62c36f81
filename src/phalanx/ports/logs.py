"""Storage of the output streams of attempts: append by offset, read by offset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from phalanx.core.ids import Epoch, JobId
from phalanx.core.work.attempt import Attempt


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamKey:
    """One stream of one attempt: "rank-3", "steps-0", "supervisor-0". `folder`: of the attempt."""

    job_id: JobId
    epoch: Epoch
    folder: str
    stream: str


def stream_key(attempt: Attempt, stream: str) -> StreamKey:
    """The key of an attempt's stream."""
    return StreamKey(job_id=attempt.job_id, epoch=attempt.epoch, folder=attempt.folder, stream=stream)


class Logs(Protocol):
    """Append-only streams. `append` is idempotent by offset: a chunk sent again is neither duplicated nor leaves a gap."""

    def append(self, chunks: list[tuple[StreamKey, int, bytes]]) -> dict[StreamKey, int]:
        """Append the new bytes of each chunk and return the end of each stream; durable when this returns.

        A chunk that starts past its stream's end is not written: the sender continues at the returned end.

        Raises:
            StoreRefused: the disk is full or failed; an empty append returns the ends of the durable part.
        """
        ...

    def end(self, key: StreamKey) -> int:
        """Length in bytes; 0 for an unknown stream."""
        ...

    def begin(self, key: StreamKey) -> int:
        """Offset of the first byte that is stored. Only of a long stream of a service the oldest part is removed."""
        ...

    def read(self, key: StreamKey, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end."""
        ...

    def streams(self, attempts: Iterable[Attempt]) -> list[StreamKey]:
        """All streams of these attempts, ordered by epoch, name and number."""
        ...

    def close(self) -> None:
        """Close all files. Idempotent."""
        ...

    def job_folders(self) -> list[tuple[str, JobId]]:
        """The folders of all jobs that have streams, by name, with the id of the job."""
        ...

    def stored_bytes(self, job_folder: str) -> int:
        """What the streams of a job occupy on the disk."""
        ...

    def delete(self, job_folder: str) -> None:
        """Remove all streams of a job. Idempotent."""
        ...
