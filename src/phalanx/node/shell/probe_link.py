"""The link between two nodes of a gang, tried before the gang starts: a listener in every supervisor, and an exchange with it.

What is sent comes back: the asker says whom it wants ("phalanx-link 1 n3 20017"), hears who is there, and then sends pieces of 64 KiB, each
of which is returned whole. With a port of its own in the greeting it also asks to be reached back there: for a peer that came before and
does not know of it. Nothing of a job goes this way; the listener returns no more than it was sent, and connects to nobody but the asker.
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

from phalanx.node.logic.fitness import BULK_BYTES, BULK_S, EXCHANGE_S, PIECE_BYTES, Exchange

PORT_FIRST, PORT_LAST = 20_000, 31_999
"""The ports of ranks, which must be open between nodes anyway (docs/join.md); below Linux' ephemeral range (32768 on), so that no outgoing
connection takes one in between."""
_PORT_TRIES: Final = 50
_GREETING: Final = "phalanx-link 1"
_LINE_MAX: Final = 300  # the greeting and a node's name
_SERVED_AT_ONCE: Final = 32  # twice the partners of a node; more wait in the kernel's queue
_SERVE_S: Final = 15.0  # for one exchange: connecting, bulk and some
_SERVED_BYTES_MAX: Final = 16 << 20
_REACH_S: Final = EXCHANGE_S - 1.0  # so that the asker, who waits for the answer, hears it
_AGAIN_S: Final = 0.2  # a peer that refuses may be starting anew
_LEAST_S: Final = 0.01  # a timeout of 0 would mean another thing to a socket
_log = logging.getLogger(__name__)


class LinkListener:
    """Answers the probes of other nodes. `port` is 0 where none could be opened, or none is needed."""

    def __init__(self, name: str, address: str) -> None:
        self._name = name
        self._socket = None if is_loopback(address) else _bound(address)
        self._room = threading.BoundedSemaphore(_SERVED_AT_ONCE)
        self._closed = threading.Event()
        self.port = 0 if self._socket is None else int(self._socket.getsockname()[1])

    def run(self) -> None:
        """Until closed."""
        while self._socket is not None:
            self._room.acquire()
            try:
                asker, _ = self._socket.accept()
            except (
                OSError
            ) as error:  # closed; or no file is left just now, or the asker went: deaf for good, we would be kept out
                self._room.release()
                if self._closed.wait(_AGAIN_S):
                    return
                _log.warning("a probe is not taken: %s", error)
                continue
            threading.Thread(target=self._serve, args=(asker,), name="link", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _serve(self, asker: socket.socket) -> None:
        until_s = time.monotonic() + _SERVE_S
        try:
            with asker:
                words = _read_line(asker, until_s).rsplit(" ", 2)  # greeting, whom, and where to reach back
                if words[0] != _GREETING or not words[-1].isdecimal():
                    return
                asker.sendall(f"{self._name}\n".encode())
                if port := int(words[-1]):
                    asker.sendall(f"{_reached(asker.getpeername()[0], port)}\n".encode())
                for _ in range(_SERVED_BYTES_MAX // PIECE_BYTES):
                    piece = _read_piece(asker, until_s)
                    if len(piece) < PIECE_BYTES:
                        return
                    asker.sendall(piece)
        except OSError as error:
            _log.debug("probe: %s", error)
        finally:
            self._room.release()


def exchange(peer: str, address: str, port: int, *, bulk: bool, own_port: int = 0) -> Exchange:
    """Try the link to a peer: its name, one piece there and back, with `bulk` as many as go in BULK_S. Takes three times EXCHANGE_S at most.

    With `own_port` the peer is asked to reach us back.
    """
    until_s = time.monotonic() + EXCHANGE_S
    error = ""
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=left_s) as connection:
                return _talk(peer, connection, until_s, bulk=bulk, own_port=own_port)
        except TimeoutError:
            break
        except OSError as failed:  # refused, or no way there: not for long, if it is only starting
            error = failed.strerror or str(failed)
            time.sleep(_AGAIN_S)
    return Exchange(peer=peer, error=f"{address} port {port}: {error.lower()}" if error else "")


def is_loopback(address: str) -> bool:
    """Whether nobody elsewhere can reach it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _talk(peer: str, connection: socket.socket, until_s: float, *, bulk: bool, own_port: int) -> Exchange:
    piece = random.randbytes(PIECE_BYTES)  # no device on the way can make it smaller
    over_s = until_s + 2 * EXCHANGE_S
    answered, deaf, back, broken, error = "", "", 0, False, ""
    try:
        connection.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        connection.sendall(f"{_GREETING} {peer} {own_port}\n".encode())
        answered = _read_line(connection, until_s)
        if own_port:
            deaf = _read_line(connection, time.monotonic() + EXCHANGE_S)
        connection.settimeout(EXCHANGE_S)
        bulk_until_s = time.monotonic() + BULK_S
        while back < PIECE_BYTES or (bulk and back < BULK_BYTES and time.monotonic() < bulk_until_s):
            connection.sendall(piece)
            returned = _read_piece(connection, over_s, silent_s=EXCHANGE_S)
            if returned != piece:
                broken = True
                error = "other bytes came back than were sent" if len(returned) == PIECE_BYTES else "it hung up"
                break
            back += len(returned)
    except OSError as failed:
        broken, error = True, "" if isinstance(failed, TimeoutError) else (failed.strerror or str(failed)).lower()
    return Exchange(
        peer=peer, connected=True, answered=answered, deaf=deaf, back_bytes=back, broken=broken, error=error
    )


def _reached(address: str, port: int) -> str:
    """Connect to the asker: empty where that goes, else why not."""
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except TimeoutError:
        return f"no connection in {_REACH_S:g} s"
    except OSError as failed:
        return (failed.strerror or str(failed)).lower()
    return ""


def _bound(address: str) -> socket.socket | None:
    """A listening socket there, or, where the address is not this machine's own (a forwarded one), on all of them."""
    for host in (address, ""):
        for _ in range(_PORT_TRIES):
            port = random.randint(PORT_FIRST, PORT_LAST)
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family, backlog=_SERVED_AT_ONCE)
            except OSError as error:
                _log.debug("probe port %d on %s: %s", port, host or "all addresses", error)
    _log.warning("no port for probes of the links to this node at %s; they are not tried", address)
    return None


def _read_line(connection: socket.socket, until_s: float) -> str:
    line = bytearray()
    while len(line) < _LINE_MAX:
        byte = _part(connection, 1, until_s)
        if byte in (b"", b"\n"):
            break
        line += byte
    return line.decode(errors="replace")


def _read_piece(connection: socket.socket, until_s: float, *, silent_s: float = _SERVE_S) -> bytes:
    piece = bytearray()
    while len(piece) < PIECE_BYTES:
        part = _part(connection, PIECE_BYTES - len(piece), until_s, silent_s)
        if not part:
            break
        piece += part
    return bytes(piece)


def _part(connection: socket.socket, most_bytes: int, until_s: float, silent_s: float = _SERVE_S) -> bytes:
    """What there is; the time is asked before each, for whoever sends a byte now and then is never silent.

    Raises:
        TimeoutError: nothing came for so long, or the time is over.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(min(left_s, silent_s))
    return connection.recv(most_bytes)
