# ruff: noqa: INP001  # a script
"""Write the manual pages of all commands: `make man`, or `python docs/man_pages.py FOLDER`. The text is that of `--help`."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from click_man.core import write_man_pages

from phalanx import __version__
from phalanx.cli.root import COMMANDS, phalanx

_KEPT = re.compile(r"\x08\n(.*?)(?=\n\n|\Z)", re.DOTALL)  # lines that click does not wrap


def main(folder: str) -> None:
    """Write one page for each command into the folder, in place of the pages that are there."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("phalanx*.1"):
        old.unlink()
    for name, entry in COMMANDS.items():
        command = phalanx.get_command(click.Context(phalanx), name)
        assert command is not None
        command.short_help = entry.summary
        phalanx.add_command(command, name)
        for each in _with_subcommands(command):
            each.help = _KEPT.sub(r".nf\n\1\n.fi", inspect.cleandoc(each.help or ""))
    write_man_pages("phalanx", phalanx, version=__version__, target_dir=folder)


def _with_subcommands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _with_subcommands(each)


if __name__ == "__main__":
    main(*sys.argv[1:])
