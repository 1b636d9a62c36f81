"""`phalanx version`: the versions of this command and of the head."""

from __future__ import annotations

import sys

import click

from phalanx import __version__
from phalanx.cli.connection import connect
from phalanx.cli.list_output import to_json
from phalanx.core.errors import Unreachable


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version of this command, and of the head."""
    try:
        head = connect().health()
    except Unreachable:
        head = None
    python = ".".join(map(str, sys.version_info[:3]))
    if as_json:
        print(
            to_json(
                {"phalanx": __version__, "python": python, "head": None if head is None else head.version}, indent=2
            )
        )
        return
    print(f"phalanx {__version__}, Python {python}")
    print(
        "no head answers; next: phalanx up"
        if head is None
        else f"head {head.version} ({head.head_id}) is {head.status}"
    )
