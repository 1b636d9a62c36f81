"""`phalanx users`: users and their roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import check_exists, check_new, list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest
from phalanx.core.work.users import UserRole

if TYPE_CHECKING:
    from phalanx.client import Client

_ROLE = click.option(
    "--role",
    type=click.Choice([role.value for role in UserRole if role is not UserRole.NODE]),
    help="Role in the whole cluster.",
)


@list_group("List users; add or change one.")
def users(head: Client, now_s: float) -> ListView:
    """List users."""
    found = head.users()
    columns = (
        Column(title="USER", min_width=8),
        Column(title="ROLE"),
        Column(title="STATE", hide_empty=True),
        Column(title="SIGNS IN AT", hide_empty=True, drop_order=1),
        Column(title="CONFIRMED", right=True, hide_empty=True),
        Column(title="SINCE", right=True),
    )
    rows = [
        [
            user.id,
            str(user.role),
            Cell("disabled", "red") if user.disabled else Cell("no access", "red") if user.refused else "",
            user.provider.partition("://")[2],
            cells.age(user.confirmed_s, now_s) if user.confirmed_s else "",
            cells.age(user.created_s, now_s),
        ]
        for user in found
    ]
    return ListView(
        value=found,
        lines=lambda screen: table(columns, rows, screen),
        next_command="phalanx users add NAME --role user",
    )


@users.command()
@click.argument("name")
@_ROLE
def add(name: str, role: str | None) -> None:
    """Add a user, with the role user by default."""
    head = connect()
    check_new("user", name, (user.id for user in head.users()))
    user = head.put_user(name, role=role or UserRole.USER)
    print(strip_control(f"user {user.id} added as {user.role}"))
    print(f"next: phalanx tokens add --user {user.id}")


@users.command(name="set")
@click.argument("name")
@_ROLE
@click.option("--disable/--enable", "disabled", default=None, help="The tokens of a disabled user are rejected.")
@click.option(
    "--provider/--local",
    "linked",
    default=None,
    help="Whether the person of that name at the sign-in provider becomes this user.",
)
def set_(name: str, role: str | None, disabled: bool | None, linked: bool | None) -> None:
    """Change a user."""
    if role is None and disabled is None and linked is None:
        raise BadRequest("nothing to change", hint="give --role, --disable, --enable, --provider or --local")
    head = connect()
    check_exists("user", name, (user.id for user in head.users()))
    user = head.put_user(name, role=role, disabled=disabled, linked=linked)
    linked_text = f", signs in at {user.provider}" if user.provider else ""
    print(strip_control(f"user {user.id}: {user.role}{', disabled' if user.disabled else ''}{linked_text}"))
