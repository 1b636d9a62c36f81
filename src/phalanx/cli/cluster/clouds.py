"""`phalanx clouds`: what the head may do at the clouds of its pools."""

from __future__ import annotations

import click

from phalanx.cli.cluster.pools import provider_settings
from phalanx.cli.connection import connect
from phalanx.cli.list_output import to_json
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control, terminal


@click.group()
def clouds() -> None:
    """Check clouds, before a pool uses one."""


@clouds.command()
@click.argument("provider")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting, as for a pool: region=us-east-1."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(provider: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Check what the head's credentials may do, and print the least policy. Nothing is started."""
    found = connect().check_cloud(provider, provider_settings(settings, spot=False))
    if as_json:
        print(to_json(found, indent=2))
        return
    words = {True: "yes", False: "no", None: "unknown"}
    columns = (Column(title="RIGHT"), Column(title="ALLOWED"), Column(title="WHY", min_width=12, hide_empty=True))
    rows: list[list[Cell | str]] = [[one.right, words[one.allowed], one.why] for one in found.rights]
    print("\n".join(table(columns, rows, terminal())))
    missing = [one.right for one in found.rights if one.allowed is False]
    if missing:
        print(strip_control(f"missing: {', '.join(missing)}; the least policy:"))
        print(found.policy)
    else:
        print("nothing is missing; --json also prints the least policy")
