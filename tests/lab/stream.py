"""What a link carries, by plain sockets: one end sinks a stream of bytes, the other sends it and prints bits per second.

    python tests/lab/stream.py sink                   prints its port, takes one stream, answers one byte at its end
    python tests/lab/stream.py send ADDRESS PORT BYTES

Timed from the connection to the answer, so that what still lies in buffers is counted with its time. Standard library only, for it is
started inside hosts where start-up counts.
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK = bytes(1 << 16)
PATIENCE_S = 100.0
"""A guard: a cut link leaves both ends waiting."""


def sink() -> None:
    """Take one stream and say when all of it has come."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE_S)
        print(server.getsockname()[1], flush=True)
        stream, _ = server.accept()
        with stream:
            stream.settimeout(PATIENCE_S)
            while stream.recv(1 << 20):
                pass
            stream.sendall(b".")


def send(address: str, port: int, size_bytes: int) -> float:
    """Send that many bytes; the rate in bits per second."""
    began = time.perf_counter()
    with socket.create_connection((address, port), timeout=PATIENCE_S) as stream:
        left = size_bytes
        while left > 0:
            left -= stream.send(CHUNK[: min(left, len(CHUNK))])
        stream.shutdown(socket.SHUT_WR)
        if stream.recv(1) != b".":
            raise ConnectionError(f"{address}:{port} ended before all had come")
        return 8.0 * size_bytes / (time.perf_counter() - began)


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink()
    else:
        print(round(send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
