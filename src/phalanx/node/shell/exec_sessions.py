"""Exec sessions: a command beside a job's ranks, in their environment, working directory and containment, connected to a user.

The command is a task of the member like a rank: it ends with the member and is killed with it. Two threads per session copy bytes, one
in each direction. With a terminal, the command opens it itself as session leader, so that it becomes its controlling terminal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pty
import select
import signal
import struct
import termios
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from phalanx.node.files.job_accounts import acting_as
from phalanx.node.head_link.channels import Backoff
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.logic.utf8 import replace_invalid_utf8
from phalanx.node.member.member_runtime import MemberRuntime, rank_task_id
from phalanx.node.member.rank_reports import make_fifo
from phalanx.node.processes.attempt_processes import TaskNotStarted, TaskSpec
from phalanx.wire import supervisor as wire

SESSIONS_MAX: Final = 32  # on a node; each costs two threads and a terminal
_TASK: Final = "exec-"
_PIPE_BYTES: Final = 1 << 20  # of 64 KiB otherwise: the command would wait for each request to the head
_POLL_S: Final = 20.0
_WRITE_S: Final = 0.5  # how long unread input may delay the next signal or the hang-up
_ASK_S: Final = 30.0  # the head delays its answer for up to 20 s while the user reads slowly
_AFTER_END_S: Final = 0.3  # for output of the command's background processes
_HANGUP_S: Final = 5.0  # from SIGHUP to SIGKILL after the user disconnected
_END_OF_TRANSMISSION: Final = b"\x04"
_POLL_OPENED_S: Final = 0.005
# The shell redirects the command's files: a terminal that a session leader opens becomes its controlling terminal.
_ON_TERMINAL: Final = 'at="$1"; shift; exec "$@" <"$at" >"$at" 2>&1'
_ON_PIPES: Final = 'at="$1"; shift; exec <"$at"; : >"$at.open"; exec "$@"'
_OPENED_WITHIN_S: Final = 10.0  # a shell opens its input in milliseconds; longer if the command is frozen meanwhile
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Session:
    order: wire.OpenExec
    member: MemberRuntime
    read_fd: int  # the command's output
    write_fd: int  # the user's input
    pid: int = 0
    exit_code: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)  # the command
    over: threading.Event = field(default_factory=threading.Event)  # the session


class ExecSessions:
    """All sessions of a supervisor. Calls may come from any thread."""

    def __init__(self, access: HeadAccess, ended: threading.Event) -> None:
        self._access = access
        self._ended = ended
        self._lock = threading.Lock()
        self._open: dict[str, _Session] = {}

    def open(self, order: wire.OpenExec, member: MemberRuntime | None) -> None:
        """Start the command, or report to the user why not. Blocks until it runs; called on a worker thread."""
        with self._lock:
            if order.session in self._open:
                return
            full = len(self._open) >= SESSIONS_MAX
        if member is None or member.processes is None or member.start is None or member.cancelled.is_set():
            self._refuse(order, f"job {order.job_id} has no running ranks on this node")
            return
        if full:
            self._refuse(order, f"{SESSIONS_MAX} exec sessions are open on this node; close one and try again")
            return
        try:
            session = self._start(order, member)
        except (TaskNotStarted, OSError) as error:
            self._refuse(order, str(error))
            return
        for name, run in (("output", self._pump_output), ("input", self._pump_input)):
            threading.Thread(target=run, args=(session,), name=f"exec-{name}", daemon=True).start()

    def task_ended(self, task: str, code: int | None, signal_number: int | None) -> bool:
        """Handle a task's end; True if it belonged to an exec session."""
        if not task.startswith(_TASK):
            return False
        with self._lock:
            session = self._open.get(task.removeprefix(_TASK))
        if session is not None:
            session.exit_code = code if code is not None else 128 + (signal_number or 9)
            session.ended.set()
        return True

    def _start(self, order: wire.OpenExec, member: MemberRuntime) -> _Session:
        assert member.processes is not None
        with acting_as(member.account):  # terminal and pipes must belong to the account
            if order.tty:
                read_fd, slave = pty.openpty()
                _resize(read_fd, order.rows, order.cols)
                stdin, script, output, write_fd = os.ttyname(slave), _ON_TERMINAL, slave, os.dup(read_fd)
            else:
                read_fd, output = os.pipe2(os.O_CLOEXEC)
                stdin = os.path.join(member.scratch.path, f"exec-{order.session}")
                # Open for reading too, so that neither side waits for the other to open it; closing it ends the user's input.
                script, write_fd = _ON_PIPES, make_fifo(stdin)
                for end in (read_fd, write_fd):
                    with contextlib.suppress(OSError):  # over the user's limit of pipe memory
                        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        session = _Session(order=order, member=member, read_fd=read_fd, write_fd=write_fd)
        with self._lock:
            self._open[order.session] = session
        environment = {**member.environment, "TERM": member.environment.get("TERM", "xterm-256color")}
        task = TaskSpec(
            task_id=f"{_TASK}{order.session}",
            command=("/bin/sh", "-c", script, "phalanx exec", stdin, *_argv(order, member)),
            cwd=member.workdir,
            env=environment,
            account=member.account,
            no_new_privileges=member.container is None,
        )
        try:
            session.pid = member.processes.spawn(task, output)
        except TaskNotStarted:
            self._close(session)
            os.close(read_fd)
            raise
        finally:
            os.close(output)
        return session

    # ------------------------------------------------------------------------------------------------------- the threads

    def _pump_output(self, session: _Session) -> None:
        """Copy from the command to the user, and finally its exit code."""
        connection, offset = HeadConnection(self._access), 0
        try:
            while not self._ended.is_set():
                data = _read(session)
                if data is None:
                    continue
                last = not data
                code = self._code(session) if last else None
                output = wire.ExecOutput(offset=offset, data=data, exit_code=code)
                if not self._deliver(connection, session.order.session, output) or last:
                    return
                offset += len(data)
        finally:
            self._close(session)
            os.close(session.read_fd)
            connection.close()

    def _pump_input(self, session: _Session) -> None:
        """Copy input and signals from the user to the command; a disconnected user hangs up the terminal."""
        connection, size = HeadConnection(self._access), (session.order.rows, session.order.cols)
        after, signals, closed, unwritten = 0, 0, False, b""
        backoff = Backoff(session.over)
        while not session.over.is_set() and not self._ended.is_set():
            unwritten = _write(session, unwritten)
            limit, wait_s = (0, 0.0) if unwritten else (wire.EXEC_CHUNK_BYTES_MAX, _POLL_S)
            path = (
                f"/v1/node/exec/{session.order.session}/input"
                f"?after={after}&limit={limit}&signals={signals}&closed={closed:d}&wait_s={wait_s:g}&packed=1"
            )
            try:
                typed = wire.unpack(connection.call("GET", path, timeout_s=_POLL_S + _ASK_S), wire.ExecInput)
            except RequestRejected:
                self._hang_up(session)
                break
            except (HeadUnavailable, RegistrationRequired, msgspec.MsgspecError) as error:
                _log.debug("exec %s: %s", session.order.session, error)
                backoff.pause()
                continue
            backoff.reset()
            if session.order.tty and (typed.rows, typed.cols) != size:
                size = (typed.rows, typed.cols)
                _resize(session.read_fd, *size)
            after += len(typed.data)
            unwritten += typed.data
            for number in typed.signals:
                self._signal(session, number)
            signals += len(typed.signals)
            if typed.closed and not unwritten and not closed:
                closed = True
                if session.order.tty:
                    _write(session, _END_OF_TRANSMISSION)
                self._await_opened(session)
                self._end_input(session)
        self._end_input(session)
        connection.close()

    def _deliver(self, connection: HeadConnection, name: str, output: wire.ExecOutput) -> bool:
        """Retry until the head has it; False if the head has closed the session."""
        backoff = Backoff(self._ended)
        while not self._ended.is_set():
            try:
                connection.call("POST", f"/v1/node/exec/{name}/output?packed=1", wire.pack(output), timeout_s=_ASK_S)
            except RequestRejected:
                return False
            except (HeadUnavailable, RegistrationRequired) as error:  # also "too much unread": the user reads slowly
                _log.debug("exec %s: %s", name, error)
                backoff.pause()
            else:
                return True
        return False

    # -------------------------------------------------------------------------------------------------------------- ends

    def _code(self, session: _Session) -> int:
        session.ended.wait(_HANGUP_S)
        return 137 if session.exit_code is None else session.exit_code

    def _hang_up(self, session: _Session) -> None:
        """The user disconnected: SIGHUP to the command's session, then SIGKILL if it is ignored."""
        for number in (signal.SIGHUP, signal.SIGKILL):
            self._signal(session, number)
            session.ended.wait(_HANGUP_S)

    def _signal(self, session: _Session, number: int) -> None:
        """Send a signal to the command and its children, unless it has ended."""
        if not session.ended.is_set():
            with contextlib.suppress(OSError):
                os.killpg(session.pid, number)

    def _end_input(self, session: _Session) -> None:
        """Close the input: on pipes the command reads end of file."""
        with self._lock:
            write_fd, session.write_fd = session.write_fd, -1
        if write_fd >= 0:
            os.close(write_fd)

    def _await_opened(self, session: _Session) -> None:
        """Wait until the command has opened its input: closed earlier, it would lose the input and wait for a writer forever."""
        opened = f"{_input_path(session)}.open"
        until_s = time.monotonic() + _OPENED_WITHIN_S
        while not session.order.tty and not os.path.exists(opened) and time.monotonic() < until_s:
            if session.ended.wait(_POLL_OPENED_S):
                return

    def _close(self, session: _Session) -> None:
        session.over.set()
        self._end_input(session)
        with self._lock:
            self._open.pop(session.order.session, None)
        if not session.order.tty:
            for path in (_input_path(session), f"{_input_path(session)}.open"):
                with contextlib.suppress(OSError), acting_as(session.member.account):
                    os.unlink(path)

    def _refuse(self, order: wire.OpenExec, why: str) -> None:
        """Report the refusal to the user, on a separate thread: the head may be unreachable."""
        output = wire.ExecOutput(offset=0, data=b"", exit_code=127, error=replace_invalid_utf8(why))
        connection = HeadConnection(self._access)
        threading.Thread(
            target=self._deliver, args=(connection, order.session, output), name="exec-refusal", daemon=True
        ).start()


