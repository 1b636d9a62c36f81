"""Ports of a job, reached from this machine: local listeners whose connections travel over one exec session to a relay in the job."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from phalanx.core.errors import BadRequest, Conflict, PhalanxError, TryLater, Unreachable
from phalanx.core.hints import Hint, HintCode
from phalanx.wire import stream_relay

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.exec_sessions import ExecConnection

_PIECE_BYTES: Final = 1 << 18
_AGAIN_S: Final = 0.5
_GIVE_UP_S: Final = 120.0  # a head restarts in seconds; its nodes register again within a lease
_GREETING_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedPort:
    """A port of this machine, and the one of the job's node that it leads to. `local` may be 0 for any free one."""

    local: int
    remote: int
    address: str = "127.0.0.1"


class _ClientRelay(stream_relay.StreamRelay):
    def __init__(
        self, read_fd: int, write_fd: int, listeners: dict[socket.socket, int], on_refused: Callable[[int], None]
    ) -> None:
        super().__init__(read_fd, write_fd)
        self._ports: dict[int, int] = {}
        self._on_refused = on_refused
        for listener, port in listeners.items():
            self.watch(listener, selectors.EVENT_READ, functools.partial(self._on_connection, listener, port))

    def _on_connection(self, listener: socket.socket, port: int, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = listener.accept()
            self.accept(connection, port)
            self._ports[self._last] = port

    def refused(self, stream: stream_relay.RelayStream, error: int) -> None:
        if error == errno.ECONNREFUSED:
            self._on_refused(self._ports.get(stream.number, 0))


class PortForward:
    """Listeners on this machine. `run` carries their connections until the job ends or `close` is called.

    Args:
        client: to the head.
        job_id: a running job.
        ports: what leads where.
        node_rank: which node of the job.
        on_refused: called with a port of the job on which nothing listens.
        on_broken: called when connections broke, with why, before the next try.

    Raises:
        BadRequest: a local port is taken.
    """

    def __init__(
        self,
        client: Client,
        job_id: str,
        ports: Sequence[ForwardedPort],
        *,
        node_rank: int = 0,
        on_refused: Callable[[int], None] = lambda _: None,
        on_broken: Callable[[PhalanxError], None] = lambda _: None,
    ) -> None:
        self._client, self._job_id, self._node_rank = client, job_id, node_rank
        self._on_refused, self._on_broken = on_refused, on_broken
        self._listeners: dict[socket.socket, int] = {}
        self._closed = threading.Event()
        self._session: ExecConnection | None = None
        try:
            for port in ports:
                self._listeners[_listen(port)] = port.remote
        except BaseException:
            self._close_listeners()
            raise

    def bound(self) -> list[tuple[int, int]]:
        """Return the local and remote ports."""
        return [(listener.getsockname()[1], port) for listener, port in self._listeners.items()]

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Carry connections; after a break to the head, new ones again. `on_ready` is called each time that the relay runs.

        Raises:
            PhalanxError: the job does not run, or has no Python, or the head stays away.
        """
        broken_s = None
        try:
            while not self._closed.is_set():
                try:
                    self._run_session(on_ready)
                    return
                except (Unreachable, TryLater) as error:
                    now_s = time.monotonic()
                    broken_s = now_s if broken_s is None or self._session is not None else broken_s
                    if self._session is None and now_s - broken_s > _GIVE_UP_S:
                        raise
                    if self._session is not None:
                        self._on_broken(error)
                    self._session = None
                    self._closed.wait(_AGAIN_S)
                except Conflict as error:
                    gone = None if broken_s is None else self._gone()
                    raise gone or error from None
        finally:
            self._close_listeners()

    def close(self) -> None:
        """End all connections and listeners; from any thread."""
        self._closed.set()
        if self._session is not None:
            self._session.close()

    def _run_session(self, on_ready: Callable[[], None]) -> None:
        with self._client.exec(self._job_id, stream_relay.relay_command(), node_rank=self._node_rank) as session:
            first = _await_greeting(session, self._job_id)
            self._session = session
            here, there = socket.socketpair()
            errors: list[PhalanxError] = []
            with here, there:
                for end in (here, there):
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                        end.setsockopt(socket.SOL_SOCKET, option, _PIECE_BYTES * 2)
                threads = [
                    threading.Thread(target=_receive, args=(session, there, first, errors), daemon=True),
                    threading.Thread(target=_send, args=(session, there, errors), daemon=True),
                ]
                for thread in threads:
                    thread.start()
                on_ready()
                try:
                    _ClientRelay(here.fileno(), here.fileno(), self._listeners, self._on_refused).run()
                finally:
                    with contextlib.suppress(OSError):
                        here.shutdown(socket.SHUT_RDWR)
                    session.close()
                    for thread in threads:
                        thread.join()
            if self._closed.is_set():
                return
            if errors and isinstance(errors[0], Unreachable):
                raise Unreachable(f"the connection to the head at {self._client.transport.url()} broke")
            if errors and isinstance(errors[0], TryLater):
                raise errors[0]
            # The head stopped, the attempt was restarted, or the job ends.
            raise self._gone() or Unreachable(errors[0].message if errors else "the relay in the job ended")

    def _gone(self) -> Conflict | None:
        """Return the error of a job whose ports are gone; None while it runs."""
        job = self._client.job(self._job_id).job
        if job.state == "running" and job.attempt_state != "stopping":
            return None
        now = "stopping" if job.state == "running" else job.state
        return Conflict(
            f"job {self._job_id} is {now}; its ports are gone with it", hint=Hint(HintCode.SHOW_JOB, job=self._job_id)
        )

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()


def _listen(port: ForwardedPort) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in port.address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((port.address, port.local))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BadRequest(
            f"port {port.local} of this machine: {os.strerror(error.errno or 0)}",
            hint=f"write another one before the colon, or 0:{port.remote} for any free one",
        ) from error
    return listener


def _await_greeting(session: ExecConnection, job_id: str) -> bytes:
    """Return what came after the greeting.

    Raises:
        Conflict: the relay did not start.
    """
    seen = b""
    while len(seen) < _GREETING_BYTES_MAX and (data := session.read()) is not None:
        seen += data
        before, found, rest = seen.partition(stream_relay.GREETING)
        if found and not before:
            return rest
    why = seen.decode(errors="replace").strip() or f"it ended with code {session.exit_code}"
    raise Conflict(f"the relay of ports did not start in job {job_id}: {why}", hint="its image or node needs Python 3")


def _receive(session: ExecConnection, channel: socket.socket, first: bytes, errors: list[PhalanxError]) -> None:
    data: bytes | None = first
    try:
        while data is not None:
            channel.sendall(data)
            data = session.read()
    except PhalanxError as error:
        errors.append(error)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)


def _send(session: ExecConnection, channel: socket.socket, errors: list[PhalanxError]) -> None:
    room = threading.Event()
    session.on_room = room.set
    try:
        while data := channel.recv(_PIECE_BYTES):
            while data:
                room.clear()
                if session.room <= 0:
                    if room.wait(1.0) is False and errors:
                        return
                    continue
                piece, data = data[: session.room], data[session.room :]
                session.write(piece)
    except (PhalanxError, OSError):
        return  # the reading thread has the reason
