"""Streams in memory, under the same contract: for the simulator and for tests that are not about disks."""

from __future__ import annotations

import threading

from phalanx.core.ids import JobId
from phalanx.ports.logs import StreamKey
from phalanx.store.logs.names import checked, checked_job, order


class MemoryLogs:
    """Holds what files would hold."""

    def __init__(self) -> None:
        self._streams: dict[StreamKey, bytearray] = {}
        self._lock = threading.Lock()

    def append(self, chunks: list[tuple[StreamKey, int, bytes]]) -> dict[StreamKey, int]:
        """Append what is new of each chunk and answer where each stream ends."""
        ends: dict[StreamKey, int] = {checked(key): 0 for key, _, _ in chunks}
        with self._lock:
            for key, offset, content in chunks:
                held = self._streams.get(key, bytearray())
                if offset <= len(held) < offset + len(content):
                    held += content[len(held) - offset :]
                    self._streams[key] = held
                ends[key] = len(held)
        return ends

    def end(self, key: StreamKey) -> int:
        """Bytes held; 0 for an unknown stream."""
        with self._lock:
            return len(self._streams.get(checked(key), b""))

    def read(self, key: StreamKey, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end."""
        with self._lock:
            start = max(0, offset)
            return bytes(self._streams.get(checked(key), b"")[start : start + max(0, limit)])

    def streams(self, job_id: JobId) -> list[StreamKey]:
        """All streams of a job, ordered by epoch and by stream with its number read as a number."""
        checked_job(job_id)
        with self._lock:
            return sorted((key for key in self._streams if key.job_id == job_id), key=order)

    def delete(self, job_id: JobId) -> None:
        """Remove all streams of a job. Harmless twice."""
        checked_job(job_id)
        with self._lock:
            for key in [key for key in self._streams if key.job_id == job_id]:
                del self._streams[key]
