"""`phalanx projects`: accounting groups and their members."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import CommandGroup
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest, Conflict
from phalanx.core.work.nearest_match import nearest_match
from phalanx.wire.api.people import ProjectView

if TYPE_CHECKING:
    from phalanx.client import Client


@click.group(cls=CommandGroup, invoke_without_command=True)
@list_options
@click.pass_context
def projects(context: click.Context, as_json: bool, watch: bool) -> None:
    """List projects; add or change one."""
    if context.invoked_subcommand is None:
        _list(as_json=as_json, watch=watch)


@projects.command(name="list")
@list_options
def list_(as_json: bool, watch: bool) -> None:
    """List projects."""
    _list(as_json=as_json, watch=watch)


@projects.command()
@click.argument("name")
@click.option("--member", "members", multiple=True, metavar="USER", help="May submit jobs; repeatable.")
@click.option(
    "--admin", "admins", multiple=True, metavar="USER", help="May also change the jobs of others; repeatable."
)
def add(name: str, members: tuple[str, ...], admins: tuple[str, ...]) -> None:
    """Add a project."""
    head = connect()
    if any(project.id == name for project in head.projects()):
        raise Conflict(f"project {name} exists already", hint=f"change it with phalanx projects set {name}")
    print(strip_control(_summary(head.put_project(name, members=sorted({*members, *admins}), admins=sorted(admins)))))


@projects.command(name="set")
@click.argument("name")
@click.option("--add-member", multiple=True, metavar="USER", help="May submit jobs.")
@click.option("--remove-member", multiple=True, metavar="USER", help="Removed, also as an admin.")
@click.option("--add-admin", multiple=True, metavar="USER", help="May also change the jobs of others.")
@click.option("--remove-admin", multiple=True, metavar="USER", help="No longer an admin, still a member.")
def set_(
    name: str,
    add_member: tuple[str, ...],
    remove_member: tuple[str, ...],
    add_admin: tuple[str, ...],
    remove_admin: tuple[str, ...],
) -> None:
    """Change the members and admins of a project."""
    if not (add_member or remove_member or add_admin or remove_admin):
        raise BadRequest("nothing to change", hint="give --add-member, --remove-member, --add-admin or --remove-admin")
    head = connect()
    project = _find(head, name)
    members = {*map(str, project.members), *add_member, *add_admin} - {*remove_member}
    admins = {*map(str, project.admins), *add_admin} - {*remove_admin, *remove_member}
    print(strip_control(_summary(head.put_project(name, members=sorted(members), admins=sorted(admins)))))


def _find(head: Client, name: str) -> ProjectView:
    found = {str(project.id): project for project in head.projects()}
    if name not in found:
        near = nearest_match(name, found)
        raise BadRequest(
            f"no project {name!r}", hint=f"did you mean {near}?" if near else f"add it with phalanx projects add {name}"
        )
    return found[name]


def _summary(project: ProjectView) -> str:
    admins = f"; admins {', '.join(project.admins)}" if project.admins else ""
    return f"project {project.id}: members {', '.join(project.members) or 'none'}{admins}"


def _list(*, as_json: bool, watch: bool) -> None:
    head = connect()

    def fetch() -> ListView:
        found: Sequence[ProjectView] = head.projects()
        now_s = time.time()
        columns = (
            Column(title="PROJECT", min_width=8),
            Column(title="MEMBERS", min_width=12),
            Column(title="ADMINS", min_width=8, hide_empty=True),
            Column(title="SINCE", right=True),
        )
        rows = [
            [project.id, ", ".join(project.members), ", ".join(project.admins), cells.age(project.created_s, now_s)]
            for project in found
        ]
        return ListView(
            value=found,
            lines=lambda screen: table(columns, rows, screen),
            next_command="phalanx projects add NAME --member USER",
        )

    show_list(fetch, as_json=as_json, watch=watch)
