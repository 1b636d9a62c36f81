"""`phalanx users`: users and their roles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.ids import UserId
from phalanx.core.work.nearest_match import nearest_match
from phalanx.core.work.users import UserRole

if TYPE_CHECKING:
    from phalanx.client import Client

_ROLE = click.option(
    "--role",
    type=click.Choice([role.value for role in UserRole if role is not UserRole.NODE]),
    help="Role in the whole cluster.",
)


@click.group(cls=CommandGroup, invoke_without_command=True)
@list_options
@click.pass_context
def users(context: click.Context, as_json: bool, watch: bool) -> None:
    """List users; add or change one."""
    if context.invoked_subcommand is None:
        _list(as_json=as_json, watch=watch)


@users.command(name="list")
@list_options
def list_(as_json: bool, watch: bool) -> None:
    """List users."""
    _list(as_json=as_json, watch=watch)


@users.command()
@click.argument("name")
@_ROLE
def add(name: str, role: str | None) -> None:
    """Add a user, with the role user by default."""
    head = connect()
    if any(user.id == name for user in head.users()):
        raise Conflict(f"user {name} exists already", hint=f"change it with phalanx users set {name}")
    user = head.put_user(name, role=role or UserRole.USER)
    print(strip_control(f"user {user.id} added as {user.role}"))
    print(f"next: phalanx tokens add --user {user.id}")


@users.command(name="set")
@click.argument("name")
@_ROLE
@click.option("--disable/--enable", "disabled", default=None, help="The tokens of a disabled user are rejected.")
def set_(name: str, role: str | None, disabled: bool | None) -> None:
    """Change a user."""
    if role is None and disabled is None:
        raise BadRequest("nothing to change", hint="give --role, --disable or --enable")
    head = connect()
    _check_exists(head, name)
    user = head.put_user(name, role=role, disabled=disabled)
    print(strip_control(f"user {user.id}: {user.role}{', disabled' if user.disabled else ''}"))


def _check_exists(head: Client, name: str) -> None:
    """Check that the user exists, so that a typo does not create a new one.

    Raises:
        BadRequest: there is no such user; the hint names the nearest.
    """
    names = [user.id for user in head.users()]
    if UserId(name) not in names:
        near = nearest_match(name, names)
        raise BadRequest(
            f"no user {name!r}", hint=f"did you mean {near}?" if near else f"add it with phalanx users add {name}"
        )


def _list(*, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> ListView:
        found = head.users()
        now_s = time.time()
        columns = (
            Column(title="USER", min_width=8),
            Column(title="ROLE"),
            Column(title="STATE", hide_empty=True),
            Column(title="SINCE", right=True),
        )
        rows = [
            [
                user.id,
                str(user.role),
                Cell("disabled", "red") if user.disabled else "",
                cells.age(user.created_s, now_s),
            ]
            for user in found
        ]
        return ListView(
            value=found,
            lines=lambda screen: table(columns, rows, screen),
            next_command="phalanx users add NAME --role user",
        )

    show_list(fetch, as_json=as_json, watch=watch)
