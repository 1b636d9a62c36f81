"""`python -m phalanx.node.terminal.host_main SOCKET COMMAND...`: runs a job's first rank on a terminal that outlives its clients.

Clients connect to a Unix socket and see the newest output, then everything that follows. Any number may be connected: they share input,
and the size is that of the last one that sent one. Output also goes to standard output, which is the log of the rank. Standard library only.

A frame is its kind (1 byte), the number of its bytes (4, big endian), and the bytes. From clients: INPUT, and SIZE (rows, columns); to them:
OUTPUT, and EXIT (code).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import selectors
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import Final

INPUT, SIZE, OUTPUT, EXIT = range(4)
HEADER: Final = struct.Struct(">BI")
SIZE_FIELDS: Final = struct.Struct(">HH")
KEPT_BYTES: Final = 1 << 18  # of the newest output, for clients that come back: some screens of text
_UNSENT_MAX: Final = 1 << 20  # for one client, past which the program has to wait for it
_STALLED_S: Final = 3.0  # a client that reads nothing for so long meanwhile is dropped
_INPUT_MAX: Final = 1 << 20  # unread input, past which no more is read from clients
_FRAME_MAX: Final = 1 << 20
_CLIENTS_MAX: Final = 16
_PIECE: Final = 1 << 16
_FIRST_CLIENT_S: Final = (
    5.0  # how long the program waits for a client, so that its first output finds the size of a terminal
)
_END: Final = -1
_TICK_S: Final = 0.1  # between two looks after SIGTERM
_LINGER_S: Final = 1.0  # for clients to read the last output
_CLEAR: Final = b"\x1b[0m\x1b[H\x1b[2J"


class _Client:
    """A connection. `begun`: it has sent its size, and so gets output."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unread, self.unsent = bytearray(), bytearray()
        self.begun = False
        self.watched = 0  # for which of its events the selector waits
        self.moved_s = 0.0  # when it last read something, or had read everything

    @property
    def behind(self) -> bool:
        """Whether the program has to wait for it."""
        return len(self.unsent) > _UNSENT_MAX


