"""The supervisor's own log: one file with a size limit, and the one before it."""

from __future__ import annotations

import logging
import os
from typing import Final

from phalanx.node.logs.log_format import OneLineFormatter

CAP_BYTES: Final = 8 << 20


class SizeLimitedLogHandler(logging.Handler):
    """Appends lines; at the limit the file becomes `<path>.1` and a new one begins."""

    def __init__(self, path: str, cap_bytes: int = CAP_BYTES) -> None:
        super().__init__()
        self._path = path
        self._cap_bytes = cap_bytes
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; on a full disk the line is lost."""
        try:
            line = (self.format(record) + "\n").encode(errors="replace")
            if self._size + len(line) > self._cap_bytes:
                os.close(self._fd)
                os.replace(self._path, f"{self._path}.1")
                self._open()
            self._size += os.write(self._fd, line)
        except OSError:
            self.handleError(record)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size


def log_to_file(path: str, level: str) -> None:
    """Write this process's log to that file."""
    handler = SizeLimitedLogHandler(path)
    handler.setFormatter(OneLineFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
