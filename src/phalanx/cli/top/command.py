"""`phalanx top`: starts the live view; needs a terminal."""

from __future__ import annotations

import sys
from typing import Final

import click

from phalanx.cli.cells import count
from phalanx.cli.connection import connect
from phalanx.cli.jobs.ps import job_lines
from phalanx.cli.terminal import Terminal, terminal, truncate
from phalanx.core.errors import BadRequest
from phalanx.core.work.states import JobState
from phalanx.wire.api.fleet import FleetFrame
from phalanx.wire.api.head import Overview

_ALTERNATE_SCREEN: Final = "\x1b[?1049h\x1b[H\x1b[2J"
_MAIN_SCREEN: Final = "\x1b[?1049l"


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot as plain text, and end: for pipes.")
def top(once: bool) -> None:
    """Show GPUs and jobs live. q quits, / searches, l opens the log of a job, c cancels it (asks first).

    Each GPU is the letter of its state, as in the dashboard.
    """
    if once:
        head = connect()
        from phalanx.cli.top.rendering import once_lines

        plain = terminal()._replace(colour=False)
        print("\n".join(once_lines(head.overview(), head.fleet(), plain)))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest(
            "top needs a terminal", hint="use phalanx top --once, phalanx ps --watch, or phalanx nodes --json --watch"
        )
    head = connect()
    first, frame = head.overview(), head.fleet()  # an unreachable head is reported before the screen opens
    print(_ALTERNATE_SCREEN + "\n".join(first_picture(first, frame, terminal())), end="", flush=True)
    try:
        from phalanx.cli.top.screen import TopApp  # takes seconds on a loaded machine

        TopApp(head, first, frame).run()
    finally:
        print(_MAIN_SCREEN, end="", flush=True)


def first_picture(seen: Overview, frame: FleetFrame, screen: Terminal) -> list[str]:
    """Return the lines shown at once, without the libraries of the live screen, which then replaces them."""
    running = seen.counts.get(JobState.RUNNING, len(seen.running))
    waiting = seen.counts.get(JobState.PENDING, len(seen.pending))
    jobs = job_lines([*seen.running, *seen.pending, *seen.recent], screen, seen.now_s)
    room = max(0, screen.height - 3)
    return [
        f"Phalanx {seen.version}   {count(len(frame.nodes), 'node')}   {running} running, {waiting} waiting",
        *(line if "\x1b" in line else truncate(line, screen.width) for line in jobs[:room]),
        screen.paint("starting the live view ...", "dim"),
    ]
