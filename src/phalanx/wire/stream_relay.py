"""Many TCP connections over one channel of bytes: used by the client and the head, and sent to a job's node as text, where it connects to ports there.

A frame is the number of its stream (4 bytes), its kind (1), a value (4, all big endian), and for DATA so many bytes. Each side may have
`WINDOW_BYTES` of a stream on their way that the other has not passed on, so that a slow connection delays no other. Standard library only.
"""

from __future__ import annotations

import collections
import errno
import os
import selectors
import socket
import struct
import sys
from collections.abc import Callable

OPEN, DATA, END, RESET, CREDIT = range(5)  # values: port, bytes that follow, none, errno, bytes that were passed on
WINDOW_BYTES = 1 << 21
STREAMS_MAX = 256
GREETING = b"phalanx-relay-1\n"
_PIECE_BYTES = 1 << 18
_QUEUED_BYTES_MAX = 1 << 20  # towards the channel, before connections are read no more
HEADER = struct.Struct(">IBI")
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_HOSTS = ("127.0.0.1", "::1")
_START = (
    'p=$(command -v python3 || command -v python) || { echo "the job has no Python, which the relay of ports needs"; exit 127; }; '
    'exec "$p" -S -E -c "$1"'
)


def relay_command() -> list[str]:
    """Return the command that runs this relay beside a job's ranks."""
    with open(__file__, encoding="utf-8") as file:
        return ["/bin/sh", "-c", _START, "phalanx", file.read()]


