"""`phalanx top`: hands a terminal to the live screen; refuses where there is none."""

from __future__ import annotations

import sys

import click

from phalanx.cli.connect import connect
from phalanx.core.errors import BadRequest


@click.command()
def top() -> None:
    """Watch devices and jobs, live. q quits, l opens a job's log, c cancels it (asks first)."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadRequest("top needs a terminal", hint="phalanx ps --watch, or phalanx nodes --json --watch")
    head = connect()
    first = head.overview()  # a head that is not there is told on one line, not on a screen
    from phalanx.cli.top.screen import Top

    Top(head, first).run()
