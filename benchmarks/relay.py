"""Benchmark of the relay on loopback: what it adds to a round trip and to a new connection, and what one stream carries.

python -m benchmarks.relay [--json] [--runs N]

The relay and the head are processes of their own. The head's end answers on the connections that the head's own agent takes from the relay, and on
direct ones; the bytes are not encrypted again, so that the figures are those of the relay alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from benchmarks.cluster import ROOT, free_port, wait_until
from benchmarks.figures import Figure, argument_parser, plain_figure, print_progress, print_report
from phalanx.api.http.relay_agent import RelayAgent, RelaySettings
from phalanx.app.relay.key_file import read_relay_key
from phalanx.app.relay.server import read_or_create_relay_key

ROUND_TRIPS: Final = 2000
CONNECTIONS: Final = 100
STREAM_BYTES: Final = 512 << 20
_MESSAGE: Final = b"\x16" + bytes(63)  # the first byte of TLS, for which alone the relay carries
_CHUNK_BYTES: Final = 256 << 10
_SINK: Final = b"\x01"  # the second byte of a connection whose bytes are counted; those of others are returned


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--head"]:
        asyncio.run(_serve_head(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
        return
    given = argument_parser(__doc__ or "").parse_args()
    runs = given.runs or 5
    with _processes() as (direct, relayed):
        trips = {name: [_round_trip_s(port) for _ in range(runs)] for name, port in _both(direct, relayed)}
        opened = {name: [_opening_s(port) for _ in range(runs)] for name, port in _both(direct, relayed)}
        rates = {name: [_stream_rate(port) for _ in range(runs)] for name, port in _both(direct, relayed)}
    print_report("Relay", _figures(trips, opened, rates), as_json=given.json)


def _both(direct: int, relayed: int) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("direct", direct), ("relayed", relayed)


def _figures(
    trips: dict[str, list[float]], opened: dict[str, list[float]], rates: dict[str, list[float]]
) -> list[Figure]:
    def added_ms(seconds: dict[str, list[float]]) -> list[float]:
        base = statistics.median(seconds["direct"])
        return [(one - base) * 1000 for one in seconds["relayed"]]

    plain = f"direct {statistics.median(trips['direct']) * 1000:.3f} ms; median of {ROUND_TRIPS} of 64 bytes"
    opening = f"direct {statistics.median(opened['direct']) * 1000:.3f} ms; median of {CONNECTIONS}, one at a time"
    return [
        plain_figure("added to a round trip", added_ms(trips), "ms", note=plain),
        plain_figure("added to a connection and its first round trip", added_ms(opened), "ms", note=opening),
        plain_figure("one stream, direct", rates["direct"], "MB/s", note=f"{STREAM_BYTES >> 20} MiB"),
        plain_figure("one stream, through the relay", rates["relayed"], "MB/s", note=f"{STREAM_BYTES >> 20} MiB"),
    ]


@contextmanager
def _processes() -> Iterator[tuple[int, int]]:
    """Run a relay and a head; yield the ports of the head and of the relay."""
    direct, relayed = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        key = os.path.join(folder, "relay.key")
        read_or_create_relay_key(key)
        words = (
            ["-m", "phalanx.app.relay.server", "--listen", f"127.0.0.1:{relayed}", "--key", key],
            ["-m", "benchmarks.relay", "--head", str(direct), str(relayed), key],
        )
        started = [subprocess.Popen([sys.executable, *each], cwd=ROOT, stderr=subprocess.DEVNULL) for each in words]
        try:
            for port in (direct, relayed):
                wait_until(partial(_answers, port), f"an answer at port {port}")
            yield direct, relayed
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(timeout=20)


async def _serve_head(port: int, relay_port: int, key_file: str) -> None:
    """Serve direct connections, and those of the relay."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def take(connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = loop.create_task(_serve_connection(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    listener.setblocking(False)
    agent = RelayAgent(RelaySettings(host="127.0.0.1", port=relay_port, key=read_relay_key(key_file)), take)
    try:
        while True:
            take((await loop.sock_accept(listener))[0])
    finally:
        agent.close()


async def _serve_connection(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with connection, suppress(OSError):
        data = await loop.sock_recv(connection, _CHUNK_BYTES)
        if data[1:2] == _SINK:
            while await loop.sock_recv(connection, _CHUNK_BYTES):
                pass
            await loop.sock_sendall(connection, _SINK)
            return
        while data:
            await loop.sock_sendall(connection, data)
            data = await loop.sock_recv(connection, _CHUNK_BYTES)


def _answers(port: int) -> bool:
    with suppress(OSError), _connected(port) as connection:
        return _echoed(connection)
    return False


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _echoed(connection: socket.socket) -> bool:
    connection.sendall(_MESSAGE)
    return connection.recv(len(_MESSAGE), socket.MSG_WAITALL) == _MESSAGE


def _round_trip_s(port: int) -> float:
    seconds = []
    with _connected(port) as connection:
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            assert _echoed(connection)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _opening_s(port: int) -> float:
    seconds = []
    for _ in range(CONNECTIONS):
        began = time.perf_counter()
        with _connected(port) as connection:
            assert _echoed(connection)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _stream_rate(port: int) -> float:
    """Return the MB/s (10^6 bytes) of one stream to the head, from its first byte to the confirmation of its last."""
    chunk = bytes(_CHUNK_BYTES)
    with _connected(port) as connection:
        connection.sendall(_MESSAGE[:1] + _SINK)
        began = time.perf_counter()
        for _ in range(STREAM_BYTES // _CHUNK_BYTES):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == _SINK
        rate = STREAM_BYTES / 1e6 / (time.perf_counter() - began)
    print_progress(f"port {port}: {rate:,.0f} MB/s")
    return rate


if __name__ == "__main__":
    main()
