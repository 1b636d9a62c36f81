"""Formats single values the same way on every screen: states, bars, ages, steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.tables import Cell
from phalanx.cli.terminal import Terminal
from phalanx.core.units import format_duration
from phalanx.core.work.states import JobState

if TYPE_CHECKING:
    from phalanx.wire.api.jobs import JobView

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_STATE_STYLE: Final = {
    **dict.fromkeys(("running", "up", "ready"), "green"),
    **dict.fromkeys(
        ("pending", "drained", "cordoned", "draining", "reserved", "updating", "degraded", "parked"), "yellow"
    ),
    **dict.fromkeys(("failed", "timeout", "down"), "red"),
    "succeeded": "blue",
    "cancelled": "dim",
}


def state_cell(word: str) -> Cell:
    """Return a state in its colour."""
    return Cell(word, _STATE_STYLE.get(word, ""))


def job_state(job: JobView) -> str:
    """Return the state of a job: why it waits, or that its attempt starts or stops."""
    if job.state is JobState.PENDING:
        return job.pending_word
    if job.state is JobState.RUNNING and job.attempt_state is not None and job.attempt_state != "running":
        return str(job.attempt_state)
    return str(job.state)


def percent(share: float | None) -> str:
    """Format a share, `87%` for 0.87; empty if unknown."""
    return "" if share is None else f"{100 * min(max(share, 0.0), 1.0):.0f}%"


def bar(share: float | None, width: int, terminal: Terminal) -> str:
    """Draw a bar of `width` columns, filled to `share`."""
    if terminal.blocks:
        return block_bar(share, width)
    filled = min(max(share or 0.0, 0.0), 1.0) * width
    return ("#" * round(filled)).ljust(width, ".")


def block_bar(share: float | None, width: int) -> str:
    """Draw a bar of block characters, in steps of 1/8 column."""
    filled = min(max(share or 0.0, 0.0), 1.0) * width
    whole = int(filled)
    part = _EIGHTHS[int((filled - whole) * 8)] if whole < width else ""
    return ("█" * whole + part.strip()).ljust(width, "·" if share is None else "░")[:width]


def utilisation_mark(share: float | None, terminal: Terminal) -> str:
    """Return one character for the utilisation of a device; `?` if unknown."""
    if share is None:
        return "?"
    clipped = min(max(share, 0.0), 1.0)
    return _LEVELS[min(7, int(clipped * 8))] if terminal.blocks else str(min(9, int(clipped * 10)))


def age(then_s: float | None, now_s: float) -> str:
    """Format the time since `then_s` in at most two units; empty for never."""
    return "" if not then_s else format_duration(max(0.0, now_s - then_s))


def hours(amount: float) -> str:
    """Format hours with as many digits as matter; empty for none."""
    if not amount:
        return ""
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.1f}" if amount >= 10 else f"{amount:.3f}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 job`, `2 jobs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rate(per_s: float | None) -> str:
    """Format a rate, `1.2k/s`; empty if unknown."""
    if per_s is None:
        return ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.1f}{unit}/s"
    return f"{per_s:.0f}/s"


def step(done: int, total: int | None) -> str:
    """Format progress as `120/400`, or the step alone if the total is unknown."""
    return str(done) if not total else f"{done}/{total}"