class RelayStream:
    """One connection. `room`: how much it may still send; `owed`: what it passed on since its last CREDIT."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.room, self.owed = WINDOW_BYTES, 0
        self.unsent = bytearray()
        self.connecting = self.ended_here = self.ended_there = self.shut = False
        self.port, self.host = 0, 0


class StreamRelay:
    """All connections of one channel, on one thread: `run` returns when the channel ends."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.streams: dict[int, RelayStream] = {}
        self.selector = selectors.DefaultSelector()
        self.over = False
        self._unread = bytearray()
        self._queue: collections.deque[bytes] = collections.deque()
        self._queued = self._last = 0
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self.watch(read_fd, _READ, self._read_channel)

    def run(self) -> None:
        """Copy until the channel ends."""
        try:
            while not self.over:
                for key, mask in self.selector.select():
                    key.data(mask)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            for stream in list(self.streams.values()):
                self._drop(stream, reset=True)
            self.selector.close()

    def watch(self, source: socket.socket | int, mask: int, handler: Callable[[int], None] | None) -> None:
        """Call `handler` on these events of a descriptor or socket; a mask of 0 ends that."""
        known = self.selector.get_map().get(source)
        if known is None and mask:
            self.selector.register(source, mask, handler)
        elif known is not None and not mask:
            self.selector.unregister(source)
        elif known is not None and known.events != mask:
            self.selector.modify(source, mask, handler)

    def accept(self, connection: socket.socket, port: int) -> None:
        """Carry a connection that was accepted here to a port there."""
        if len(self.streams) >= STREAMS_MAX:
            connection.close()
            return
        self._last += 1
        self._add(self._last, connection)
        self._send(self._last, OPEN, port)

    def refused(self, stream: RelayStream, error: int) -> None:
        """Handle the end of a stream by the other side."""

    # ---------------------------------------------------------------------------------------------------------- the channel

    def _send(self, number: int, kind: int, value: int, data: bytes = b"") -> None:
        self._queue.append(HEADER.pack(number, kind, value) + data)
        self._queued += HEADER.size + len(data)
        full = self._queued > _QUEUED_BYTES_MAX
        self._write_channel(0)
        if full and self._queued > _QUEUED_BYTES_MAX:
            for stream in self.streams.values():
                self._update(stream)

    def _write_channel(self, mask: int) -> None:
        paused = self._queued > _QUEUED_BYTES_MAX
        try:
            while self._queue:
                sent = os.write(self.write_fd, self._queue[0])
                self._queued -= sent
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                else:
                    self._queue.popleft()
        except BlockingIOError:
            pass
        if self.write_fd != self.read_fd:
            self.watch(self.write_fd, _WRITE if self._queue else 0, self._write_channel)
        else:
            self.watch(self.read_fd, _READ | (_WRITE if self._queue else 0), self._on_channel)
        if paused and mask and self._queued <= _QUEUED_BYTES_MAX:
            for stream in self.streams.values():
                self._update(stream)

    def _on_channel(self, mask: int) -> None:
        if mask & _WRITE:
            self._write_channel(mask)
        if mask & _READ:
            self._read_channel(mask)

    def _read_channel(self, _mask: int) -> None:
        try:
            data = os.read(self.read_fd, _PIECE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.over = True
            return
        self._unread += data
        at = 0
        while len(self._unread) - at >= HEADER.size:
            number, kind, value = HEADER.unpack_from(self._unread, at)
            if kind == DATA and value > WINDOW_BYTES:
                self.over = True  # the other side is no relay: its bytes would be collected without end
                return
            body = at + HEADER.size
            end = body + (value if kind == DATA else 0)
            if end > len(self._unread):
                break
            if kind == OPEN:
                self._connect(number, value)
            elif number in self.streams:
                self._handle(self.streams[number], kind, value, bytes(self._unread[body:end]))
            at = end
        del self._unread[:at]

    def _handle(self, stream: RelayStream, kind: int, value: int, data: bytes) -> None:
        if kind == DATA:
            if len(stream.unsent) + value > WINDOW_BYTES:
                self._drop(stream, reset=True)  # the other side ignores the window
                return
            stream.unsent += data
        elif kind == END:
            stream.ended_there = True
        elif kind == CREDIT:
            stream.room += value
        elif kind == RESET:
            self.refused(stream, value)
            self._drop(stream, reset=True)
            return
        self._flush(stream)

    # ------------------------------------------------------------------------------------------------------ the connections

    def _add(self, number: int, connection: socket.socket) -> RelayStream:
        connection.setblocking(False)
        stream = self.streams[number] = RelayStream(number, connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._update(stream)
        return stream

    def _connect(self, number: int, port: int, host: int = 0) -> None:
        if len(self.streams) >= STREAMS_MAX:
            self._send(number, RESET, errno.EMFILE)
            return
        connection = socket.socket(socket.AF_INET6 if ":" in _HOSTS[host] else socket.AF_INET)
        connection.setblocking(False)
        error = connection.connect_ex((_HOSTS[host], port))
        if error in (0, errno.EINPROGRESS):
            stream = self._add(number, connection)
            stream.connecting, stream.port, stream.host = error != 0, port, host
            self._update(stream)
            return
        connection.close()
        if host + 1 < len(_HOSTS) and error == errno.ECONNREFUSED:
            self._connect(number, port, host + 1)  # some servers listen on ::1 only
        else:
            self._send(number, RESET, errno.ECONNREFUSED)

    def _update(self, stream: RelayStream) -> None:
        """Watch a connection for what can be done with it."""
        reads = not stream.ended_here and stream.room > 0 and self._queued <= _QUEUED_BYTES_MAX
        mask = (_READ if reads else 0) | (_WRITE if stream.unsent else 0)
        self.watch(stream.connection, _WRITE if stream.connecting else mask, lambda now: self._on_stream(stream, now))

    def _on_stream(self, stream: RelayStream, mask: int) -> None:
        if self.streams.get(stream.number) is not stream:
            return  # an earlier event of this round has ended it
        if stream.connecting:
            error = stream.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            stream.connecting = False
            if error:
                unsent = stream.unsent
                self._drop(stream, reset=False)
                if stream.host == 0:
                    self._connect(stream.number, stream.port, 1)
                else:
                    self._send(stream.number, RESET, error)
                if stream.number in self.streams:
                    self.streams[stream.number].unsent = unsent
                return
        if mask & _READ:
            self._read(stream)
        if self.streams.get(stream.number) is stream:
            self._flush(stream)

    def _read(self, stream: RelayStream) -> None:
        try:
            data = stream.connection.recv(min(stream.room, _PIECE_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            self._send(stream.number, RESET, error.errno or errno.ECONNRESET)
            self._drop(stream, reset=True)
            return
        if data:
            stream.room -= len(data)
            self._send(stream.number, DATA, len(data), data)
        else:
            stream.ended_here = True
            self._send(stream.number, END, 0)

    def _flush(self, stream: RelayStream) -> None:
        """Pass on what has arrived, and its end."""
        try:
            if stream.unsent and not stream.connecting:
                sent = stream.connection.send(stream.unsent)
                del stream.unsent[:sent]
                stream.owed += sent
            if stream.ended_there and not stream.unsent and not stream.shut and not stream.connecting:
                stream.shut = True
                stream.connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError as error:
            self._send(stream.number, RESET, error.errno or errno.ECONNRESET)
            self._drop(stream, reset=True)
            return
        if stream.owed >= WINDOW_BYTES // 4:
            owed, stream.owed = stream.owed, 0
            self._send(stream.number, CREDIT, owed)
        if stream.ended_here and stream.shut:
            self._drop(stream, reset=False)
        else:
            self._update(stream)

    def _drop(self, stream: RelayStream, *, reset: bool) -> None:
        self.streams.pop(stream.number, None)
        self.watch(stream.connection, 0, None)
        if reset:
            stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.connection.close()


def main() -> None:
    """Greet, and relay between the session and ports of this node."""
    os.write(1, GREETING)
    StreamRelay(0, 1).run()


if __name__ == "__main__":
    main()
    sys.exit(0)
