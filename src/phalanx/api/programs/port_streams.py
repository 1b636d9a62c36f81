"""TCP connections to ports beside a job's ranks, over one exec session to the relay there (wire.stream_relay). On the event loop only."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import Final

from phalanx.api.live.exec_sessions import HeadExecSession
from phalanx.core.errors import Conflict, PhalanxError
from phalanx.wire.stream_relay import CREDIT, DATA, END, GREETING, HEADER, OPEN, RESET, WINDOW_BYTES
from phalanx.wire.supervisor import EXEC_CHUNK_BYTES_MAX

_PIECE_BYTES: Final = 1 << 16  # of one frame: a large upload leaves room for others in between
_GREETING_BYTES_MAX: Final = 4096
_WAKE_S: Final = 10.0  # changes notify; this bounds a lost notification


class PortStreamBroken(Exception):
    """The connection to the port ended before its time. `refused`: nothing listens there; `why`: for people."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.why, self.refused = why, refused


class PortStream:
    """One connection. One task may read while another one writes."""

    def __init__(self, channel: PortChannel, number: int) -> None:
        self._channel, self._number = channel, number
        self._incoming: deque[bytes] = deque()
        self._buffered = self._owed = 0
        self._room = WINDOW_BYTES
        self._ended_there = self._ended_here = self._closed = False
        self._broken: PortStreamBroken | None = None
        self._readable, self._writable = asyncio.Event(), asyncio.Event()

    async def read(self) -> bytes:
        """Return the next bytes of the program; empty at their end.

        Raises:
            PortStreamBroken: the connection broke.
        """
        while not self._incoming:
            if self._broken is not None:
                raise self._broken
            if self._ended_there:
                return b""
            self._readable.clear()
            await self._readable.wait()
        data = self._incoming.popleft()
        self._buffered -= len(data)
        self._owed += len(data)
        if self._owed >= WINDOW_BYTES // 4:
            self._channel.send_control(self._number, CREDIT, self._owed)
            self._owed = 0
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the program, as fast as it reads them.

        Raises:
            PortStreamBroken: the connection broke.
        """
        at = 0
        while at < len(data):
            if self._broken is not None:
                raise self._broken
            if self._room <= 0:
                self._writable.clear()
                await self._writable.wait()
                continue
            piece = data[at : at + min(self._room, _PIECE_BYTES)]
            self._room -= len(piece)
            at += len(piece)
            await self._channel.send_data(self._number, piece)

    def end(self) -> None:
        """Send the end of this side."""
        if not self._ended_here and self._broken is None:
            self._ended_here = True
            self._channel.send_control(self._number, END, 0)

    def close(self) -> None:
        """End the connection, whatever its state."""
        if self._closed:
            return
        self._closed = True
        if self._broken is None and not (self._ended_here and self._ended_there):
            self._channel.send_control(self._number, RESET, errno.ECONNRESET)
        self._channel.forget(self._number)

    def take(self, kind: int, value: int, data: bytes) -> None:
        """Handle a frame of the relay."""
        if kind == DATA:
            if self._buffered + len(data) > WINDOW_BYTES:
                self.break_off(PortStreamBroken("the relay in the job ignores the window"))
                return
            self._incoming.append(data)
            self._buffered += len(data)
        elif kind == END:
            self._ended_there = True
        elif kind == CREDIT:
            self._room += value
        elif kind == RESET:
            refused = value == errno.ECONNREFUSED
            why = "nothing listens there" if refused else "the program closed the connection"
            self.break_off(PortStreamBroken(why, refused=refused))
        self._readable.set()
        self._writable.set()

    def break_off(self, broken: PortStreamBroken) -> None:
        """Make reads and writes fail, once the bytes that have arrived are read."""
        self._broken = self._broken or broken
        self._readable.set()
        self._writable.set()


class PortChannel:
    """All connections of one user to one node of an attempt. `idle_s`: how long it stays open without connections."""

    def __init__(
        self, session: HeadExecSession, *, buffer_bytes: int, idle_s: float, on_end: Callable[[], None]
    ) -> None:
        self._session, self._buffer_bytes, self._idle_s, self._on_end = session, buffer_bytes, idle_s, on_end
        self._streams: dict[int, PortStream] = {}
        self._last = 0
        self._error: PhalanxError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_open(self) -> bool:
        """Whether new connections can be made."""
        return self._error is None

    def connect(self, port: int) -> PortStream:
        """Open a connection to a port. It may be written to at once; `read` reports a refusal.

        Raises:
            PhalanxError: the relay has ended.
        """
        if self._error is not None:
            raise self._error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last += 1
        stream = self._streams[self._last] = PortStream(self, self._last)
        self.send_control(self._last, OPEN, port)
        return stream

    def send_control(self, number: int, kind: int, value: int) -> None:
        """Send a frame without bytes at once: these are few, so they need no room."""
        if self._error is None:
            self._session.input.append(self._session.input.end, HEADER.pack(number, kind, value), 1 << 40)
            self._session.notify()

    async def send_data(self, number: int, data: bytes) -> None:
        """Send bytes of a connection, once the session has room for them."""
        frame = HEADER.pack(number, DATA, len(data)) + data
        while self._error is None:
            if self._session.input.append(self._session.input.end, frame, self._buffer_bytes):
                self._session.notify()
                return
            await self._session.wait(_WAKE_S)

    def forget(self, number: int) -> None:
        """Drop a connection; the last one starts the clock of an idle channel."""
        self._streams.pop(number, None)
        if not self._streams and self._error is None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._task.cancel)

    async def _run(self) -> None:
        error: PhalanxError | None = None
        try:
            error = await self._receive()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._error = error or self._session.failure("the connection to the job's node has ended")
            for stream in list(self._streams.values()):
                stream.break_off(PortStreamBroken(self._error.message))
            self._on_end()

    async def _receive(self) -> PhalanxError | None:
        """Pass on what the relay sends until it ends; return why it ended."""
        session, at, unread, greeted = self._session, 0, bytearray(), False
        while True:
            data = session.output.read(at, EXEC_CHUNK_BYTES_MAX)
            if not data:
                if session.error is not None:
                    return session.error
                if session.exit_code is not None:
                    return self._not_started(unread) if not greeted else None
                await session.wait(_WAKE_S)
                continue
            at += len(data)
            session.output.acknowledge(at)
            session.notify()
            unread += data
            if not greeted:
                greeted = unread.startswith(GREETING)
                if not greeted:
                    if len(unread) > _GREETING_BYTES_MAX:
                        return self._not_started(unread)
                    continue
                del unread[: len(GREETING)]
            if not self._take_frames(unread):
                return session.failure("the relay of ports in the job sends invalid data")
            await asyncio.sleep(0)  # other tasks take their turn between two pieces

    def _take_frames(self, unread: bytearray) -> bool:
        """Handle all complete frames and remove them; False if they are not those of a relay."""
        at = 0
        while len(unread) - at >= HEADER.size:
            number, kind, value = HEADER.unpack_from(unread, at)
            if kind == OPEN or kind > CREDIT or (kind == DATA and value > WINDOW_BYTES):
                return False
            body = at + HEADER.size
            end = body + (value if kind == DATA else 0)
            if end > len(unread):
                break
            stream = self._streams.get(number)
            if stream is not None:
                stream.take(kind, value, bytes(unread[body:end]) if kind == DATA else b"")
            at = end
        del unread[:at]
        return True

    def _not_started(self, seen: bytearray) -> PhalanxError:
        why = seen.decode(errors="replace").strip() or f"it ended with code {self._session.exit_code}"
        return Conflict(
            f"the relay of ports did not start in job {self._session.job_id}: {why}",
            hint="its image or node needs Python 3",
        )
