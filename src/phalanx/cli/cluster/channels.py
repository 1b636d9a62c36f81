"""`phalanx channels`: where messages about jobs, nodes, waste, budgets and space for outputs are sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.errors import BadFile
from phalanx.core.units import format_duration
from phalanx.core.work.channel import ChannelTopic

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.channels import ChannelView

_TOPICS: Final = [topic.value for topic in ChannelTopic]


@list_group("List, add, test or remove channels for messages: mail, chat, webhooks.")
def channels(head: Client, now_s: float) -> ListView:
    """List channels."""
    found = head.channels()
    return ListView(
        value=found,
        lines=lambda screen: _lines(found, screen, now_s),
        next_command="" if found else "phalanx channels add NAME @FILE-WITH-URL",
    )


@channels.command()
@click.argument("name")
@click.argument("url", metavar="URL|@FILE|-")
@click.option("--project", default="", help="Only messages about jobs and the budget of this project.")
@click.option("--topic", "topics", type=click.Choice(_TOPICS), multiple=True, help="Only this topic; may be repeated.")
def add(name: str, url: str, project: str, topics: tuple[str, ...]) -> None:
    """Add a channel, or replace one. URL as Apprise reads it, such as mailto://, slack:// or json://.

    Most URLs contain a token, and others on this machine can see command lines: @FILE reads the URL from a file, - from the input.
    """
    connect().put_channel(name, _read_url(url), project=project, topics=topics)
    print(strip_control(f"channel {name} is set; next: phalanx channels test {name}"))


@channels.command()
@click.argument("name")
def test(name: str) -> None:
    """Send a test message now."""
    connect().test_channel(name)
    print(strip_control(f"channel {name}: the service accepted the message"))


@channels.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove a channel."""
    connect().remove_channel(name)
    print(strip_control(f"channel {name} is removed"))


def _read_url(given: str) -> str:
    if given == "-":
        return sys.stdin.readline().strip()
    if given.startswith("@"):
        try:
            return Path(given[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadFile(f"{given[1:]}: cannot be read: {error}") from error
    return given


def _lines(found: list[ChannelView], screen: Terminal, now_s: float) -> list[str]:
    if not found:
        return ["no channel"]
    columns = (
        Column(title="CHANNEL"),
        Column(title="SERVICE", min_width=12, max_width=40),
        Column(title="TOPICS"),
        Column(title="PROJECT", hide_empty=True),
        Column(title="SENT", right=True),
        Column(title="LAST"),
        Column(title="WAITING", right=True, drop_order=1),
        Column(title="ERROR", hide_empty=True, min_width=12),
    )
    rows: list[list[Cell | str]] = [
        [
            Cell(one.name, "bold"),
            one.shown,
            ",".join(one.topics) or "all",
            one.project,
            str(one.messages),
            "never" if one.sent_s is None else f"{format_duration(max(0.0, now_s - one.sent_s))} ago",
            str(one.pending),
            Cell(one.error, "red"),
        ]
        for one in found
    ]
    return table(columns, rows, screen)
