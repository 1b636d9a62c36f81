"""`phalanx queues`: lists, changes and shows queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from phalanx.cli.command_groups import check_exists, check_new, list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest
from phalanx.wire.api.queues import QueueView

if TYPE_CHECKING:
    from phalanx.client import Client

_PRIORITY = click.option("--priority", type=int, metavar="N", help="Added to the priority of its jobs.")


@list_group("List queues; add or change one, or the whole tree.")
def queues(head: Client, _now_s: float) -> ListView:
    """List queues."""
    found = head.queues()
    columns = (
        Column(title="QUEUE", min_width=8),
        Column(title="STATE"),
        Column(title="PRIORITY", right=True),
        Column(title="RUNNING", right=True),
        Column(title="WAITING", right=True),
    )
    rows: list[list[Cell | str]] = [
        [
            queue.id,
            Cell("open", "green") if queue.open else Cell("closed", "red"),
            str(queue.priority),
            str(queue.running),
            str(queue.pending),
        ]
        for queue in found
    ]
    busy = next((queue.id for queue in found if queue.running or queue.pending), None)
    return ListView(
        value=found,
        lines=lambda screen: table(columns, rows, screen),
        next_command=f"phalanx ps -q {busy}" if busy else "phalanx queues add NAME",
    )


@queues.command()
@click.argument("name")
@_PRIORITY
def add(name: str, priority: int | None) -> None:
    """Add a queue."""
    head = connect()
    check_new("queue", name, (queue.id for queue in head.queues()))
    print(strip_control(_summary(head.put_queue(name, priority=priority, open=True))))


@queues.command(name="set")
@click.argument("name")
@_PRIORITY
@click.option("--open/--close", "is_open", default=None, help="A closed queue starts no jobs; submitted jobs wait.")
def set_(name: str, priority: int | None, is_open: bool | None) -> None:
    """Change a queue."""
    if priority is None and is_open is None:
        raise BadRequest("nothing to change", hint="give --priority, --open or --close")
    head = connect()
    check_exists("queue", name, (queue.id for queue in head.queues()))
    print(strip_control(_summary(head.put_queue(name, priority=priority, open=is_open))))


@queues.command()
@click.argument("file", type=str)
@click.option("--dry-run", is_flag=True, help="Print the changes, apply none.")
@click.option("--prune", is_flag=True, help="Remove queues that are not in the file, except default.")
def apply(file: str, dry_run: bool, prune: bool) -> None:
    """Apply the queue tree of a YAML file, all or nothing (docs/queues.md)."""
    from phalanx.cli.access.queue_tree import change_lines
    from phalanx.cli.yaml_file import read_yaml_file
    from phalanx.user_files.queue_file import QUEUE_FILE, queues_of_document

    applied = connect().put_queues(queues_of_document(read_yaml_file(file, QUEUE_FILE)), prune=prune, dry_run=dry_run)
    print("\n".join(strip_control(line) for line in change_lines(applied, dry_run=dry_run)))


@queues.command(name="show")
@click.argument("queue", required=False)
@list_options
def show_(queue: str | None, as_json: bool, watch: bool) -> None:
    """Show the queue tree: quotas, used, borrowed and lent GPUs, and waiting jobs."""
    from phalanx.cli.access.queue_tree import tree_view

    head = connect()
    show_list(lambda: tree_view(head.queues(), queue), as_json=as_json, watch=watch)


def _summary(queue: QueueView) -> str:
    return f"queue {queue.id}: {'open' if queue.open else 'closed'}, priority {queue.priority}"
