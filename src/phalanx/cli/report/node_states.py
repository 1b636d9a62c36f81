"""`phalanx report states NODE`: what each device of a node was used for lately, one line for each state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from phalanx.cli.completion import complete_nodes
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal
from phalanx.core.units import format_duration

if TYPE_CHECKING:
    from phalanx.wire.api.usage import NodeUsageView

_WHOLE = 1000  # thousandths of a device


@click.command()
@click.argument("node", metavar="NODE", shell_complete=complete_nodes)
@list_options
def states(node: str, as_json: bool, watch: bool) -> None:
    """What each device of a node was used for lately, oldest first: at most 64 states of each, and those of now.

    docs/usage-states.md explains each state.

    \b
    phalanx report states n0
    phalanx report states n0 --json
    """  # noqa: D301 - click reads the backspace character itself
    client = connect()

    def fetch() -> ListView:
        found = client.node_usage(node)
        return ListView(value=found, lines=lambda screen: _lines(found, screen))

    show_list(fetch, as_json=as_json, watch=watch)


def _lines(found: NodeUsageView, screen: Terminal) -> list[str]:
    columns = (
        Column(title="GPU", right=True),
        Column(title="SINCE"),
        Column(title="FOR", right=True),
        Column(title="STATE"),
        Column(title="JOB", hide_empty=True),
        Column(title="PART", right=True, hide_empty=True),
        Column(title="NOTE", hide_empty=True),
    )
    rows: list[list[Cell | str]] = [
        [
            str(one.device),
            time.strftime("%m-%d %H:%M:%S", time.localtime(one.begin_s)),
            format_duration(one.end_s - one.begin_s),
            Cell(one.state, "bold"),
            one.job,
            "" if one.milli == _WHOLE else f"{one.milli / _WHOLE:g}",
            one.note,
        ]
        for one in found.spans
    ]
    return table(columns, rows, screen)
