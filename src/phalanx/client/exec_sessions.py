"""Commands that run next to a job's ranks: a WebSocket with bytes in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from phalanx.client.api_calls import ApiCalls, LazyModule, path_segment
from phalanx.client.connection.transport import Transport, error_from_reply
from phalanx.core.errors import Unreachable
from phalanx.core.hints import Hint, HintCode

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

    from phalanx.wire.api import execs as api
else:
    api = LazyModule("phalanx.wire.api.execs")

_ACKS_PER_WINDOW: Final = 4


class ExecApi(ApiCalls):
    """Start a command in a job."""

    def exec(
        self, job_id: str, argv: Sequence[str], *, tty: bool = False, rows: int = 24, cols: int = 80, node_rank: int = 0
    ) -> ExecConnection:
        """Start a command next to a job's ranks; use the result as a context manager.

        Raises:
            PhalanxError: the head refused it, or cannot be reached.
        """
        body = api.ExecBody(argv=list(argv), tty=tty, rows=rows, cols=cols, node_rank=node_rank)
        return ExecConnection(self.transport, f"/v1/jobs/{path_segment(job_id)}/exec", body)


class ExecConnection:
    """A command's input and output. One thread may read while another one writes.

    Attributes:
        exit_code: the command's, once `read` has returned None.
        on_room: called by the reading thread when the head has accepted more input.
    """

    def __init__(self, transport: Transport, path: str, body: api.ExecBody) -> None:
        self.exit_code: int | None = None
        self.on_room: Callable[[], None] = lambda: None
        self._socket: ClientConnection = transport.websocket(path)
        self._url = transport.url()
        self._sent = self._accepted = self._received = self._acknowledged = 0
        self._window_bytes = 0
        try:
            self._send(body)
            opened = self._receive()
        except BaseException:
            self.close()
            raise
        assert isinstance(opened, api.ExecOpened), "the head answers a command with `opened` or an error"
        self._window_bytes = opened.window_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def room(self) -> int:
        """How many bytes of input may be written now."""
        return self._window_bytes - (self._sent - self._accepted)

    def read(self) -> bytes | None:
        """Return the next output; None once the command has ended. The call states that the output before it was handled.

        Raises:
            PhalanxError: the command was not started, the session was ended, or the connection broke.
        """
        if self._received - self._acknowledged >= self._window_bytes // _ACKS_PER_WINDOW:
            self._acknowledged = self._received
            with contextlib.suppress(Unreachable):  # it ends; what it has sent can still be read
                self._send(api.ExecAck(offset=self._received))
        while True:
            frame = self._receive()
            if isinstance(frame, bytes):
                self._received += len(frame)
                return frame
            if isinstance(frame, api.ExecExit):
                self.exit_code = frame.exit_code
                return None
            if isinstance(frame, api.ExecAck):
                self._accepted = frame.offset
                self.on_room()

    def write(self, data: bytes) -> None:
        """Send input: at most `room` bytes. Raises Unreachable once the session has ended."""
        self._sent += len(data)
        self._send(data)

    def end_input(self) -> None:
        """Send the end of the input."""
        self._send(api.ExecInputEnd())

    def resize(self, rows: int, cols: int) -> None:
        """Send the new size of the terminal."""
        self._send(api.ExecResize(rows=rows, cols=cols))

    def signal(self, name: Literal["HUP", "INT", "QUIT", "TERM"]) -> None:
        """Send a signal to the command and its children."""
        self._send(api.ExecSignal(name=name))

    def close(self) -> None:
        """Close the session; a command that still runs receives SIGHUP."""
        self._socket.close()

    def _send(self, frame: Any) -> None:
        import msgspec
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(frame if isinstance(frame, bytes) else msgspec.json.encode(frame).decode())
        except ConnectionClosed as error:
            raise self._broken() from error

    def _receive(self) -> bytes | api.HeadFrame:
        import msgspec
        from websockets.exceptions import ConnectionClosed

        try:
            message = self._socket.recv()
        except ConnectionClosed as error:
            raise self._broken() from error
        if isinstance(message, bytes):
            return message
        frame: api.HeadFrame = msgspec.json.decode(message, type=api.HeadFrame)
        if isinstance(frame, api.ExecFailed):
            raise error_from_reply(0, message.encode(), "exec")
        return frame

    def _broken(self) -> Unreachable:
        return Unreachable(
            f"the connection to the head at {self._url} broke; the command receives SIGHUP",
            hint=Hint(HintCode.CHECK_HEAD),
        )