class TerminalHost:
    """The terminal, its program, and the clients."""

    def __init__(self, path: str, command: list[str]) -> None:
        self._command = command
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._kept, self._input = bytearray(), bytearray()
        self._master, self._pid = -1, 0
        self._size = 24, 80
        self._watched = 0  # for which events of the terminal the selector waits
        self._ended = False  # no process has the terminal open any longer
        self._stops: list[int] = []
        self._listener = _listen(path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)

    def run(self) -> int:
        """Run the program; return its exit code, or minus the signal that ended it."""
        until_s = time.monotonic() + _FIRST_CLIENT_S
        while not any(client.begun for client in self._clients) and not self._stops:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._step(left_s)
        if self._stops:
            return -signal.SIGTERM
        self._start()
        code = None
        while code is None:
            self._step(_TICK_S if self._stops else None)
            if self._stops:
                self._hang_up()
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
        self._close_terminal()
        while self._read() > 0:  # its background processes may still have the terminal open
            pass
        for client in list(self._clients):
            self._queue(client, EXIT, struct.pack(">i", code))
        until_s = time.monotonic() + _LINGER_S
        while any(client.unsent for client in self._clients) and (left_s := until_s - time.monotonic()) > 0:
            self._step(left_s)
        return code

    def _step(self, timeout_s: float | None) -> None:
        for client in [one for one in self._clients if one.behind and time.monotonic() - one.moved_s > _STALLED_S]:
            self._drop(client)
        waits = any(client.behind for client in self._clients)
        self._watch_terminal((0 if waits else selectors.EVENT_READ) | (selectors.EVENT_WRITE if self._input else 0))
        for key, mask in self._selector.select(min(timeout_s or _STALLED_S, _STALLED_S) if waits else timeout_s):
            key.data(mask)

    def _start(self) -> None:
        """Start the program as leader of a session whose terminal this is."""
        rows, cols = self._size
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            _resize(0, rows, cols)
            try:
                os.execvp(self._command[0], self._command)  # noqa: S606 - the words of the job, as given
            except OSError as error:
                os.write(2, f"{self._command[0]}: {error.strerror}\n".encode(errors="backslashreplace"))
                os._exit(126 if isinstance(error, PermissionError) else 127)
        os.set_blocking(self._master, False)

    # ---- the terminal -------------------------------------------------------------------------------------------------

    def _use_terminal(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            full = len(self._input) >= _INPUT_MAX
            with contextlib.suppress(OSError):
                del self._input[: os.write(self._master, self._input[:_PIECE])]
            if full and len(self._input) < _INPUT_MAX:
                for client in self._clients:
                    self._watch(client)
        if mask & selectors.EVENT_READ and self._read() == _END:
            self._close_terminal()

    def _close_terminal(self) -> None:
        self._watch_terminal(0)
        self._ended = True

    def _watch_terminal(self, events: int) -> None:
        """Wait for these events of the terminal from now on."""
        if self._master >= 0 and not self._ended:
            self._select(self._master, self._watched, events, self._use_terminal)
            self._watched = events

    def _select(self, where: int | socket.socket, before: int, events: int, use: Callable[[int], None]) -> None:
        """Wait for other events of a file; a selector knows no file without events."""
        if events == before:
            return
        if before:
            self._selector.unregister(where)
        if events:
            self._selector.register(where, events, use)

    def _read(self) -> int:
        """Read some output; return the number of its bytes, 0 for none now, and _END at its end."""
        try:
            data = os.read(self._master, _PIECE)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: no process has the terminal open
            return _END
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        _write_all(1, data)
        for client in list(self._clients):
            if client.begun:
                self._queue(client, OUTPUT, data)
        return len(data) or _END

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _on_stop(self, number: int, _frame: object) -> None:
        self._stops.append(number)
        if self._pid:
            with contextlib.suppress(OSError):
                os.kill(self._pid, number)

    def _hang_up(self) -> None:
        """After SIGTERM, which a shell at its prompt ignores: hang up, but not while a program of it still saves."""
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(self._master) == os.getpgid(self._pid) and _ignores_sigterm(self._pid):
                os.kill(self._pid, signal.SIGHUP)
                os.kill(self._pid, signal.SIGCONT)

    # ---- clients ------------------------------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        connection, _ = self._listener.accept()
        if len(self._clients) >= _CLIENTS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection)
        self._clients.append(client)
        self._watch(client)

    def _use_client(self, client: _Client, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                del client.unsent[: client.connection.send(client.unsent)]
                client.moved_s = time.monotonic()
            if mask & selectors.EVENT_READ:
                data = client.connection.recv(_PIECE)
                if not data:
                    raise ConnectionResetError
                client.unread += data
                self._handle(client)
        except BlockingIOError:
            pass
        except (OSError, struct.error):
            self._drop(client)
            return
        self._watch(client)

    def _handle(self, client: _Client) -> None:
        """Handle all whole frames.

        Raises:
            ConnectionResetError: an invalid frame.
        """
        while len(client.unread) >= HEADER.size:
            kind, size = HEADER.unpack_from(client.unread)
            if kind not in (INPUT, SIZE) or size > _FRAME_MAX:
                raise ConnectionResetError
            if len(client.unread) < HEADER.size + size:
                return
            body = bytes(client.unread[HEADER.size : HEADER.size + size])
            del client.unread[: HEADER.size + size]
            if kind == INPUT:
                self._input += body
            else:
                self._set_size(client, *SIZE_FIELDS.unpack(body))

    def _set_size(self, client: _Client, rows: int, cols: int) -> None:
        self._size = rows, cols
        if not client.begun:
            client.begun = True
            if self._kept:
                self._queue(client, OUTPUT, _CLEAR + bytes(self._kept))
            if self._master >= 0:
                _resize(self._master, max(1, rows - 1), cols)  # another size, so that full-screen programs draw again
        if self._master >= 0:
            _resize(self._master, rows, cols)

    def _queue(self, client: _Client, kind: int, data: bytes) -> None:
        if not client.unsent:
            client.moved_s = time.monotonic()
        client.unsent += HEADER.pack(kind, len(data)) + data
        self._watch(client)

    def _watch(self, client: _Client) -> None:
        if client in self._clients:
            reads = len(self._input) < _INPUT_MAX
            events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if client.unsent else 0)
            self._select(client.connection, client.watched, events, lambda mask: self._use_client(client, mask))
            client.watched = events

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._select(client.connection, client.watched, 0, self._drain)
            client.connection.close()

    def _drain(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, _PIECE)


def socket_address(folder_fd: int, name: str) -> str:
    """The address of a socket in a folder: shorter than its path, which may exceed the limit of 107 bytes."""
    return f"/proc/self/fd/{folder_fd}/{name}"


def _listen(path: str) -> socket.socket:
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o177)  # only the job's account may connect
    try:
        listener.bind(socket_address(fd, name))
    finally:
        os.umask(before)
        os.close(fd)
    listener.listen(_CLIENTS_MAX)
    listener.setblocking(False)
    return listener


def _resize(terminal: int, rows: int, cols: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        pass  # the log is gone; the program goes on


def _ignores_sigterm(pid: int) -> bool:
    """Whether a process ignores SIGTERM, or handles it as a shell at its prompt does, which then waits for more input."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) & (1 << (signal.SIGTERM - 1)))
    return False


def main() -> int:
    """Run the program; end as it ended."""
    code = TerminalHost(sys.argv[1], sys.argv[2:]).run()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
