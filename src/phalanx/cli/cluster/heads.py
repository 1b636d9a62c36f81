"""`phalanx heads`: of several heads that share a store, who leads since when, and who stands by."""

from __future__ import annotations

import time

import click

from phalanx.cli import cells
from phalanx.cli.connect import connect
from phalanx.cli.lists import Shown, list_options, show
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


@click.command()
@list_options
def heads(as_json: bool, watch: bool) -> None:
    """List the heads that share a store: who leads since when, who stands by, who has been silent."""
    client = connect()

    def fetch() -> Shown:
        found, now_s = client.heads(), time.time()
        rows = [_row(head, now_s) for head in found.heads]
        return Shown(
            value=found,
            lines=lambda terminal: [*table(_COLUMNS, rows, terminal), _summary(found, now_s)] if rows else [_alone()],
            next=_next(found)
            if rows
            else "phalanx up --store postgresql://... lets several heads stand in for each other",
        )

    try:
        show(fetch, as_json=as_json, watch=watch)
    except PhalanxError as error:
        if not error.retry_helps:
            raise
        raise type(error)(
            error.message, hint="phalanx up on one of the heads; head.log of each says what it waits for"
        ) from error


def _row(head: HeadView, now_s: float) -> list[Cell | str]:
    return [
        head.name, head.url, cells.state(head.role), f"{head.seen_ago_s:.0f} s ago", format_duration(max(0.0, now_s - head.started_s)),
        head.version,
    ]  # fmt: skip


def _summary(found: HeadList, now_s: float) -> str:
    since = format_duration(max(0.0, now_s - found.since_s))
    renewed = max(0.0, now_s - found.renewed_s)
    return f"term {found.term}, for {since}; renewed {renewed:.1f} s ago"


def _alone() -> str:
    return "this head shares its store with no other"


def _next(found: HeadList) -> str:
    if not any(head.role == "standby" for head in found.heads):
        return "phalanx up --store ... on another machine, so that one stands by"
    return "phalanx down on the leader hands over"
