"""How the processes of one batch job speak to each other: framed JSON over TCP, each side proven by the job's key before anything else."""

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

FRAME_BYTES_MAX: Final = 1 << 22  # a step's request holds argv and environment, at most 2 MB as Linux has it
BATCH_VARIABLE: Final = "PHALANX_BATCH"
_HEAD: Final = struct.Struct(">I")
_PROVE_S: Final = 10.0
_TRY_EVERY_S: Final = 0.1


class Closed(Exception):
    """The other side is gone, or was never one of us."""


class Link:
    """One connection. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            Closed: nobody takes it.
        """
        body = json.dumps(message).encode()
        try:
            with self._lock:
                self._sock.sendall(_HEAD.pack(len(body)) + body)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            Closed: none will come.
        """
        (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > FRAME_BYTES_MAX:
            raise Closed(f"a message of {size} bytes")
        try:
            found = json.loads(self._exactly(size))
        except ValueError as error:
            raise Closed("no message of ours") from error
        if not isinstance(found, dict):
            raise Closed("no message of ours")
        return found

    def close(self) -> None:
        """End it; who waits in `receive` wakes."""
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
                raise Closed(str(error)) from error
            if not piece:
                raise Closed("the other side closed")
            data += piece
        return data


def dial(address: str, port: int, key: str, who: dict[str, Any], *, within_s: float) -> Link:
    """Connect and prove that we are of the job.

    Raises:
        Closed: nobody listens there in time, or the key is not theirs.
    """
    sock = _connected(address, port, time.monotonic() + within_s)
    link = Link(sock)
    theirs, mine = str(link.receive().get("nonce", "")), secrets.token_hex(16)
    link.send({"mac": _mac(key, "from", theirs), "nonce": mine, "who": who})
    if not hmac.compare_digest(str(link.receive().get("mac", "")), _mac(key, "to", mine)):
        link.close()
        raise Closed("who listens there is not of this job")
    _settle(sock)
    return link


def _connected(address: str, port: int, until: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), timeout=_PROVE_S)
        except OSError as error:
            if time.monotonic() > until:
                raise Closed(f"{address}:{port}: {error}") from error
            time.sleep(_TRY_EVERY_S)


def greet(sock: socket.socket, key: str) -> tuple[Link, dict[str, Any]]:
    """The other side of `dial`: who it is.

    Raises:
        Closed: it is not of the job.
    """
    sock.settimeout(_PROVE_S)
    link, nonce = Link(sock), secrets.token_hex(16)
    link.send({"nonce": nonce})
    said = link.receive()
    if not hmac.compare_digest(str(said.get("mac", "")), _mac(key, "from", nonce)):
        link.close()
        raise Closed("a stranger")
    link.send({"mac": _mac(key, "to", str(said.get("nonce", "")))})
    _settle(sock)
    return link, dict(said.get("who") or {})


def order_here() -> dict[str, Any]:
    """This node's part of the job, as its supervisor wrote it.

    Raises:
        Closed: this process is of no batch job.
    """
    try:
        with open(os.environ.get(BATCH_VARIABLE, ""), encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError) as error:
        raise Closed(f"this is no batch job of Phalanx ({error})") from error


def _settle(sock: socket.socket) -> None:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _mac(key: str, way: str, nonce: str) -> str:
    return hmac.new(key.encode(), f"{way} {nonce}".encode(), hashlib.sha256).hexdigest()
