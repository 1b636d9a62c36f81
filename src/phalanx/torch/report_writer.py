"""The report pipe of a rank: one os.write for each report. A supervisor that does not read never blocks the rank for long."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any, Final

from phalanx.wire.rank import ReportKind, encode_report

_PATIENCE_S: Final = 1.0
"""How long training waits for space in the pipe. A full pipe has 64 KiB, over 300 unread steps: the supervisor has a problem."""
_SAVE_PATIENCE_S: Final = 20.0
"""The same for reports of the checkpoint thread: an unreported checkpoint is never resumed."""
_SAVE_REPORTS: Final = frozenset({ReportKind.CHECKPOINT, ReportKind.SHARDS, ReportKind.CHECKPOINT_FAILED})
_RETRY_S: Final = 0.005


class ReportWriter:
    """Writes reports; thread-safe. Without a path it does nothing.

    If the supervisor does not read, the first report waits as defined above. Later reports are tried once each, and dropped and counted,
    until one succeeds. If the supervisor is gone, its lease expires soon and the fence blocks the rank.
    """

    def __init__(self, path: str | None, *, rank: int, epoch: int, generation: int) -> None:
        self._path = path
        self._origin = {"rank": rank, "epoch": epoch, "generation": generation}
        self._fd: int | None = None
        self._lock = threading.Lock()  # of the descriptor, never held while waiting
        self._delivered = True
        self.dropped = 0

    def send(self, kind: ReportKind, **fields: Any) -> bool:
        """Send a report; return whether the whole line is in the pipe."""
        if self._path is None:
            return False
        line = encode_report(kind, **self._origin, **fields)
        patience_s = _SAVE_PATIENCE_S if kind in _SAVE_REPORTS else _PATIENCE_S if self._delivered else 0.0
        until_s = time.monotonic() + patience_s
        while not self._write(line):
            if time.monotonic() >= until_s:
                self._drop(kind, patience_s)
                return False
            time.sleep(_RETRY_S)
        self._delivered = True
        return True

    def _write(self, line: bytes) -> bool:
        """Try to write once. A pipe without a reader is reopened at the next call."""
        with self._lock:
            try:
                if self._fd is None:
                    assert self._path is not None
                    self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.write(self._fd, line)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in {errno.ENXIO, errno.EPIPE, errno.ENOENT}:
                    raise
                if self._fd is not None:
                    os.close(self._fd)
                    self._fd = None
                return False
            return True

    def _drop(self, kind: ReportKind, patience_s: float) -> None:
        self.dropped += 1
        self._delivered = False
        if self.dropped == 1:
            print(
                f"phalanx: rank {self._origin['rank']}: the supervisor does not read the report pipe {self._path}; dropped a "
                f"{kind} report after {patience_s:g} s, training continues",
                file=sys.stderr,
                flush=True,
            )
