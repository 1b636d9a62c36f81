"""Cache of files that are open for appending; the least recently used are closed first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from phalanx.ports.logs import StreamKey

OPEN_MAX: Final = 256  # descriptors; the usual limit of a process is 1024


@dataclass(slots=True, eq=False)
class OpenFile:
    """One stream's file. Change it only while holding `lock`.

    Attributes:
        fd: -1 while the file is not open; it may not exist.
        end: bytes in the file.
        freed: everything below was removed, by this process.
        durable: bytes that this process has synced; None before the first sync, since bytes of an earlier process may not be on disk.
    """

    key: StreamKey
    lock: threading.Lock = field(default_factory=threading.Lock)
    fd: int = -1
    end: int = 0
    freed: int = 0
    durable: int | None = None
    users: int = 0

    def close(self) -> None:
        """Close the descriptor and reset `durable`."""
        fd, self.fd = self.fd, -1
        self.durable = None
        if fd >= 0:
            os.close(fd)


class OpenFiles:
    """Locked access to entries: one thread at a time writes a stream; different streams are independent."""

    def __init__(self) -> None:
        self._files: OrderedDict[StreamKey, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def lock(self, key: StreamKey) -> Iterator[OpenFile]:
        """Lock and return the stream's entry. To hold several, acquire them in the order of their keys."""
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
        """Bytes of the stream that are known to be on disk; None if unknown."""
        with self._lock:
            entry = self._files.get(key)
            return None if entry is None else entry.durable

    def of(self, job_folder: str) -> list[StreamKey]:
        """Streams of a job that have an entry."""
        with self._lock:
            return sorted(key for key in self._files if key.folder.startswith(f"{job_folder}/"))

    def close(self) -> None:
        """Close all files that are not in use."""
        with self._lock:
            for key in [key for key, entry in self._files.items() if entry.users == 0]:
                self._files.pop(key).close()

    def _shrink(self) -> None:
        excess = len(self._files) - OPEN_MAX
        for key in [key for key, entry in self._files.items() if entry.users == 0][: max(0, excess)]:
            self._files.pop(key).close()
