"""Serves the chunks of one cache to other nodes: `python -I -m phalanx.node.data.server_main`, one for each user whose jobs stage data here.

Started by `prepare.data_server` under the account that owns the cache. It reads one line of JSON from its input (cache, address, key, certificate,
certificate_key), writes one line with its port, and ends when its input ends, so it never outlives its supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from phalanx.node.data.dataset_cache import DatasetCache
from phalanx.node.data.stored_dataset import StoredDataset, open_reader
from phalanx.node.probes.link_probe import bound_socket
from phalanx.wire.data_peers import is_data_token

_CONNECTIONS_MAX: Final = 256  # of 32 peers with eight each
_SILENT_S: Final = 60.0  # a peer keeps its connections while it stages
_JOURNAL_BYTES_MAX: Final = 4 << 20
_PATH: Final = re.compile(r"/v1/data/([0-9a-f]{32})/(chunks|chunk/(\d{1,9}))")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_S
    server: _Server

    def setup(self) -> None:
        self.request.settimeout(_SILENT_S)
        self.request.do_handshake()  # here and not in `accept`: a peer that sends nothing delays no other
        super().setup()

    def do_GET(self) -> None:
        """Answer one request of a peer."""
        found = _PATH.fullmatch(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not is_data_token(self.server.key, token, time.time()):
            self._answer(401, b"")
        elif found is None:
            self._answer(404, b"")
        else:
            try:
                store = self.server.dataset(found[1])
                data = store.read(int(found[3])) if found[3] else store.journal(self._after(), _JOURNAL_BYTES_MAX)
            except (OSError, LookupError, ValueError):
                self._answer(404, b"")
            else:
                self._answer(200, data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _after(self) -> int:
        return int(parse_qs(urlsplit(self.path).query).get("after", ["0"])[0])

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, order: dict[str, Any], listener: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self.key: str = order["key"]
        self._cache = DatasetCache(order["cache"])
        self._open: dict[str, StoredDataset] = {}
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(_CONNECTIONS_MAX)

    def dataset(self, name: str) -> StoredDataset:
        """The dataset with this name.

        Raises:
            OSError: it is not here.
        """
        with self._lock:
            if not os.path.isdir(self._cache.path(name)):
                self._open.pop(name, None)
            if name not in self._open:
                self._open[name] = open_reader(self._cache.path(name))
            return self._open[name]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; one too many is closed."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it, and make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: peers come and go."""


def main() -> int:
    """Serve until the input ends."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # of mode 0600; OpenSSL reads files only
        file.write(order["certificate_key"] + order["certificate"])
        file.flush()
        context.load_cert_chain(file.name)
    listener = bound_socket(order["address"])
    if listener is None:
        return 1
    server = _Server(order, listener, context)
    sys.stdout.write(json.dumps({"port": server.socket.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
