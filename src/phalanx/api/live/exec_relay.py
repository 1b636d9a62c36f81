"""Carries one exec session between its user's WebSocket and its buffers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx.api.live.exec_sessions import HeadExecSession
from phalanx.api.runtime import ApiRuntime
from phalanx.core.errors import BadRequest, Conflict
from phalanx.wire.api.execs import (
    ClientFrame,
    ExecAck,
    ExecExit,
    ExecInputEnd,
    ExecOpened,
    ExecResize,
    ExecSignal,
    HeadFrame,
)
from phalanx.wire.supervisor import EXEC_CHUNK_BYTES_MAX

SIDE_MAX: Final = 1000  # rows or columns of any terminal
_SIGNALS_MAX: Final = 100  # of one session: a person presses Ctrl-C a few times
_WAKE_S: Final = 10.0  # changes notify; this bounds a lost notification


class ExecRelay:
    """One session. `reauthorize` raises once the user loses the permission."""

    def __init__(
        self, runtime: ApiRuntime, websocket: WebSocket, session: HeadExecSession, reauthorize: Callable[[], None]
    ) -> None:
        self._runtime, self._websocket, self._session = runtime, websocket, session
        self._reauthorize = reauthorize
        self._window_bytes = runtime.services.limits.exec_buffer_bytes

    async def run(self) -> None:
        """Carry bytes until the command ends or the user leaves.

        Raises:
            PhalanxError: the command was not started, a frame is invalid, the user lost the permission, or the head stops.
        """
        sides = [
            asyncio.ensure_future(work)
            for work in (self._send(), self._receive(), self._runtime.permission_lost(self._reauthorize))
        ]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                error = side.result()
                if error is not None:
                    raise error
        except WebSocketDisconnect:
            pass
        finally:
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    async def _send(self) -> None:
        """Send output and acknowledgements, and finally the exit code."""
        session, sent, acknowledged = self._session, 0, 0
        await self._send_frame(ExecOpened(window_bytes=self._window_bytes))
        while True:
            data = session.output.read(sent, EXEC_CHUNK_BYTES_MAX)
            if data:
                await self._websocket.send_bytes(data)
                sent += len(data)
            elif session.input.base > acknowledged:
                acknowledged = session.input.base
                await self._send_frame(ExecAck(offset=acknowledged))
            elif session.error is not None:
                raise session.error
            elif session.exit_code is not None:
                await self._send_frame(ExecExit(exit_code=session.exit_code))
                return
            else:
                await session.wait(_WAKE_S)

    async def _send_frame(self, frame: HeadFrame) -> None:
        await self._websocket.send_text(msgspec.json.encode(frame).decode())

    async def _receive(self) -> None:
        """Receive input and control frames until the user leaves."""
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            data = message.get("bytes")
            if data is not None:
                self._take_input(data)
            else:
                self._handle(decode_frame(message["text"], ClientFrame))
            self._session.notify()

    def _take_input(self, data: bytes) -> None:
        session = self._session
        if session.input_closed:
            raise Conflict("the command's input is already closed")
        if not session.input.append(session.input.end, data, self._window_bytes):
            raise BadRequest(
                f"over {self._window_bytes} bytes of input are unacknowledged", hint="wait for the head's ack frames"
            )

    def _handle(self, frame: ClientFrame) -> None:
        session = self._session
        match frame:
            case ExecAck():
                session.output.acknowledge(frame.offset)
            case ExecResize():
                check_terminal_size(frame.rows, frame.cols)
                session.rows, session.cols, session.resized = frame.rows, frame.cols, True
            case ExecSignal():
                if len(session.signals) >= _SIGNALS_MAX:
                    raise BadRequest(f"over {_SIGNALS_MAX} signals in one session", hint="open a new session")
                session.signals.append(signal.Signals[f"SIG{frame.name}"])
            case ExecInputEnd():
                session.input_closed = True


def decode_frame(text: str, kind: Any) -> Any:
    """Decode a text frame.

    Raises:
        BadRequest: it is not a record of that kind, or a union of kinds.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"exec frame: {error}", hint="docs/api.md describes the frames") from error


def check_terminal_size(rows: int, cols: int) -> None:
    """Check the size of a terminal.

    Raises:
        BadRequest: no terminal has it.
    """
    if not (1 <= rows <= SIDE_MAX and 1 <= cols <= SIDE_MAX):
        raise BadRequest(f"invalid terminal size {rows} x {cols}", hint=f"use 1 to {SIDE_MAX} rows and columns")
