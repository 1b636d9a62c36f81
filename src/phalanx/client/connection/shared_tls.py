"""A TLS socket that one thread may read while another one writes.

OpenSSL allows one thread at a time in a session (openssl-threads(7)), and Python 3.11 does not see to it. A server sends its session
tickets right after the handshake (RFC 8446, 4.6.1): a request that is written while another thread reads them may never leave.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading
import time


class SharedTlsSocket:
    """The part of a socket that `websockets.sync` uses. No call waits for the network while it holds the session.

    Args:
        wire: connected, handshake done; this object owns it from now on.
    """

    def __init__(self, wire: ssl.SSLSocket) -> None:
        wire.setblocking(False)
        self._wire, self._session = wire, threading.Lock()
        self._timeout_s: float | None = None
        self.family = wire.family
        self.setsockopt = wire.setsockopt
        self.getsockname, self.getpeername, self.fileno = wire.getsockname, wire.getpeername, wire.fileno

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of each later call; None waits forever."""
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        """Return what has arrived, at most `size` bytes; empty at the end. Raises OSError, also TimeoutError."""
        ends_s = self._deadline_s()
        while True:
            with self._session:
                try:
                    return self._wire.recv(size)
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event, ends_s)

    def sendall(self, data: bytes) -> None:
        """Send all of it. Raises OSError, also TimeoutError."""
        ends_s, left = self._deadline_s(), memoryview(data)
        while left:
            with self._session:
                try:
                    left = left[self._wire.send(left) :]
                    continue
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
            self._wait(event, ends_s)

    def shutdown(self, how: int) -> None:
        """Shut the connection below TLS down; what is on its way can still be read."""
        socket.socket.shutdown(self._wire, how)

    def close(self) -> None:
        """Close the connection; a thread that waits in `recv` wakes up."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self.shutdown(socket.SHUT_RDWR)
        with self._session:
            self._wire.close()

    def _deadline_s(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait(self, event: int, ends_s: float | None) -> None:
        descriptor = self._wire.fileno()
        if descriptor < 0:
            raise OSError(errno.EBADF, "the connection is closed")
        poll = select.poll()
        poll.register(descriptor, event)
        left_ms = None if ends_s is None else max(0.0, ends_s - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError("timed out")
