"""`phalanx dashboard`: prints a link that signs one browser in, once, or opens it."""

from __future__ import annotations

import sys

import click

from phalanx.cli.browser import open_browser
from phalanx.cli.connection import connect


@click.command()
@click.option("--print", "only_print", is_flag=True, help="Print the link and open nothing.")
def dashboard(only_print: bool) -> None:
    """Open the dashboard in a browser, with your rights. The link works once, within a minute; without a screen it is printed."""
    link = connect().dashboard_link()
    if not only_print and open_browser(link):
        print("opened the dashboard in a browser", file=sys.stderr)
        return
    print(link)
    print("next: open it within a minute; it works once", file=sys.stderr)
