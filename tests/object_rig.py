"""moto's S3 server on loopback, and a proxy before it that fails as stores do: answers of 500, silence, other bytes."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.cluster import free_port

ROOT = Path(__file__).resolve().parents[1]
MOTO = shutil.which("moto_server", path=f"{ROOT}/build/moto/bin:{os.environ.get('PATH', '')}")
BUCKET = "bucket"
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "server", "date", "content-length"})


class FaultyStore:
    """A proxy. `fault(method, path, body)` is called before each request: True answers 500 instead. `change(path, body)` changes what a GET brings."""

    def __init__(self, port: int) -> None:
        self.fault: Callable[[str, str, bytes], bool] = lambda _method, _path, _body: False
        self.change: Callable[[str, bytes], bytes] = lambda _path, body: body
        self.sent_bytes = self.read_bytes = 0
        self.requests: list[tuple[str, str]] = []
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                store.requests.append((self.command, self.path))
                if store.fault(self.command, self.path, body):
                    self._answer(500, {}, b"")
                    return
                store.sent_bytes += len(body)
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {name: text for name, text in self.headers.items() if name.lower() != "host"}
                upstream.request(self.command, self.path, body, {**headers, "Host": f"127.0.0.1:{port}"})
                got = upstream.getresponse()
                data = got.read()
                if self.command == "GET" and "list-type" not in self.path:
                    data = store.change(self.path, data)
                    store.read_bytes += len(data)
                kept = {name: text for name, text in got.getheaders() if name.lower() not in _HOP}
                length = got.getheader("Content-Length") if self.command == "HEAD" else None
                self._answer(got.status, kept, data, length)
                upstream.close()

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815  # names of http.server

            def _answer(self, status: int, headers: dict[str, str], data: bytes, length: str | None = None) -> None:
                self.send_response_only(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
        }
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def forget(self) -> None:
        """No faults from here on, and counters at 0."""
        self.fault, self.change = (lambda _method, _path, _body: False), (lambda _path, body: body)
        self.sent_bytes = self.read_bytes = 0
        self.requests = []

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class BreakingLink:
    """A TCP proxy before a server. Of the next `breaks` connections each is reset after `bytes_each` bytes from the client."""

    def __init__(self, port: int) -> None:
        self.breaks, self.bytes_each, self.broken = 0, 0, 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
            passed = 0
            while data := client.recv(1 << 16):
                server.sendall(data)
                passed += len(data)
                if self.breaks > 0 and passed > self.bytes_each:
                    self.breaks, self.broken = self.breaks - 1, self.broken + 1
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        client.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


@contextlib.contextmanager
def faulty_store() -> Iterator[FaultyStore]:
    """A store with one bucket."""
    assert MOTO is not None, "make s3-tools"
    port = free_port()
    with subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            until_s = time.monotonic() + 60
            while True:
                try:
                    made = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                    made.request("PUT", f"/{BUCKET}")
                    assert made.getresponse().status == 200
                    break
                except OSError:
                    assert time.monotonic() < until_s
                    time.sleep(0.1)
            store = FaultyStore(port)
            yield store
            store.close()
        finally:
            server.kill()
