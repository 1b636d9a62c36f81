"""The files that are open for appending: at most so many, the longest unused closed first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.ids import JobId
from phalanx.ports.logs import StreamKey

OPEN_MAX: Final = 256  # descriptors; a process has 1024 unless told otherwise


@dataclass(slots=True, eq=False)
class OpenFile:
    """One stream's file. Whoever holds `lock` changes it.

    Attributes:
        fd: -1 while the file is not open; it may not exist.
        end: bytes in the file.
        durable: how much of it this process has synced; None before the first sync, for what another life wrote may not be on disk.
    """

    key: StreamKey
    lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    end: int = 0
    durable: int | None = None
    users: int = 0

    def shut(self) -> None:
        """Close the descriptor and know nothing any more."""
        fd, self.fd = self.fd, -1
        self.durable = None
        if fd >= 0:
            os.close(fd)


class OpenFiles:
    """Hands out entries, locked, so that one thread at a time writes a stream; others go on beside it."""

    def __init__(self) -> None:
        self._files: OrderedDict[StreamKey, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, key: StreamKey) -> Iterator[OpenFile]:
        """The stream's entry, for the holder alone. Whoever holds several takes them in the order of their keys."""
        with self._lock:
            entry = self._files.get(key)
            if entry is None:
                entry = self._files[key] = OpenFile(key)
            entry.users += 1
            self._files.move_to_end(key)
        try:
            with entry.lock:
                yield entry
        finally:
            with self._lock:
                entry.users -= 1
                self._shrink()

    def durable_end(self, key: StreamKey) -> int | None:
        """How far the stream is known to be on disk; None if nothing is known here."""
        with self._lock:
            entry = self._files.get(key)
            return None if entry is None else entry.durable

    def of(self, job_id: JobId) -> list[StreamKey]:
        """Streams of a job that have an entry."""
        with self._lock:
            return sorted(key for key in self._files if key.job_id == job_id)

    def close(self) -> None:
        """Close what nobody holds."""
        with self._lock:
            for key in [key for key, entry in self._files.items() if entry.users == 0]:
                self._files.pop(key).shut()

    def _shrink(self) -> None:
        excess = len(self._files) - OPEN_MAX
        for key in [key for key, entry in self._files.items() if entry.users == 0][: max(0, excess)]:
            self._files.pop(key).shut()
