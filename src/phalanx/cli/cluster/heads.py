"""`phalanx heads`: the heads that share a store, with leader and standbys."""

from __future__ import annotations

import time

import click

from phalanx.cli import cells
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.core.errors import PhalanxError
from phalanx.core.units import format_duration
from phalanx.wire.api.head import HeadList, HeadView

_COLUMNS = (
    Column(title="HEAD"),
    Column(title="URL"),
    Column(title="ROLE"),
    Column(title="SEEN"),
    Column(title="UP FOR"),
    Column(title="VERSION"),
)
_SINGLE = "Single head, no standby."


@click.command()
@list_options
def heads(as_json: bool, watch: bool) -> None:
    """List the heads that share a store: the leader and its term, the standbys, and when each was last seen."""
    client = connect()

    def fetch() -> ListView:
        found, now_s = client.heads(), time.time()
        rows = [_row(head, now_s) for head in found.heads]
        return ListView(
            value=found,
            lines=lambda screen: [*table(_COLUMNS, rows, screen), _summary(found, now_s)] if rows else [_SINGLE],
            next_command=_next(found) if rows else "phalanx up --store postgresql://... adds standby heads",
        )

    try:
        show_list(fetch, as_json=as_json, watch=watch)
    except PhalanxError as error:
        if not error.retry_helps:
            raise
        raise type(error)(
            error.message, hint="run phalanx up on one of the heads; head.log of each head has the reason"
        ) from error


def _row(head: HeadView, now_s: float) -> list[Cell | str]:
    return [
        head.name,
        head.url,
        cells.state_cell(head.role),
        f"{head.seen_ago_s:.0f} s ago",
        format_duration(max(0.0, now_s - head.started_s)),
        head.version,
    ]


def _summary(found: HeadList, now_s: float) -> str:
    since = format_duration(max(0.0, now_s - found.since_s))
    renewed = max(0.0, now_s - found.renewed_s)
    return f"term {found.term}, since {since}; lease renewed {renewed:.1f} s ago"


def _next(found: HeadList) -> str:
    if not any(head.role == "standby" for head in found.heads):
        return "phalanx up --store ... on another machine adds a standby"
    return "phalanx down on the leader hands over to a standby"
