"""`phalanx top`: starts the live view; needs a terminal."""

from __future__ import annotations

import sys

import click

from phalanx.cli.connection import connect
from phalanx.core.errors import BadRequest


@click.command()
def top() -> None:
    """Show devices and jobs live. q quits, l opens the log of a job, c cancels it (asks first)."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("top needs a terminal", hint="use phalanx ps --watch, or phalanx nodes --json --watch")
    head = connect()
    first = head.overview()  # an unreachable head is reported before the screen opens
    from phalanx.cli.top.screen import TopApp

    TopApp(head, first).run()
