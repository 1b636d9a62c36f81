"""Messages between the processes of one batch job: framed JSON over TCP. Both sides prove that they hold the job's key before any other message."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any, Final

from phalanx.core.errors import BadRequest

FRAME_BYTES_MAX: Final = 1 << 22  # a step request holds argv and environment, on Linux at most 2 MB
BATCH_VARIABLE: Final = "PHALANX_BATCH"
_LENGTH: Final = struct.Struct(">I")
_HANDSHAKE_S: Final = 10.0
_RETRY_EVERY_S: Final = 0.1


class LinkClosed(Exception):
    """The connection is closed, or the peer is not part of this job."""


class NotInJob(BadRequest):
    """This process does not belong to a batch or MPI job of Phalanx."""


class JobLink:
    """One connection. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            LinkClosed: the connection is broken.
        """
        body = json.dumps(message).encode()
        try:
            with self._lock:
                self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            LinkClosed: the connection ended, or the message is invalid.
        """
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > FRAME_BYTES_MAX:
            raise LinkClosed(f"message of {size} bytes exceeds the limit of {FRAME_BYTES_MAX}")
        try:
            found = json.loads(self._exactly(size))
        except ValueError as error:
            raise LinkClosed("malformed message") from error
        if not isinstance(found, dict):
            raise LinkClosed("malformed message")
        return found

    def close(self) -> None:
        """Close it; a thread blocked in `receive` gets LinkClosed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self._sock.recv(size - len(data))
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not piece:
                raise LinkClosed("the peer closed the connection")
            data += piece
        return data


def open_link(address: str, port: int, key: str, who: dict[str, Any], *, within_s: float) -> JobLink:
    """Connect and prove that we belong to the job.

    Raises:
        LinkClosed: no listener within the time limit, it does not have the job's key, or the connection ended.
    """
    sock = _connected(address, port, time.monotonic() + within_s)
    link = JobLink(sock)
    their_nonce, own_nonce = str(link.receive().get("nonce", "")), secrets.token_hex(16)
    link.send({"mac": _mac(key, "from", their_nonce), "nonce": own_nonce, "who": who})
    if not hmac.compare_digest(str(link.receive().get("mac", "")), _mac(key, "to", own_nonce)):
        link.close()
        raise LinkClosed(f"the listener at {address}:{port} does not have this job's key")
    _finish_handshake(sock)
    return link


def _connected(address: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=_HANDSHAKE_S)
        except OSError as error:
            if time.monotonic() > until:
                raise LinkClosed(f"{address}:{port}: {error}") from error
            time.sleep(_RETRY_EVERY_S)


def accept_link(sock: socket.socket, key: str) -> tuple[JobLink, dict[str, Any]]:
    """Answer a `open_link`; returns the link and the peer's `who`.

    Raises:
        LinkClosed: the peer does not have the job's key, or the connection ended.
    """
    sock.settimeout(_HANDSHAKE_S)
    link, nonce = JobLink(sock), secrets.token_hex(16)
    link.send({"nonce": nonce})
    answer = link.receive()
    if not hmac.compare_digest(str(answer.get("mac", "")), _mac(key, "from", nonce)):
        link.close()
        raise LinkClosed("the peer does not have this job's key")
    link.send({"mac": _mac(key, "to", str(answer.get("nonce", "")))})
    _finish_handshake(sock)
    return link, dict(answer.get("who") or {})


def read_batch_order() -> dict[str, Any]:
    """This node's part of the job, as written by the supervisor.

    Raises:
        NotInJob: its order is missing or damaged.
    """
    try:
        with open(os.environ.get(BATCH_VARIABLE, ""), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError) as error:
        raise NotInJob(f"not in a batch job of Phalanx ({error})") from error


def _finish_handshake(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _mac(key: str, direction: str, nonce: str) -> str:
    return hmac.new(key.encode(), f"{direction} {nonce}".encode(), hashlib.sha256).hexdigest()
