"""This terminal as the input of an exec session: keys, its size and Ctrl-C, in raw mode if the session has a terminal too."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import Unreachable

if TYPE_CHECKING:
    from phalanx.client.exec_sessions import ExecConnection

_INPUT_BYTES: Final = 1 << 18
_SIDE_MAX: Final = 1000  # columns that the head accepts
_ROOM: Final = 0  # no signal: the head has accepted more input
_WAKE_BYTES: Final = 4096


def terminal_size() -> tuple[int, int]:
    """Return rows and columns of this terminal."""
    screen = terminal()
    return screen.height, min(screen.width, _SIDE_MAX)


def print_beside(text: str) -> None:
    """Print a line on a terminal in raw mode."""
    sys.stderr.write(f"\r\n[phalanx] {strip_control(text)}\r\n")
    sys.stderr.flush()


class InputSender:
    """A thread that sends the input, the terminal's size and Ctrl-C. Signals and acknowledgements wake it through a pipe."""

    def __init__(self, session: ExecConnection, *, tty: bool) -> None:
        self._session, self._tty = session, tty
        self._wake_fd, self._woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._interrupted = self._ended = False

    def __enter__(self) -> None:
        self._session.on_room = lambda: self._wake(_ROOM)
        number = signal.SIGWINCH if self._tty else signal.SIGINT
        before = signal.getsignal(number)
        self._before = number, before
        if before is not signal.SIG_IGN:  # nohup, or a job in the background of a script
            signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._run, name="exec-input", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        signal.signal(*self._before)
        self._ended = True
        self._wake(_ROOM)  # so that the next key is not read by a thread whose session is over
        self._thread.join()

    def _on_signal(self, number: int, frame: object) -> None:
        """Pass a signal to the thread; a second Ctrl-C leaves the command."""
        del frame
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self._wake(number)

    def _wake(self, number: int) -> None:
        try:
            os.write(self._woken_fd, bytes([number]))
        except BlockingIOError:
            pass  # the pipe is full of wake-ups

    def _run(self) -> None:
        try:
            self._send_input(self._session)
        except Unreachable:
            return  # the command has ended, or the main thread reports why the connection broke

    def _send_input(self, session: ExecConnection) -> None:
        stdin = None if sys.stdin is None else sys.stdin.fileno()
        if stdin is None:
            session.end_input()
        while True:
            waiting = [self._wake_fd] if stdin is None or session.room <= 0 else [self._wake_fd, stdin]
            ready, _, _ = select.select(waiting, [], [])
            if self._ended:
                return
            if self._wake_fd in ready:
                for number in os.read(self._wake_fd, _WAKE_BYTES):
                    self._forward(number)
            if stdin in ready:
                data = _read_input(stdin, min(session.room, _INPUT_BYTES))
                if data:
                    session.write(data)
                else:
                    stdin = None
                    session.end_input()

    def _forward(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._session.resize(*terminal_size())
        elif number == signal.SIGINT:
            self._session.signal("INT")


def _read_input(stdin: int, limit: int) -> bytes:
    """Read some input; empty at its end, or if it cannot be read."""
    try:
        return os.read(stdin, limit)
    except OSError:
        return b""


@contextmanager
def raw_terminal(wanted: bool) -> Iterator[None]:
    """Pass every key to the command, Ctrl-C too; always restore the terminal."""
    if not wanted or not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
