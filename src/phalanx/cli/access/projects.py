"""`phalanx projects`: accounting groups and their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import check_exists, check_new, list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest
from phalanx.wire.api.people import ProjectView

if TYPE_CHECKING:
    from phalanx.client import Client


@list_group("List projects; add or change one.")
def projects(head: Client, now_s: float) -> ListView:
    """List projects."""
    found: Sequence[ProjectView] = head.projects()
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


@projects.command()
@click.argument("name")
@click.option("--member", "members", multiple=True, metavar="USER", help="May submit jobs; repeatable.")
@click.option(
    "--admin", "admins", multiple=True, metavar="USER", help="May also change the jobs of others; repeatable."
)
def add(name: str, members: tuple[str, ...], admins: tuple[str, ...]) -> None:
    """Add a project."""
    head = connect()
    check_new("project", name, (project.id for project in head.projects()))
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
    found = {str(project.id): project for project in head.projects()}
    check_exists("project", name, found)
    project = found[name]
    members = {*map(str, project.members), *add_member, *add_admin} - {*remove_member}
    admins = {*map(str, project.admins), *add_admin} - {*remove_admin, *remove_member}
    print(strip_control(_summary(head.put_project(name, members=sorted(members), admins=sorted(admins)))))


def _summary(project: ProjectView) -> str:
    admins = f"; admins {', '.join(project.admins)}" if project.admins else ""
    return f"project {project.id}: members {', '.join(project.members) or 'none'}{admins}"
