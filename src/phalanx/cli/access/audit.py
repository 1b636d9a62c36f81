"""`phalanx audit`: shows and verifies the audit trail."""

from __future__ import annotations

import time

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.list_output import (
    ListView,
    list_options,
    show_list,
    to_json,
)
from phalanx.cli.option_types import DURATION
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.units import parse_duration_s
from phalanx.wire.api.audit import AuditLineView

_DONE = "done"
_WHAT_MAX = 80  # columns; --json has the whole text


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--user", metavar="USER", help="Only actions of this user.")
@click.option("--since", type=DURATION, metavar="TIME", help="Only the last 2h, 7d.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Number of lines.")
@list_options
@click.pass_context
def audit(context: click.Context, user: str | None, since: str | None, limit: int, as_json: bool, watch: bool) -> None:
    """Show who changed what, newest last; `verify` checks that the trail is unchanged."""
    if context.invoked_subcommand is None:
        _list(user, since, limit, as_json=as_json, watch=watch)


@audit.command()
@click.option(
    "--anchor", "anchors", multiple=True, metavar="SEQ:CODE", help="Anchor that you stored elsewhere; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(context: click.Context, anchors: tuple[str, ...], as_json: bool) -> None:
    """Verify the whole trail. Exits with 1 if a line was changed, added, removed, moved or cut off."""
    report = connect().verify_audit(anchors)
    if as_json:
        print(to_json(report, indent=2))
    else:
        for flaw in report.flaws:
            where = "" if flaw.text.startswith("lines ") else f"line {flaw.seq}: "
            print(strip_control(f"{where}{flaw.text}"))
        flaws = cells.count(len(report.flaws), "flaw")
        result = f"{flaws}: this is not the trail that this head wrote" if report.flaws else "unchanged"
        print(f"{cells.count(report.lines, 'line')}, {cells.count(report.anchors, 'anchor')} compared: {result}")
        print(f"anchor {report.anchor}: store it where the head's account cannot write")
    context.exit(1 if report.flaws else 0)


def _list(user: str | None, since: str | None, limit: int, *, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> ListView:
        now_s = time.time()
        since_s = None if since is None else max(0.0, now_s - parse_duration_s(since))
        found = head.audit(user=user, since_s=since_s, limit=limit)
        columns = (
            Column(title="LINE", right=True),
            Column(title="AGO", right=True),
            Column(title="USER", min_width=6),
            Column(title="TOKEN", min_width=6, drop_order=2),
            Column(title="FROM", min_width=6, drop_order=1),
            Column(title="CALL", min_width=16),
            Column(title="WHAT", min_width=24, max_width=_WHAT_MAX),
            Column(title="RESULT"),
        )
        return ListView(
            value=found,
            lines=lambda screen: table(columns, [_row(line, now_s) for line in found.lines], screen),
            notes=(
                *(
                    [f"only the newest {len(found.lines)} lines fit into the answer; --since and --user narrow it"]
                    if found.truncated
                    else []
                ),
                *([f"anchor {found.anchor}"] if found.anchor else []),
            ),
            next_command="phalanx audit verify",
        )

    show_list(fetch, as_json=as_json, watch=watch)


def _row(line: AuditLineView, now_s: float) -> list[Cell | str]:
    return [
        str(line.seq),
        cells.age(line.at_s, now_s),
        line.user,
        line.token_id,
        line.origin,
        line.action,
        line.detail or line.target,
        Cell(line.result, "" if line.result == _DONE else "red"),
    ]
