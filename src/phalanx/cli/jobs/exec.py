"""`phalanx exec` and `phalanx shell`: run a command next to a job's ranks, connected to this terminal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.connection import connect
from phalanx.cli.jobs.job_lookup import resolve_job
from phalanx.cli.terminal import terminal
from phalanx.core.errors import BadRequest, Conflict, PhalanxError

if TYPE_CHECKING:
    from phalanx.client import Client

_WAIT_S: Final = 20.0  # one long poll
_INPUT_BYTES: Final = 16_384
_SHELL: Final = ["/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i"]
_NODE_RANK = click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Which node of the job; default: the first.",
)


@click.command(name="exec", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("job", metavar="JOB")
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
    head = connect()
    return ExecSession(
        head, resolve_job(head, job), words, node_rank=node_rank, tty=interactive if tty is None else tty
    ).run()


@click.command()
@click.argument("job", metavar="JOB")
@_NODE_RANK
def shell(job: str, node_rank: int) -> int:
    """Open a shell in the environment of a job's ranks."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("shell needs a terminal", hint=f"run one command with phalanx exec {job} -- COMMAND")
    head = connect()
    return ExecSession(head, resolve_job(head, job), _SHELL, node_rank=node_rank, tty=True).run()


class ExecSession:
    """One command on a node. A thread sends the input, `run` prints the output; both count byte offsets."""

    def __init__(self, head: Client, job_id: str, argv: Sequence[str], *, node_rank: int, tty: bool) -> None:
        self._head = head
        self._tty = tty
        screen = terminal()
        self._name = head.exec(
            job_id, argv, tty=tty, rows=screen.height, cols=min(screen.width, 1000), node_rank=node_rank
        )
        self._resized = False

    def run(self) -> int:
        """Run until the command ends; return its exit code."""
        with _raw_terminal(self._tty), self._watching_size():
            threading.Thread(target=self._send_input, name="exec-input", daemon=True).start()
            return self._print_output()

    def _print_output(self) -> int:
        after = 0
        while True:
            self._send_size()
            reply = self._head.exec_output(self._name, after, wait_s=_WAIT_S)
            fresh = reply.data[max(0, after - (reply.end - len(reply.data))) :]
            if fresh:
                sys.stdout.buffer.write(fresh)
                sys.stdout.buffer.flush()
            after = reply.end
            if reply.done:
                if reply.error:
                    raise Conflict(reply.error, hint="see phalanx show for the state of the job")
                return 0 if reply.exit_code is None else reply.exit_code

    def _send_input(self) -> None:
        """Send the input until its end."""
        offset = 0
        try:
            while True:
                data = os.read(sys.stdin.fileno(), _INPUT_BYTES)
                offset = self._head.exec_input(self._name, offset, data, closed=not data)
                if not data:
                    return
        except (PhalanxError, OSError):
            return  # the command has ended or the head is unreachable: _print_output reports it

    @contextmanager
    def _watching_size(self) -> Iterator[None]:
        if not self._tty:
            yield
            return

        def changed(number: int, frame: object) -> None:
            del number, frame
            self._resized = True

        before = signal.signal(signal.SIGWINCH, changed)
        try:
            yield
        finally:
            signal.signal(signal.SIGWINCH, before)

    def _send_size(self) -> None:
        if self._resized:
            self._resized = False
            screen = terminal()
            self._head.exec_resize(self._name, screen.height, min(screen.width, 1000))


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
