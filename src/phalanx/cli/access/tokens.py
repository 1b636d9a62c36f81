"""`phalanx tokens`: API tokens. A secret is printed only once, at creation, on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.access.request_limit_options import request_limit_options
from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.core.units import format_duration
from phalanx.core.work.services.request_limits import RequestLimits
from phalanx.core.work.users import Action
from phalanx.wire.api.people import TokenView

if TYPE_CHECKING:
    from phalanx.client import Client


@list_group("List tokens; create or revoke one.")
def tokens(head: Client, now_s: float) -> ListView:
    """List your tokens; an admin sees all."""
    found = head.tokens()
    columns = (
        Column(title="TOKEN"),
        Column(title="USER", min_width=6),
        Column(title="STATE"),
        Column(title="CREATED", right=True),
        Column(title="USED", right=True, hide_empty=True),
        Column(title="ENDS IN", right=True, hide_empty=True),
        Column(title="SCOPE", min_width=8, hide_empty=True),
        Column(title="LIMITS", min_width=8, hide_empty=True, drop_order=1),
        Column(title="NOTE", min_width=8, hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            token.id,
            token.user,
            _state(token, now_s),
            cells.age(token.created_s, now_s),
            cells.age(token.used_s, now_s),
            "" if token.expires_s is None or token.expires_s <= now_s else format_duration(token.expires_s - now_s),
            " ".join(token.scope),
            str(
                RequestLimits(requests_per_minute=token.requests_per_minute, tokens_per_minute=token.tokens_per_minute)
            ),
            token.note,
        ]
        for token in found
    ]
    return ListView(
        value=found,
        lines=lambda screen: table(columns, rows, screen),
        next_command="phalanx tokens add --expires 30d --note TEXT",
    )


@tokens.command()
@click.option("--user", metavar="USER", help="Owner; default: you.")
@click.option("--expires", metavar="TIME", help="Lifetime: 30d, or never.  [90d]")
@click.option(
    "--scope",
    type=click.Choice([action.value for action in Action]),
    multiple=True,
    help="Restrict the token to this action; repeatable.",
)
@click.option("--note", default="", metavar="TEXT", help="Purpose of the token.")
@request_limit_options
def add(
    user: str | None,
    expires: str | None,
    scope: tuple[str, ...],
    note: str,
    requests_per_minute: str | None,
    tokens_per_minute: str | None,
) -> None:
    """Create a token and print its secret. It cannot be shown again."""
    made = connect().make_token(
        user=user,
        expires=expires,
        scope=scope,
        note=note,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    print(f"token {made.token.id} of {made.token.user}; its secret (not shown again):", file=sys.stderr)
    print(made.secret)
    print("next: set PHALANX_TOKEN to it", file=sys.stderr)


@tokens.command()
@click.argument("token", metavar="ID")
@click.option("--made-too", is_flag=True, help="Also revoke all tokens created with it, for a stolen token.")
def revoke(token: str, made_too: bool) -> None:
    """Revoke a token at once and close its streams and sessions. Idempotent."""
    connect().revoke_token(token, made_too=made_too)
    print(f"token {token} revoked{', with all tokens created with it' if made_too else ''}")


def _state(token: TokenView, now_s: float) -> Cell | str:
    if token.revoked_s is not None:
        return Cell("revoked", "dim")
    if token.expires_s is not None and token.expires_s <= now_s:
        return Cell("expired", "dim")
    return Cell("valid", "green")
