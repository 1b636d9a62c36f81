"""Accepts connections of this node's own processes, on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Final

LOOPBACK: Final = "127.0.0.1"


class LoopbackListener:
    """A port, with a thread for each connection.

    Args:
        serve: receives a connection, which is closed when it returns.
        name: of the threads.

    Attributes:
        port: its number.
    """

    def __init__(self, serve: Callable[[socket.socket], None], name: str) -> None:
        self._serve, self._name = serve, name
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            for sock in (self._listener, *self._open):
                end_connection(sock)

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._attend, args=(sock,), name=self._name, daemon=True).start()

    def _attend(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed:
                end_connection(sock)
            self._open.add(sock)
        with sock, contextlib.suppress(OSError):
            self._serve(sock)
        with self._lock:
            self._open.discard(sock)


def end_connection(sock: socket.socket) -> None:
    """Wake the threads that wait for a socket; its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
