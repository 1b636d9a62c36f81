"""`phalanx queues`: lists, changes and shows queues."""

from __future__ import annotations

import click

from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.work.nearest_match import nearest_match
from phalanx.wire.api.queues import QueueView

_PRIORITY = click.option("--priority", type=int, metavar="N", help="Added to the priority of its jobs.")


@click.group(cls=CommandGroup, invoke_without_command=True)
@list_options
@click.pass_context
def queues(context: click.Context, as_json: bool, watch: bool) -> None:
    """List queues; add or change one, or the whole tree."""
    if context.invoked_subcommand is None:
        _list(as_json=as_json, watch=watch)


@queues.command(name="list")
@list_options
def list_(as_json: bool, watch: bool) -> None:
    """List queues."""
    _list(as_json=as_json, watch=watch)


@queues.command()
@click.argument("name")
@_PRIORITY
def add(name: str, priority: int | None) -> None:
    """Add a queue."""
    head = connect()
    if any(queue.id == name for queue in head.queues()):
        raise Conflict(f"queue {name} exists already", hint=f"change it with phalanx queues set {name}")
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
    names = [queue.id for queue in head.queues()]
    if name not in names:
        near = nearest_match(name, names)
        raise BadRequest(
            f"no queue {name!r}", hint=f"did you mean {near}?" if near else f"add it with phalanx queues add {name}"
        )
    print(strip_control(_summary(head.put_queue(name, priority=priority, open=is_open))))


@queues.command()
@click.argument("file", type=str)
@click.option("--dry-run", is_flag=True, help="Print the changes, apply none.")
@click.option("--prune", is_flag=True, help="Remove queues that are not in the file, except default.")
def apply(file: str, dry_run: bool, prune: bool) -> None:
    """Apply the queue tree of a YAML file, all or nothing (docs/queues.md)."""
    from phalanx.cli.access.queue_file import read_queue_file
    from phalanx.cli.access.queue_tree import change_lines

    applied = connect().put_queues(read_queue_file(file), prune=prune, dry_run=dry_run)
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


def _list(*, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> ListView:
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

    show_list(fetch, as_json=as_json, watch=watch)
