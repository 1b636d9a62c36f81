"""A web server of large files for `benchmarks.staging`: ranges of pseudo-random bytes, made as they are sent, and a count of them.

python -m benchmarks.staging_source HOST PORT SIZE
"""

from __future__ import annotations

import hashlib
import sys
import threading
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

BLOCK: Final = 1 << 20
_sent: dict[str, int] = {}
_lock: Final = threading.Lock()


@lru_cache(maxsize=64)
def block(name: str, index: int) -> bytes:
    """Return one block of a file: no two blocks are equal, so nothing can be sent twice for one."""
    return hashlib.shake_128(f"{name} {index}".encode()).digest(BLOCK)


class Handler(BaseHTTPRequestHandler):
    """Answers ranges of /NAME, and /sent with the bytes sent so far."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path == "/sent":
            self._start(200, {"Content-Length": str(len(text := str(sum(_sent.values())).encode()))})
            self.wfile.write(text)
            return
        size = int(sys.argv[3])
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        length = last + 1 - first
        self._start(
            206,
            {"ETag": '"1"', "Content-Length": str(length), "Content-Range": f"bytes {first}-{last}/{size}"},
        )
        while first <= last:
            part = block(self.path, first // BLOCK)[first % BLOCK :][: last + 1 - first]
            self.wfile.write(part)
            first += len(part)
            with _lock:
                _sent[self.path] = _sent.get(self.path, 0) + len(part)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
