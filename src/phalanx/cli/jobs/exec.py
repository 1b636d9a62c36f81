"""`phalanx exec` and `phalanx shell`: run a command next to a job's ranks, connected to this terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.command_groups import split_options
from phalanx.cli.completion import JOB_ARGUMENT
from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.terminal import strip_control, terminal
from phalanx.core.errors import BadRequest, Unreachable

if TYPE_CHECKING:
    from phalanx.client.exec_sessions import ExecConnection

_INPUT_BYTES: Final = 1 << 18
_SIDE_MAX: Final = 1000  # columns that the head accepts
_ROOM: Final = 0  # no signal: the head has accepted more input
_WAKE_BYTES: Final = 4096
_SHELL: Final = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"]
_NODE_RANK = click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Which node of the job; default: the first.",
)


class ExecCommand(click.Command):
    """A command whose options may stand before or behind JOB. Everything from the command to run on is left to it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the options that stand behind JOB before it, then parse."""
        before, rest = split_options(self, ctx, args)
        behind, command = split_options(self, ctx, rest[1:])
        return super().parse_args(ctx, [*before, *behind, *rest[:1], *command])


@click.command(name="exec", cls=ExecCommand, context_settings={"allow_interspersed_args": False})
@JOB_ARGUMENT
@click.argument("command", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@_NODE_RANK
@click.option(
    "-t", "--tty/--no-tty", default=None, help="Allocate a terminal; default: if stdin and stdout are terminals."
)
def exec_(job: str, command: tuple[str, ...], node_rank: int, tty: bool | None) -> int:
    """Run a command in the environment of a job's ranks, and exit with its exit code."""
    words = command[1:] if command[:1] == ("--",) else command
    if not words:
        raise BadRequest("the command is missing", hint=f"phalanx exec {job} -- nvidia-smi")
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    return run_command(job, words, node_rank=node_rank, tty=interactive if tty is None else tty)


@click.command()
@JOB_ARGUMENT
@_NODE_RANK
def shell(job: str, node_rank: int) -> int:
    """Open a shell in the environment of a job's ranks."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("shell needs a terminal", hint=f"run one command with phalanx exec {job} -- COMMAND")
    return run_command(job, _SHELL, node_rank=node_rank, tty=True)


def run_command(job: str, argv: Sequence[str], *, node_rank: int, tty: bool) -> int:
    """Run a command connected to this terminal; return its exit code."""
    head, screen = connect(), terminal()
    size = (screen.height, min(screen.width, _SIDE_MAX))
    job_id = resolve_job(head, job)
    if tty and head.job(job_id).job.idle_s is not None:
        from phalanx.cli.jobs.idle_notices import print_idle_notices

        print_idle_notices(job_id, _print_beside)
    with (
        head.exec(job_id, argv, tty=tty, rows=size[0], cols=size[1], node_rank=node_rank) as session,
        _raw_terminal(tty),
        InputSender(session, tty=tty),
    ):
        while (data := session.read()) is not None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    return session.exit_code or 0


def _print_beside(text: str) -> None:
    """Print a line on a terminal in raw mode."""
    sys.stderr.write(f"\r\n[phalanx] {strip_control(text)}\r\n")
    sys.stderr.flush()


class InputSender:
    """A thread that sends the input, the terminal's size and Ctrl-C. Signals and acknowledgements wake it through a pipe."""

    def __init__(self, session: ExecConnection, *, tty: bool) -> None:
        self._session, self._tty = session, tty
        self._wake_fd, self._woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._interrupted = False

    def __enter__(self) -> None:
        self._session.on_room = lambda: self._wake(_ROOM)
        number = signal.SIGWINCH if self._tty else signal.SIGINT
        before = signal.getsignal(number)
        self._before = number, before
        if before is not signal.SIG_IGN:  # nohup, or a job in the background of a script
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._run, name="exec-input", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        signal.signal(*self._before)

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
            screen = terminal()
            self._session.resize(screen.height, min(screen.width, _SIDE_MAX))
        elif number == signal.SIGINT:
            self._session.signal("INT")


def _read_input(stdin: int, limit: int) -> bytes:
    """Read some input; empty at its end, or if it cannot be read."""
    try:
        return os.read(stdin, limit)
    except OSError:
        return b""


@contextmanager
def _raw_terminal(wanted: bool) -> Iterator[None]:
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
