"""Tests the link between two nodes of a gang before it starts: a listener in every supervisor, and a client.

The listener echoes. The client names the node it wants ("phalanx-link 1 n3 20017"), reads the name of the node that answers, and then
sends pieces of 64 KiB, each of which is returned. A port in the greeting asks the listener to connect back to it: a peer may have tested
before and not know this node. No job data is sent; the listener returns no more bytes than it received, and connects to the client only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import random
import socket
import threading
import time
from typing import Final

from phalanx.node.logic.preflight_checks import (
    BULK_BYTES,
    BULK_S,
    LINK_PROBE_S,
    PIECE_BYTES,
    LinkProbe,
)

PORT_FIRST, PORT_LAST = 20_000, 31_999
"""The port range of ranks, which must be open between nodes (docs/join.md). It is below Linux' ephemeral range (32768 on), so that no outgoing
connection uses one of these ports."""
_PORT_TRIES: Final = 50
_GREETING: Final = "phalanx-link 1"
_LINE_MAX: Final = 300  # the greeting and a node's name
_SERVED_AT_ONCE: Final = 32  # twice the partners of a node; more wait in the kernel's queue
_SERVE_S: Final = 15.0  # for one exchange: connecting, bulk and some
_SERVED_BYTES_MAX: Final = 16 << 20
_REACH_S: Final = LINK_PROBE_S - 1.0  # so that the client, which waits for the answer, receives it
_AGAIN_S: Final = 0.2  # a peer that refuses may be restarting
_LEAST_S: Final = 0.01  # a timeout of 0 makes a socket non-blocking
_log = logging.getLogger(__name__)


class LinkProbeListener:
    """Answers link tests of other nodes. `port` is 0 if none could be opened, or none is needed."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._socket = None if is_loopback(address) else bound_socket(address)
        self._room = threading.BoundedSemaphore(_SERVED_AT_ONCE)
        self._closed = threading.Event()
        self.port = 0 if self._socket is None else int(self._socket.getsockname()[1])

    def run(self) -> None:
        """Run until closed."""
        while self._socket is not None:
            self._room.acquire()
            try:
                client, _ = self._socket.accept()
            # Closed, or out of descriptors, or the client disconnected: continue, since a node that does not answer is cordoned.
            except OSError as error:
                self._room.release()
                if self._closed.wait(_AGAIN_S):
                    return
                _log.warning("cannot accept a link test: %s", error)
                continue
            threading.Thread(target=self._serve, args=(client,), name="link", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _serve(self, client: socket.socket) -> None:
        until_s = time.monotonic() + _SERVE_S
        try:
            with client:
                words = _read_line(client, until_s).rsplit(" ", 2)  # greeting, node name, and port to connect back to
                if words[0] != _GREETING or not words[-1].isdecimal():
                    return
                client.sendall(f"{self._name}\n".encode())
                if port := int(words[-1]):
                    client.sendall(f"{_connect_back(client.getpeername()[0], port)}\n".encode())
                for _ in range(_SERVED_BYTES_MAX // PIECE_BYTES):
                    piece = _read_piece(client, until_s)
                    if len(piece) < PIECE_BYTES:
                        return
                    client.sendall(piece)
        except OSError as error:
            _log.debug("probe: %s", error)
        finally:
            self._room.release()


def probe_peer(peer: str, address: str, port: int, *, bulk: bool, own_port: int = 0) -> LinkProbe:
    """Test the link to a peer: its name, one piece there and back, and with `bulk` as many as BULK_S allows. Takes at most 3 * EXCHANGE_S.

    With `own_port` the peer is asked to connect back.
    """
    until_s = time.monotonic() + LINK_PROBE_S
    error = ""
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=left_s) as connection:
                return _talk(peer, connection, until_s, bulk=bulk, own_port=own_port)
        except TimeoutError:
            break
        except OSError as failed:  # refused or unreachable: retry, it may be starting
            error = failed.strerror or str(failed)
            time.sleep(_AGAIN_S)
    return LinkProbe(peer=peer, error=f"{address} port {port}: {error.lower()}" if error else "")


def is_loopback(address: str) -> bool:
    """Whether the address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _talk(peer: str, connection: socket.socket, until_s: float, *, bulk: bool, own_port: int) -> LinkProbe:
    piece = random.randbytes(PIECE_BYTES)  # random, so that no network device can compress it
    over_s = until_s + 2 * LINK_PROBE_S
    answered, back_error, back, broken, error = "", "", 0, False, ""
    try:
        connection.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        connection.sendall(f"{_GREETING} {peer} {own_port}\n".encode())
        answered = _read_line(connection, until_s)
        if own_port:
            back_error = _read_line(connection, time.monotonic() + LINK_PROBE_S)
        connection.settimeout(LINK_PROBE_S)
        bulk_until_s = time.monotonic() + BULK_S
        while back < PIECE_BYTES or (bulk and back < BULK_BYTES and time.monotonic() < bulk_until_s):
            connection.sendall(piece)
            returned = _read_piece(connection, over_s, silent_s=LINK_PROBE_S)
            if returned != piece:
                broken = True
                error = (
                    "the peer returned other bytes than were sent"
                    if len(returned) == PIECE_BYTES
                    else "the peer closed the connection"
                )
                break
            back += len(returned)
    except OSError as failed:
        broken, error = True, "" if isinstance(failed, TimeoutError) else (failed.strerror or str(failed)).lower()
    return LinkProbe(
        peer=peer,
        connected=True,
        answered=answered,
        return_error=back_error,
        returned_bytes=back,
        broken=broken,
        error=error,
    )


def _connect_back(address: str, port: int) -> str:
    """Connect to the client: empty on success, else the error."""
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except TimeoutError:
        return f"no connection in {_REACH_S:g} s"
    except OSError as failed:
        return (failed.strerror or str(failed)).lower()
    return ""


def bound_socket(address: str) -> socket.socket | None:
    """A listening socket on the address, or on all addresses if it is not one of this machine (a forwarded one)."""
    for host in (address, ""):
        for _ in range(_PORT_TRIES):
            port = random.randint(PORT_FIRST, PORT_LAST)
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family, backlog=_SERVED_AT_ONCE)
            except OSError as error:
                _log.debug("probe port %d on %s: %s", port, host or "all addresses", error)
    _log.warning("cannot open a port for link tests at %s; links to this node are not tested", address)
    return None


def _read_line(connection: socket.socket, until_s: float) -> str:
    line = bytearray()
    while len(line) < _LINE_MAX:
        byte = _receive_some(connection, 1, until_s)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode(errors="replace")


def _read_piece(connection: socket.socket, until_s: float, *, silent_s: float = _SERVE_S) -> bytes:
    piece = bytearray()
    while len(piece) < PIECE_BYTES:
        part = _receive_some(connection, PIECE_BYTES - len(piece), until_s, silent_s)
        if not part:
            break
        piece += part
    return bytes(piece)


def _receive_some(connection: socket.socket, most_bytes: int, until_s: float, silent_s: float = _SERVE_S) -> bytes:
    """Receive available bytes. The deadline is checked each time: a peer that sends single bytes never triggers the silence limit.

    Raises:
        TimeoutError: no data within `silent_s`, or the deadline has passed.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(min(left_s, silent_s))
    return connection.recv(most_bytes)
