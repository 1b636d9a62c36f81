"""The listener off loopback: serves TLS connections and answers plain HTTP connections with one clear error.

A connection whose TLS greeting offers RENEWAL_PROTOCOL may be handed over to another process, handshake and all.

asyncio's own TLS server closes a plain connection without an answer. So this listener accepts connections itself and peeks at the
first bytes. It passes TLS connections on and answers the others.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from phalanx.wire.supervisor import RENEWAL_PROTOCOL

HANDSHAKE_TIMEOUT_S: Final = 10.0  # from accept to the end of the handshake
HANDSHAKES_MAX: Final = 2000  # connections between accept and the end of the handshake
_HELLO_BYTES: Final = 4096  # a greeting has some 500; one that comes in pieces is served here
_RENEWALS: Final = bytes([len(RENEWAL_PROTOCOL)]) + RENEWAL_PROTOCOL.encode()  # in a ClientHello (RFC 7301, 3.1)
_TLS_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection (RFC 8446, 5.1)
# By default asyncio buffers 256 KiB per TLS connection, and a supervisor has five; a TLS record holds 16 KiB (RFC 8446, 5.1).
asyncio.sslproto.SSLProtocol.max_size = 32 * 1024
_PAUSE_S: Final = 0.1  # after a failed accept, as when no descriptor is left
_PLAIN: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
)
_BODY: Final = (
    b'{"error":{"code":"bad_request","message":"this address serves HTTPS, and the request is plain HTTP",'
    b'"hint":"write https:// instead of http://"}}'
)
_log: Final = logging.getLogger("phalanx.api")


class TlsSniffingListener:
    """Accepts connections on one listening socket until it is closed. Use it on the event loop only."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        protocol_factory: Callable[[], asyncio.Protocol],
        hand_over: Callable[[socket.socket], bool] = lambda _: False,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._context, self._make, self._hand_over = listener, context, protocol_factory, hand_over
        self._opening: set[asyncio.Task[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Stop accepting connections and close the socket."""
        self._task.cancel()
        for task in self._opening:
            task.cancel()
        self._listener.close()

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that another socket accepted, or that this head opened to its relay."""
        if len(self._opening) >= HANDSHAKES_MAX:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("accepting a connection failed: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self.take(connection)

    async def _open(self, connection: socket.socket) -> None:
        passed_on = False
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await first_bytes(connection)
                if not is_tls(hello):
                    await answer_plain_http(connection)
                    return
                if _RENEWALS in hello and self._hand_over(connection):
                    return  # its other process has a descriptor of its own
                passed_on = True
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
                )
        except (
            OSError,
            TimeoutError,
        ) as error:  # includes ssl.SSLError: clients that do not trust the CA disconnect here
            _log.debug("a connection was not opened: %s", error)
        finally:
            if not passed_on:
                with contextlib.suppress(OSError):
                    connection.close()


def is_tls(first: bytes) -> bool:
    """Whether a connection that begins with these bytes is TLS."""
    return first[:1] == _TLS_HANDSHAKE


async def answer_plain_http(connection: socket.socket) -> None:
    """Answer a plain HTTP request with the error that says so.

    Raises:
        OSError: the other end has disconnected.
    """
    connection.recv(1 << 16)  # unread bytes at the close would cut the answer off
    await asyncio.get_running_loop().sock_sendall(connection, _PLAIN % (len(_BODY), _BODY))
    connection.shutdown(socket.SHUT_WR)


async def first_bytes(connection: socket.socket) -> bytes:
    """Peek at the first bytes; empty if the other end closed the connection."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection.fileno(), on_readable)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())
    return connection.recv(_HELLO_BYTES, socket.MSG_PEEK)