def _argv(order: wire.OpenExec, member: MemberRuntime) -> tuple[str, ...]:
    """The command; for a member that runs in an image, wrapped to run beside its first rank there."""
    if member.container is None:
        return tuple(order.argv)
    return member.container.exec_command(rank_task_id(member.grant.first_rank), order.argv, terminal=order.tty)


def _input_path(session: _Session) -> str:
    return os.path.join(session.member.scratch.path, f"exec-{session.order.session}")


def _read(session: _Session) -> bytes | None:
    """Read the command's output; None for "nothing yet"; empty at its end."""
    wait_s = _AFTER_END_S if session.ended.is_set() else 1.0
    poll = select.poll()
    poll.register(session.read_fd, select.POLLIN | select.POLLHUP)
    if not poll.poll(wait_s * 1000):
        return b"" if session.ended.is_set() and wait_s == _AFTER_END_S else None
    try:
        return os.read(session.read_fd, wire.EXEC_CHUNK_BYTES_MAX)
    except OSError as error:
        if error.errno == errno.EIO:  # the last process closed the terminal
            return b""
        raise


def _write(session: _Session, data: bytes) -> bytes:
    """Write input for at most _WRITE_S; return what the command has not read yet. Input for a command that reads no more is dropped."""
    until_s = time.monotonic() + _WRITE_S
    while data and session.write_fd >= 0 and (left_s := until_s - time.monotonic()) > 0:
        try:
            data = data[os.write(session.write_fd, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(session.write_fd, select.POLLOUT)
            poll.poll(left_s * 1000)
        except OSError:
            return b""
    return data if session.write_fd >= 0 else b""


def _resize(terminal: int, rows: int, cols: int) -> None:
    with contextlib.suppress(OSError, struct.error):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
