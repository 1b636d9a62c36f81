"""Follows a job: output on standard output, states on standard error, until the job ends or the user detaches.

It reads events and the ended job as they are sent: the records of jobs and msgspec take 40 ms to import, before the first line or after it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from phalanx.cli.connection import connect
from phalanx.cli.jobs.log_printer import LogPrinter
from phalanx.cli.terminal import strip_control, terminal, truncate
from phalanx.cli.wait_text import wait_text
from phalanx.core.errors import PhalanxError
from phalanx.core.work.job_file.shape_note import shape_note
from phalanx.core.work.states import AttemptState, JobState

if TYPE_CHECKING:
    from phalanx.cli.jobs.job_end import EndedJob
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
                printer.show(event.fields, head, job_id)
            case "end":
                output.finish()
                status.clear()
                return _end(head, job_id, event.fields)
            case _:  # event kinds of later releases
                pass
    return _end(head, job_id, None)


class StatePrinter:
    """Prints each state of the job once."""

    def __init__(self, status: StatusLine) -> None:
        self._status = status
        self._placed: tuple[int, int] | None = None

    def show(self, event: Mapping[str, Any], head: Client, job_id: str) -> None:
        """Print a state, unless it was printed last. `event`: fields of a StateEvent of wire.api.output."""
        state, attempt_state = event["state"], event.get("attempt_state")
        if state == JobState.PENDING:
            why = wait_text(event.get("reason", ""), event.get("detail", ""))
            self._status.show(f"waiting: {why or 'not scheduled yet'}")
        elif state == JobState.RUNNING and attempt_state == AttemptState.RUNNING:
            started = (event["epoch"], event["generation"])
            if self._placed != started:
                self._placed = started
                self._show_placement(event, head, job_id)
        elif state == JobState.RUNNING and attempt_state is not None:
            self._status.show(f"{attempt_state} on {', '.join(event['nodes'])}")

    def _show_placement(self, event: Mapping[str, Any], head: Client, job_id: str) -> None:
        epoch, generation = event["epoch"], event["generation"]
        restarted = f" restarted in place ({generation})" if generation else ""
        attempt = f", attempt {epoch}{restarted}" if epoch > 1 or restarted else ""
        where = ", ".join(event["nodes"]) or "its nodes"
        devices = event.get("devices")
        shape = shape_note(devices) if devices else _granted(head, job_id, epoch)
        self._status.say(f"running on {where}{f': {shape}' if shape else ''}{attempt}")


def _granted(head: Client, job_id: str, epoch: int) -> str:
    """Return what an attempt was granted if it holds MIG slices, which its event does not describe; "" if the attempt is not there."""
    from phalanx.cli.jobs.grants_note import grants_note

    grants = next((attempt.grants for attempt in head.job(job_id).attempts if attempt.epoch == epoch), [])
    return grants_note(grants) if grants else ""


def _end(head: Client, job_id: str, event: Mapping[str, Any] | None) -> int:
    from phalanx.cli.jobs.job_end import end_summary, ended_job, exit_code

    job = ended_job(head.job_fields(job_id))
    print("\n".join([end_summary(job), *_advice(job)]), file=sys.stderr, flush=True)
    if event is None:
        return exit_code(job.state, job.exit_code)
    return exit_code(JobState(event["state"]), event.get("exit_code"))


def _advice(job: EndedJob) -> list[str]:
    """The most valuable advice after a job that ran long enough; none if it cannot be had."""
    from phalanx.core.accounting.advice.judged_time import JUDGED_MIN_S

    if job.states or job.started_s is None or job.ended_s is None or job.ended_s - job.started_s < JUDGED_MIN_S:
        return []
    from phalanx.cli.jobs.usage import SHORT_ADVICE, advice_lines  # loads records that only few runs need

    try:
        found = connect(ADVICE_LIMIT_S, ADVICE_LIMIT_S).job_usage(job.id)
    except PhalanxError:
        return []
    return [f"advice: {line}" for line in advice_lines(found.advice, most=SHORT_ADVICE)]
