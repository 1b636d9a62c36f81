"""The user's end of an exec session's WebSocket, frame by frame."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import json
import logging
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.contract.api_head import bearer

QUIET = logging.getLogger("tests.exec_socket")
QUIET.setLevel(logging.WARNING)  # at DEBUG the library logs the token


def upgraded(url, path, headers, *, sock=None, **options):
    """The open WebSocket, or the HTTP response of a refusal."""
    try:
        return connect(
            f"ws://{urlsplit(url).netloc}{path}",
            sock=sock,
            additional_headers=headers,
            user_agent_header=None,
            compression=None,
            proxy=None,
            max_queue=None,
            logger=QUIET,
            legacy=True,
            **options,
        )
    except InvalidStatus as refusal:
        reply = refusal.response
        return httpx.Response(reply.status_code, headers=list(reply.headers.raw_items()), content=bytes(reply.body))


class ExecSocket:
    """One session; `refused` is the refusal of its handshake."""

    def __init__(self, url, job_id, headers, body=None, **options):
        found = upgraded(url, f"/v1/jobs/{job_id}/exec", headers, **options)
        self.refused = found if isinstance(found, httpx.Response) else None
        self.line = None if self.refused else found
        self.output = b""
        if self.line and body is not None:
            self.send(body)

    def send(self, frame):
        self.line.send(frame if isinstance(frame, bytes) else json.dumps(frame))

    def frame(self, timeout_s=20):
        """The next text frame; None once the connection is closed. Output is collected."""
        try:
            while isinstance(message := self.line.recv(timeout_s), bytes):
                self.output += message
        except ConnectionClosed:
            return None
        return json.loads(message)

    def until(self, kind):
        """The next text frame of that type."""
        while (frame := self.frame())["type"] != kind:
            pass
        return frame

    def read(self, size):
        """Output until there are so many bytes of it in all."""
        while len(self.output) < size:
            message = self.line.recv(20)
            self.output += message if isinstance(message, bytes) else b""
        return self.output

    def error(self):
        """The code of the error that ends the session, and with what the connection closes."""
        error = self.until("error")["error"]
        assert self.frame() is None
        return error["code"], self.line.close_code

    def close(self):
        self.line.close()


def open_exec(call, job_id, role="user", **changes):
    """A session whose command the node was asked to start."""
    socket = ExecSocket(
        call.url, job_id, bearer(role), {"argv": ["bash"], "tty": True, "rows": 30, "cols": 90, **changes}
    )
    assert socket.refused is None, socket.refused.text
    assert socket.until("opened")["window_bytes"] > 0
    return socket
