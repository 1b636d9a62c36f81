"""`phalanx secrets`: values that jobs get in their environment and that nothing shows. A value is never an argument: `ps` would show it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.cells import count
from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, to_json
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.client.input_files import read_file_bytes
from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.secret import VALUE_BYTES_MAX, check_secret_name, check_secret_value
from phalanx.wire.api.secrets import SecretView

if TYPE_CHECKING:
    from phalanx.client import Client

_DEFAULT_PROJECT = "default"
_PROJECT = click.option(
    "-p", "--project", metavar="PROJECT", help="Secret of this project; default: your only project, else default."
)
_MINE = click.option("--mine", is_flag=True, help="Secret of yours alone: for your jobs in any project.")


@list_group("List secrets without their values; set or remove one; encrypt all with a new key.")
def secrets(head: Client, now_s: float) -> ListView:
    """List secrets."""
    found: Sequence[SecretView] = head.secrets()
    columns = (
        Column(title="SECRET", min_width=12),
        Column(title="OF", min_width=12),
        Column(title="VERSION", right=True),
        Column(title="SET BY"),
        Column(title="SET", right=True),
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(one.name, "bold"),
            f"{one.scope} {one.owner}",
            str(one.version),
            one.by,
            cells.age(one.at_s, now_s),
        ]
        for one in found
    ]
    return ListView(
        value=found,
        lines=lambda screen: table(columns, rows, screen) if found else ["no secret"],
        next_command="phalanx submit --secret NAME ..." if found else "phalanx secrets set NAME",
    )


@secrets.command("set")
@click.argument("name")
@_PROJECT
@_MINE
@click.option("--from-file", metavar="FILE", help="Read the value from this file; - or a pipe: standard input.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def set_(name: str, project: str | None, mine: bool, from_file: str | None, as_json: bool) -> None:
    """Set a secret to a value that is typed without echo, or comes from standard input or a file. One line break at its end is dropped.

    Jobs that start later get the new value.
    """
    check_secret_name(name)
    head = connect()
    owner = _owner(head, project, mine=mine)
    value = _value(name, from_file)
    check_secret_value(name, value)
    done = head.put_secret(name, value, project=owner)
    if as_json:
        print(to_json(done, indent=2))
        return
    print(strip_control(f"secret {done.name} of {done.scope} {done.owner} is set, version {done.version}"))
    print(strip_control(f"next: phalanx submit --secret {name} ..."))


@secrets.command("rm")
@click.argument("name")
@_PROJECT
@_MINE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def remove(name: str, project: str | None, mine: bool, as_json: bool) -> None:
    """Remove a secret. Jobs that name it and start later fail; running ones keep their value."""
    check_secret_name(name)
    head = connect()
    owner = _owner(head, project, mine=mine)
    done = head.remove_secret(name, project=owner)
    if as_json:
        print(to_json(done, indent=2))
        return
    print(strip_control(f"secret {name} {'of yours' if owner is None else f'of project {owner}'} is removed"))
    if done.jobs:
        print(f"used by {count(done.jobs, 'job')} not yet ended: without it, a start fails")


@secrets.command("rotate-key")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rotate_key(as_json: bool) -> None:
    """Encrypt all secrets with a new key and drop the old one. Earlier backups can still be read with the old key: set those secrets again too."""
    done = connect().rotate_secrets_key()
    if as_json:
        print(to_json(done, indent=2))
        return
    print(strip_control(f"{count(done.count, 'secret')} encrypted with key {done.key}"))
    for one in done.unreadable:
        print(strip_control(f"{one} cannot be decrypted with any key of the head: set it again"))


def _owner(head: Client, project: str | None, *, mine: bool) -> str | None:
    """Return the project, or None for the caller.

    Raises:
        BadRequest: both are asked for.
    """
    if mine and project is not None:
        raise BadRequest("--mine and --project exclude each other", hint="give one of them")
    if mine:
        return None
    if project is not None:
        return project
    own = head.me().projects
    return str(own[0]) if len(own) == 1 else _DEFAULT_PROJECT


def _value(name: str, from_file: str | None) -> str:
    """Return the value, from a file, standard input, or typed twice without echo.

    Raises:
        BadFile: it is not text.
        BadRequest: the two differ.
    """
    if from_file is not None or not sys.stdin.isatty():
        data = read_file_bytes(from_file or "-", 2 * VALUE_BYTES_MAX, "secret")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise BadFile(f"the value of {name} is not UTF-8 text", hint="encode it with base64") from None
        return text.removesuffix("\n").removesuffix("\r")
    import getpass

    value = getpass.getpass(f"Value of {name}: ")
    if getpass.getpass(f"Again, value of {name}: ") != value:
        raise BadRequest("the two values differ", hint="try again")
    return value
