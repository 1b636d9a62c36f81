"""The rank's end of the report pipe: one os.write for each report, and never a rank that hangs on its supervisor."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any, Final

from phalanx.wire.rank import ReportKind, encode_report

_STEP_PATIENCE_S: Final = 0.5
"""How long a step report waits for room. A full pipe is 64 KiB, over 300 unread steps: the supervisor is not well."""
_EVENT_PATIENCE_S: Final = 20.0
"""As above for reports that come once (a checkpoint unheard of is a checkpoint never resumed)."""
_RETRY_S: Final = 0.005


class ReportPipe:
    """Writes reports; safe to use from several threads. Without a path it does nothing.

    A supervisor that is slow costs at most the patience above; one that is gone costs nothing: the report is dropped and counted.
    """

    def __init__(self, path: str | None, *, rank: int, epoch: int, generation: int) -> None:
        self._path = path
        self._origin = {"rank": rank, "epoch": epoch, "generation": generation}
        self._fd: int | None = None
        self._lock = threading.Lock()
        self.dropped = 0

    def send(self, kind: ReportKind, **fields: Any) -> bool:
        """Report; True once the whole line is in the pipe."""
        if self._path is None:
            return False
        line = encode_report(kind, **self._origin, **fields)
        patience_s = _STEP_PATIENCE_S if kind in {ReportKind.STEP, ReportKind.STALL} else _EVENT_PATIENCE_S
        until_s = time.monotonic() + patience_s
        with self._lock:
            while not self._write(line):
                if time.monotonic() >= until_s:
                    self._drop(kind, patience_s)
                    return False
                time.sleep(_RETRY_S)
        return True

    def _write(self, line: bytes) -> bool:
        """One attempt. A pipe without a reader is opened anew the next time."""
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
        if self.dropped == 1:
            print(
                f"phalanx: rank {self._origin['rank']}: nobody reads the report pipe {self._path}; a {kind} report was dropped "
                f"after {patience_s:g} s, training goes on",
                file=sys.stderr,
                flush=True,
            )
