"""A TCP forwarder between two programs of this machine that can stop forwarding silently, to simulate a network partition."""

from __future__ import annotations

import socket
import threading
import time
from typing import Self


class CuttableLink:
    """A forwarder to a port on loopback. While `cut` is set, it drops all data and accepts connections that stay silent."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self.cut = threading.Event()
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target_port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        while True:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            while self.cut.is_set():  # drops data in transit, and a close of the connection
                time.sleep(0.05)
                data = b""
            try:
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
            except OSError:
                return
