"""The rank's end of the report pipe: one os.write for each report, and never a rank that hangs on its supervisor."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any, Final

from phalanx.wire.rank import ReportKind, encode_report

_PATIENCE_S: Final = 1.0
"""How long training waits for room in the pipe. A full pipe is 64 KiB, over 300 unread steps: the supervisor is not well."""
_SAVE_PATIENCE_S: Final = 20.0
"""As above for what a checkpoint's own thread reports: one that nobody hears of is never resumed."""
_OF_SAVES: Final = frozenset({ReportKind.CHECKPOINT, ReportKind.SHARDS, ReportKind.CHECKPOINT_FAILED})
_RETRY_S: Final = 0.005


class ReportPipe:
    """Writes reports; safe to use from several threads. Without a path it does nothing.

    A supervisor that does not read costs the patience above once; then reports are tried once each, and dropped and counted, until
    one goes through. Should the supervisor be gone for good, its lease ends soon and the fence holds the rank.
    """

    def __init__(self, path: str | None, *, rank: int, epoch: int, generation: int) -> None:
        self._path = path
        self._origin = {"rank": rank, "epoch": epoch, "generation": generation}
        self._fd: int | None = None
        self._lock = threading.Lock()  # of the descriptor, never held while waiting
        self._heard = True
        self.dropped = 0

    def send(self, kind: ReportKind, **fields: Any) -> bool:
        """Report; True once the whole line is in the pipe."""
        if self._path is None:
            return False
        line = encode_report(kind, **self._origin, **fields)
        patience_s = _SAVE_PATIENCE_S if kind in _OF_SAVES else _PATIENCE_S if self._heard else 0.0
        until_s = time.monotonic() + patience_s
        while not self._write(line):
            if time.monotonic() >= until_s:
                self._drop(kind, patience_s)
                return False
            time.sleep(_RETRY_S)
        self._heard = True
        return True

    def _write(self, line: bytes) -> bool:
        """One attempt. A pipe without a reader is opened anew the next time."""
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
        self._heard = False
        if self.dropped == 1:
            print(
                f"phalanx: rank {self._origin['rank']}: nobody reads the report pipe {self._path}; a {kind} report was dropped "
                f"after {patience_s:g} s, training goes on",
                file=sys.stderr,
                flush=True,
            )
