"""Attaches this terminal to that of a job's first rank, and again after the connection broke; the program there goes on meanwhile."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

from phalanx.cli.connection import FOLLOW_PATIENCE_S, connect
from phalanx.cli.jobs.job_end import end_summary, exit_code
from phalanx.cli.jobs.job_follower import StatePrinter, StatusLine
from phalanx.cli.sessions.session_input import InputSender, print_beside, raw_terminal, terminal_size
from phalanx.client import terminal_relay
from phalanx.core.errors import BadRequest, Conflict, TryLater, Unreachable
from phalanx.core.work.states import AttemptState, JobState

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.client.exec_sessions import ExecConnection

_RELAY: Final = (
    'p=$(command -v python3 || command -v python) || { echo "the job has no Python, which its terminal needs"; exit 127; }; '
    'exec "$p" -S -E -c "$1"'
)
_AGAIN_S: Final = 0.5
_ENDS_WITHIN_S: Final = 10.0  # of the job, once its program has ended
_DETACHED: Final = 0


def attach_terminal(head: Client, job_id: str, *, idles: bool) -> int:
    """Wait until the job runs, attach to its terminal, and return the exit code of the job, or 0 after the user has detached."""
    check_terminal(job_id)
    try:
        await_running(job_id)
        if idles:
            from phalanx.cli.jobs.idle_notices import print_idle_notices

            print_idle_notices(job_id, print_beside)
        detached = _attach(head, job_id)
    except KeyboardInterrupt:  # while it waits, or is not connected
        detached = True
    if detached:
        print(f"\r\ndetached, job {job_id} continues; next: phalanx shell {job_id}", file=sys.stderr, flush=True)
        return _DETACHED
    return _end(head, job_id)


def check_terminal(job_id: str = "JOB") -> None:
    """Check that this is a terminal.

    Raises:
        BadRequest: it is not.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest(
            "standard input and output are no terminal", hint=f"run one command with phalanx exec {job_id} -- COMMAND"
        )


def await_running(job_id: str) -> None:
    """Show the states of a job until its ranks run, or it has ended."""
    status = StatusLine()
    printer = StatePrinter(status)
    head = connect(FOLLOW_PATIENCE_S)
    try:
        for event in head.follow_events(job_id):
            if event.kind == "state":
                if (event.fields["state"], event.fields.get("attempt_state")) == (
                    JobState.RUNNING,
                    AttemptState.RUNNING,
                ):
                    return
                printer.show(event.fields, head, job_id)
    finally:
        status.clear()


def _attach(head: Client, job_id: str) -> bool:
    """Carry the terminal until the program ends; True if the user has detached."""
    with open(terminal_relay.__file__, encoding="utf-8") as file:
        argv = ["/bin/sh", "-c", _RELAY, "phalanx", file.read()]
    broken_s: float | None = None
    while True:
        rows, cols = terminal_size()
        try:
            with head.exec(job_id, argv, tty=True, rows=rows, cols=cols) as session, raw_terminal(True):
                broken_s = None
                tail = _carry(session)
                code = session.exit_code or 0
            if code == terminal_relay.DETACHED_CODE and tail == terminal_relay.DETACHED:
                return True
            if code != terminal_relay.LOST_CODE:
                return False
            raise TryLater("the node ended the session")
        except (
            Conflict,
            Unreachable,
            TryLater,
        ) as error:  # Conflict: the head stopped, or the job has ended or is stopping
            with contextlib.suppress(Unreachable, TryLater):
                if not isinstance(error, Unreachable) and not _runs(head, job_id):
                    return False
            now_s = time.monotonic()
            if broken_s is None:
                broken_s = now_s
                why = "the connection to the head broke" if isinstance(error, Unreachable) else error.message
                print(
                    f"\r\n[phalanx] {why}; the session stays; connecting again (Ctrl-C leaves)",
                    file=sys.stderr,
                    flush=True,
                )
            if now_s - broken_s > FOLLOW_PATIENCE_S:
                raise
            time.sleep(_AGAIN_S)


def _carry(session: ExecConnection) -> bytes:
    """Copy output until the session ends; return the mark that its last bytes are, which is not printed."""
    mark, held = terminal_relay.DETACHED, b""
    with InputSender(session, tty=True):
        while (data := session.read()) is not None:
            data = held + data
            held = mark if data.endswith(mark) else b""
            sys.stdout.buffer.write(data.removesuffix(held))
            sys.stdout.buffer.flush()
    return held


def _runs(head: Client, job_id: str) -> bool:
    job = head.job(job_id).job
    return job.state is JobState.RUNNING and job.attempt_state is AttemptState.RUNNING


def _end(head: Client, job_id: str) -> int:
    """Print how the job ended, which it does shortly after its program; return its exit code."""
    until_s = time.monotonic() + _ENDS_WITHIN_S
    while not (job := head.job(job_id).job).state.terminal and time.monotonic() < until_s:
        if job.state is JobState.PENDING:
            what = "is parked" if job.parked_s is not None else "waits again"
            print(f"\r\njob {job_id} {what}: {job.detail}; next: phalanx show {job_id}", file=sys.stderr)
            return 0
        time.sleep(0.05)
    print(f"\r\n{end_summary(job)}", file=sys.stderr, flush=True)
    return exit_code(job.state, job.exit_code)
