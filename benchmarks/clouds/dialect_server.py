"""A cloud for tests that answers as Google, Azure or a smaller cloud does, over HTTP: `python -m benchmarks.clouds.dialect_server --dialect google`.

These are not the clouds, and no recording of them: each dialect is written from the public reference that its module names, for the calls that a
provider of ours makes, and it refuses others. What the real clouds do beside their documents is not in it.

`GET /cloud/list` has every machine that ever was, with the times in between which it is charged; `/cloud/calm` ends all faults.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from benchmarks.clouds.azure_dialect import AzureDialect
from benchmarks.clouds.cloud_faults import CloudFaults
from benchmarks.clouds.dialect import Dialect, DialectAnswer, DialectCall
from benchmarks.clouds.google_dialect import GoogleDialect
from benchmarks.clouds.small_dialect import SmallDialect


class DialectHandler(BaseHTTPRequestHandler):
    """One connection. The server has the dialect."""

    protocol_version = "HTTP/1.1"
    dialect: Dialect

    def log_message(self, *words: object) -> None:
        """Write nothing."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path.startswith("/cloud/"):
            self._reply(_control(self.dialect, parts.path))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body: Any = content
        if "json" in headers.get("content-type", "") and content:
            body = json.loads(content)
        call = DialectCall(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query)),
            headers=headers,
            body=body,
            base=f"http://{headers.get('host', '')}",
        )
        name, changes, calm = self.dialect.name_of(call)
        self.dialect.faults.count(name)
        answer = self.dialect.faults.deliver(
            lambda _: self.dialect.answer(call), self.dialect.throttled, changes=changes, calm=calm
        )
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._reply(answer)

    do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815  # the names are those of http.server

    def _reply(self, answer: DialectAnswer) -> None:
        text = isinstance(answer.body, bytes)
        content = b"" if answer.body is None else answer.body if text else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/plain" if text else "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _control(dialect: Dialect, path: str) -> DialectAnswer:
    faults = dialect.faults
    if path == "/cloud/calm":
        faults.faults = 0.0
    with faults.lock:
        if path == "/cloud/count":
            return DialectAnswer(200, {"machines": len(faults.machines)})
        body = {"machines": list(faults.machines.values()), "counts": faults.counts, "leftovers": dialect.leftovers()}
        return DialectAnswer(200, json.loads(json.dumps(body)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are killed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def make_dialect(name: str, faults: CloudFaults) -> Dialect:
    """Return a dialect by its name."""
    match name:
        case "google":
            return GoogleDialect(faults)
        case "azure":
            return AzureDialect(faults)
        case _:
            return SmallDialect(name, faults)


def serve(dialect: Dialect, port: int = 0) -> ThreadingHTTPServer:
    """Serve on loopback on a thread, and return the server, whose `shutdown` and `server_close` end it."""
    handler = type("BoundDialectHandler", (DialectHandler,), {"dialect": dialect})
    server = _Server(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def main() -> None:
    """Serve until SIGTERM."""
    words = argparse.ArgumentParser(prog="python -m benchmarks.clouds.dialect_server")
    words.add_argument("--dialect", required=True)
    words.add_argument("--port", type=int, required=True)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--faults", type=float, default=0.0)
    given = words.parse_args()
    serve(make_dialect(given.dialect, CloudFaults(given.seed, given.faults)), given.port)
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
