"""Object stores on loopback, each behind a proxy that fails as stores do: answers of 500, silence, other bytes.

s3:// is moto's server, az:// is Azurite, gs:// is fake-gcs-server (`gcs_rig`).
"""

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
from tests.azurite_rig import ACCOUNT, AZURITE, KEY, azure_blobs
from tests.gcs_rig import FAKE_GCS, google_storage

ROOT = Path(__file__).resolve().parents[1]
MOTO = shutil.which("moto_server", path=f"{ROOT}/build/moto/bin:{os.environ.get('PATH', '')}")
BUCKET = "bucket"
SCHEMES = ("s3", "gs", "az")
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive", "server", "date", "content-length"})


class FaultyStore:
    """A proxy. `fault(method, path, body)` is called before each request: True answers 500 instead, and a number above 1 is the status.

    `change(path, body)` changes what a GET brings.
    """

    def __init__(self, port: int, scheme: str = "s3") -> None:
        self.scheme, self.place = scheme, f"{scheme}://{BUCKET}"
        self.fault: Callable[[str, str, bytes], int] = lambda _method, _path, _body: False
        self.change: Callable[[str, bytes], bytes] = lambda _path, body: body
        self.sent_bytes = self.read_bytes = 0
        self.requests: list[tuple[str, str]] = []
        self.authorizations: set[str] = set()
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                store.requests.append((self.command, self.path))
                store.authorizations.add(self.headers.get("Authorization", ""))
                if status := int(store.fault(self.command, self.path, body)):
                    self._answer(500 if status == 1 else status, {}, b"")
                    return
                store.sent_bytes += len(body)
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                headers = {name: text for name, text in self.headers.items() if name.lower() != "host"}
                upstream.request(self.command, self.path, body, {**headers, "Host": f"127.0.0.1:{port}"})
                got = upstream.getresponse()
                data = got.read()
                if self.command == "GET" and "list" not in self.path:
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
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.variables = variables_of(scheme, self.url)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def forget(self) -> None:
        """No faults from here on, and counters at 0."""
        self.fault, self.change = (lambda _method, _path, _body: False), (lambda _path, body: body)
        self.sent_bytes = self.read_bytes = 0
        self.requests = []
        self.authorizations = set()

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


def variables_of(scheme: str, url: str) -> dict[str, str]:
    """The variables by which a job names a store of its own, as docs/data.md lists them."""
    match scheme:
        case "gs":
            return {"STORAGE_EMULATOR_HOST": url}
        case "az":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}",
            }
        case _:
            return {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "any",
                "AWS_SECRET_ACCESS_KEY": "any",
                "AWS_REGION": "us-east-1",
            }


def missing_tool(scheme: str) -> str:
    """Why the store of a scheme cannot run here; "" if it can."""
    found = {"s3": MOTO, "gs": FAKE_GCS, "az": AZURITE}[scheme]
    return (
        "" if found else f"the server of {scheme}:// is not installed: make {'s3' if scheme == 's3' else 'cloud'}-tools"
    )


@contextlib.contextmanager
def faulty_store(scheme: str = "s3") -> Iterator[FaultyStore]:
    """A store with one bucket."""
    made = {"s3": _moto, "gs": google_storage, "az": azure_blobs}[scheme]
    with made(BUCKET) as port:
        store = FaultyStore(port, scheme)
        try:
            yield store
        finally:
            store.close()


@contextlib.contextmanager
def _moto(bucket: str) -> Iterator[int]:
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
                    made.request("PUT", f"/{bucket}")
                    assert made.getresponse().status == 200
                    break
                except OSError:
                    assert time.monotonic() < until_s
                    time.sleep(0.1)
            yield port
        finally:
            server.kill()
