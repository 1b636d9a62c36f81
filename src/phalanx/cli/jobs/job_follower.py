"""Follows a job: output on standard output, states on standard error, until the job ends or the user detaches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec

from phalanx.cli.cells import wait_text
from phalanx.cli.connection import connect
from phalanx.cli.jobs.grants_note import grants_note
from phalanx.cli.jobs.job_end import end_summary, exit_code
from phalanx.cli.jobs.log_printer import LogPrinter
from phalanx.cli.terminal import strip_control, terminal, truncate
from phalanx.core.accounting.advice.evidence import JUDGED_MIN_S
from phalanx.core.errors import PhalanxError
from phalanx.core.work.attempt import AttemptState
from phalanx.core.work.job import JobState
from phalanx.wire.api.jobs import JobView
from phalanx.wire.api.output import EndEvent, StateEvent

if TYPE_CHECKING:
    from phalanx.client import Client

ADVICE_LIMIT_S: Final = 10.0  # that a run waits for advice after its job; then it ends without


class StatusLine:
    """A status line on standard error: updated in place on a terminal, else printed when it changes."""

    def __init__(self) -> None:
        self._screen = terminal(sys.stderr)
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        text = strip_control(text)
        if text == self._shown:
            return
        if self._screen.interactive:
            sys.stderr.write("\r\x1b[K" + self._screen.paint(truncate(text, self._screen.width - 1), "dim"))
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
        self._shown = text

    def clear(self) -> None:
        """Remove the line, so that other text can be printed."""
        if self._shown and self._screen.interactive:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._shown = ""

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.clear()
        print(self._screen.paint(strip_control(text), "dim"), file=sys.stderr, flush=True)


def follow_job(
    head: Client, job_id: str, *, rank: str | None, cursor: str = "", tasks: int | None = None, idles: bool = False
) -> int:
    """Stream the output until the job ends; return its exit code. KeyboardInterrupt is left to the caller: see `leaving`.

    Args:
        head: client.
        job_id: the job.
        rank: "3", "all", or None for all, with a prefix only if there is more than one task.
        cursor: resume after this; "" is the start.
        tasks: number of tasks, if known.
        idles: it has an idle limit, whose warnings are printed.
    """
    status = StatusLine()
    output = LogPrinter(prefix=rank == "all" or (rank is None and tasks != 1))
    if idles:
        from phalanx.cli.jobs.idle_notices import print_idle_notices

        print_idle_notices(job_id, status.say)
    try:
        return _stream(head, job_id, rank=rank or "all", cursor=cursor, output=output, status=status)
    finally:  # also after an error or Ctrl-C
        output.finish()
        status.clear()


def _stream(head: Client, job_id: str, *, rank: str, cursor: str, output: LogPrinter, status: StatusLine) -> int:
    printer = StatePrinter(status)
    for event in head.follow_logs(job_id, rank=rank, cursor=cursor):
        match event.kind:
            case "log":
                status.clear()
                output.write(event.fields["epoch"], event.fields["stream"], event.fields["text"])
                output.flush()
            case "state":
                printer.show(msgspec.convert(event.fields, StateEvent), head, job_id)
            case "end":
                output.finish()
                status.clear()
                return _end(head, job_id, msgspec.convert(event.fields, EndEvent))
            case _:  # event kinds of later releases
                pass
    return _end(head, job_id, None)


class StatePrinter:
    """Prints each state of the job once."""

    def __init__(self, status: StatusLine) -> None:
        self._status = status
        self._placed: tuple[int, int] | None = None

    def show(self, event: StateEvent, head: Client, job_id: str) -> None:
        """Print a state, unless it was printed last."""
        if event.state is JobState.PENDING:
            self._status.show(f"waiting: {wait_text(event.reason, event.detail) or 'not scheduled yet'}")
        elif event.state is JobState.RUNNING and event.attempt_state is AttemptState.RUNNING:
            started = (event.epoch, event.generation)
            if self._placed != started:
                self._placed = started
                self._show_placement(event, head, job_id)
        elif event.state is JobState.RUNNING and event.attempt_state is not None:
            self._status.show(f"{event.attempt_state} on {', '.join(event.nodes)}")

    def _show_placement(self, event: StateEvent, head: Client, job_id: str) -> None:
        attempts = head.job(job_id).attempts
        grants = next((attempt.grants for attempt in attempts if attempt.epoch == event.epoch), [])
        restarted = f" restarted in place ({event.generation})" if event.generation else ""
        attempt = f", attempt {event.epoch}{restarted}" if event.epoch > 1 or restarted else ""
        where = ", ".join(event.nodes) or "its nodes"
        shape = f": {grants_note(grants)}" if grants else ""
        self._status.say(f"running on {where}{shape}{attempt}")


def _end(head: Client, job_id: str, event: EndEvent | None) -> int:
    job = head.job(job_id).job
    print("\n".join([end_summary(job), *_advice(job)]), file=sys.stderr, flush=True)
    return exit_code(job.state if event is None else event.state, job.exit_code if event is None else event.exit_code)


def _advice(job: JobView) -> list[str]:
    """The most valuable advice after a job that ran long enough; none if it cannot be had."""
    if job.states or job.started_s is None or job.ended_s is None or job.ended_s - job.started_s < JUDGED_MIN_S:
        return []
    from phalanx.cli.jobs.usage import SHORT_ADVICE, advice_lines  # loads records that only few runs need

    try:
        found = connect(ADVICE_LIMIT_S, ADVICE_LIMIT_S).job_usage(job.id)
    except PhalanxError:
        return []
    return [f"advice: {line}" for line in advice_lines(found.advice, most=SHORT_ADVICE)]
