"""A web program as a job may run one: it tells what it was sent, and answers as well as badly as programs do."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, attr-defined, union-attr"

import contextlib
import hashlib
import http.server
import json
import logging
import threading
from typing import ClassVar

from websockets.sync.server import serve

QUIET = logging.getLogger("tests.web_program")
QUIET.setLevel(logging.WARNING)  # at DEBUG the library logs headers
BAD = {
    "/bad/no-http": b"\x00\x01 nothing at all\r\n\r\n",
    "/bad/two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "/bad/length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "/bad/header": b"HTTP/1.1 200 OK\r\nX\x00Y: 1\r\n\r\n",
    "/bad/endless-header": b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"a" * (1 << 17),
    "/bad/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "/bad/nothing": b"",
    "/bad/short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this",
    "/bad/upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: nonsense\r\nConnection: upgrade\r\n\r\n",
}


class Program(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []  # paths

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.seen.append(self.path)
        path, _, query = self.path.partition("?")
        if path in BAD:
            self.wfile.write(BAD[path])
            self.close_connection = True
        elif path == "/big":
            self._big(int(query))
        elif path == "/moved":
            self._answer(302, b"", ("Location", query))
        elif path == "/headers":
            self._answer(200, b"x", *(tuple(one.split("=", 1)) for one in query.replace("%20", " ").split("&")))
        elif path == "/none":
            self.send_response(304)
            self.send_header("Content-Length", "77")
            self.end_headers()
        else:
            self._told()

    do_HEAD = do_DELETE = do_OPTIONS = do_GET  # noqa: N815  # as http.server calls them

    def do_POST(self):
        size, digest = self.headers["Content-Length"], hashlib.sha256()
        if size is not None:
            left = int(size)
            while left and (data := self.rfile.read(min(left, 1 << 16))):
                digest.update(data)
                left -= len(data)
        else:
            while length := int(self.rfile.readline(), 16):
                digest.update(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
        self._answer(201, digest.hexdigest().encode())

    do_PUT = do_PATCH = do_POST  # noqa: N815

    def _told(self):
        told = {"method": self.command, "path": self.path, "headers": [[k.lower(), v] for k, v in self.headers.items()]}
        self._answer(200, json.dumps(told).encode(), ("Content-Type", "application/json"))

    def _answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _big(self, size):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while size:
                piece = bytes(min(size, 1 << 18))
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                size -= len(piece)
            self.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def running():
    """The program's port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Program)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _echo(line):
    line.send(json.dumps([[k.lower(), v] for k, v in line.request.headers.raw_items()]))
    for message in line:
        if message == "leave":
            line.close(4001, "gone")
            return
        line.send(message)


@contextlib.contextmanager
def echoing(**options):
    """The port of a program that sends back what comes over a WebSocket."""
    with serve(_echo, "127.0.0.1", 0, compression=None, max_size=None, logger=QUIET, **options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
