"""`phalanx licences`: seats that the whole fleet shares, and the jobs that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.impossible_jobs import print_change
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.work.extras import check_extra_name
from phalanx.wire.api.licences import LicenceView

if TYPE_CHECKING:
    from phalanx.client import Client

_HOLDERS_SHOWN: Final = 5


@list_group("List licences with the jobs that hold their seats; set or remove one.")
def licences(head: Client, now_s: float) -> ListView:
    """List licences."""
    del now_s
    found = head.licences()
    return ListView(
        value=found,
        lines=lambda screen: _lines(found, screen),
        next_command="" if found else "phalanx licences set NAME SEATS",
    )


@licences.command("set")
@click.argument("name")
@click.argument("seats", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def set_(name: str, seats: int, as_json: bool) -> None:
    """Set how many seats of a licence the whole fleet shares; adds the licence if it is new. Jobs keep the seats that they hold."""
    name = check_extra_name(name, key="licence")
    changed = connect().put_licence(name, seats)
    print_change(changed, f"licence {name} has {seats} seat{'' if seats == 1 else 's'}", as_json=as_json)
    if seats and not as_json:
        print(strip_control(f"next: phalanx submit --resources {name}:1 ..."))


@licences.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def remove(name: str, as_json: bool) -> None:
    """Remove a licence that no job holds."""
    name = check_extra_name(name, key="licence")
    print_change(connect().remove_licence(name), f"licence {name} is removed", as_json=as_json)


def _lines(found: list[LicenceView], screen: Terminal) -> list[str]:
    if not found:
        return ["no licence"]
    columns = (
        Column(title="LICENCE"),
        Column(title="SEATS", right=True),
        Column(title="USED", right=True),
        Column(title="FREE", right=True),
        Column(title="WAITING", right=True),
        Column(title="HELD BY", min_width=12, hide_empty=True),
    )
    rows: list[list[Cell | str]] = []
    for one in found:
        more = len(one.holders) - _HOLDERS_SHOWN
        named = [f"{each.job_id} ({each.seats})" for each in one.holders[:_HOLDERS_SHOWN]]
        rows.append(
            [
                Cell(one.name, "bold"),
                str(one.seats),
                str(one.used),
                str(max(0, one.seats - one.used)),
                str(one.waiting),
                ", ".join(named) + (f" and {more} more" if more > 0 else ""),
            ]
        )
    return table(columns, rows, screen)
