"""`phalanx projects`: accounting groups and their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from phalanx.cli import cells
from phalanx.cli.access.request_limit_options import request_limit_options
from phalanx.cli.command_groups import check_exists, check_new, list_group
from phalanx.cli.connection import connect
from phalanx.cli.list_output import ListView, list_options, show_list
from phalanx.cli.option_types import GrammarType
from phalanx.cli.report.cost import budget_text
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import strip_control
from phalanx.core.errors import BadRequest
from phalanx.core.units import format_bytes, parse_memory_bytes
from phalanx.core.work.burst_rule import EXAMPLE
from phalanx.core.work.services.request_limits import RequestLimits, parse_weight
from phalanx.core.work.usage.monthly_budget import parse_budget
from phalanx.wire.api.people import ProjectView

if TYPE_CHECKING:
    from phalanx.client import Client


_CLEAN: Final = "phalanx clean --older-than 30d --only outputs"
_NEARLY_FULL: Final = 80  # percent of the space for outputs
BUDGET: Final = GrammarType("AMOUNT", lambda text: None if text == "none" else parse_budget(text))
WEIGHT: Final = GrammarType("N", parse_weight)
OUTPUTS: Final = GrammarType("SIZE", lambda text: None if text == "none" else parse_memory_bytes(text, what="outputs"))


@list_group("List projects; show, add or change one.")
def projects(head: Client, now_s: float) -> ListView:
    """List projects."""
    found: Sequence[ProjectView] = head.projects()
    columns = (
        Column(title="PROJECT", min_width=8),
        Column(title="MEMBERS", min_width=12),
        Column(title="GROUPS", min_width=8, hide_empty=True, drop_order=2),
        Column(title="ADMINS", min_width=8, hide_empty=True),
        Column(title="BUDGET", hide_empty=True, drop_order=1),
        Column(title="SINCE", right=True),
    )
    rows = [
        [
            project.id,
            ", ".join(project.members),
            ", ".join(project.groups),
            ", ".join(project.admins),
            project.budget,
            cells.age(project.created_s, now_s),
        ]
        for project in found
    ]
    return ListView(
        value=found,
        lines=lambda screen: table(columns, rows, screen),
        next_command="phalanx projects add NAME --member USER",
    )


@projects.command()
@click.argument("name")
@list_options
def show(name: str, as_json: bool, watch: bool) -> None:
    """Show the members of a project, what it has spent this month (UTC), and a forecast of the month's end."""
    head = connect()

    def fetch() -> ListView:
        found = {str(project.id): project for project in head.projects()}
        check_exists("project", name, found)
        spending, reply = head.spending(name), head.project(name)
        used = reply.outputs_used_bytes or 0
        limit = f" of {format_bytes(reply.project.outputs_bytes)}" if reply.project.outputs_bytes else ""
        outputs = f"outputs at the head: {format_bytes(used)}{limit}"
        nearly_full = used * 100 >= reply.project.outputs_bytes * _NEARLY_FULL > 0
        return ListView(
            value={"project": found[name], "spending": spending, "outputs_used_bytes": used},
            lines=lambda _: [strip_control(_summary(found[name])), outputs],
            notes=(budget_text(spending),) if spending.currency else ("no prices are stored: nothing has a cost",),
            next_command=_CLEAN if nearly_full else f"phalanx report cost --by user --month {spending.month}",
        )

    show_list(fetch, as_json=as_json, watch=watch)


@projects.command()
@click.argument("name")
@click.option("--member", "members", multiple=True, metavar="USER", help="May submit jobs; repeatable.")
@click.option(
    "--admin", "admins", multiple=True, metavar="USER", help="May also change the jobs of others; repeatable."
)
@click.option("--budget", type=BUDGET, help='Warn at 80 and 100 % of it: "5000 EUR/month".')
@click.option("--outputs", type=OUTPUTS, help="Most that nodes may store at the head of its jobs' outputs: 500G.")
@request_limit_options
@click.option(
    "--weight",
    "request_weight",
    type=WEIGHT,
    help="Part of a busy service that it gets, relative to other projects.  [1]",
)
@click.option("--burst", metavar="RULE", help=f'When its jobs rent nodes, if their queue says nothing: "{EXAMPLE}".')
def add(name: str, members: tuple[str, ...], admins: tuple[str, ...], **terms: str | None) -> None:
    """Add a project."""
    head = connect()
    check_new("project", name, (project.id for project in head.projects()))
    made = head.put_project(name, members=sorted({*members, *admins}), admins=sorted(admins), **terms)
    print(strip_control(_summary(made)))


@projects.command(name="set")
@click.argument("name")
@click.option("--add-member", multiple=True, metavar="USER", help="May submit jobs.")
@click.option("--remove-member", multiple=True, metavar="USER", help="Removed, also as an admin.")
@click.option("--add-admin", multiple=True, metavar="USER", help="May also change the jobs of others.")
@click.option("--remove-admin", multiple=True, metavar="USER", help="No longer an admin, still a member.")
@click.option("--budget", type=BUDGET, help='Warn at 80 and 100 % of it: "5000 EUR/month", or none.')
@click.option(
    "--outputs", type=OUTPUTS, help="Most that nodes may store at the head of its jobs' outputs: 500G, or none."
)
@request_limit_options
@click.option(
    "--weight", "request_weight", type=WEIGHT, help="Part of a busy service that it gets, relative to other projects."
)
@click.option(
    "--burst", metavar="RULE", help=f'When its jobs rent nodes, if their queue says nothing: "{EXAMPLE}", or none.'
)
def set_(
    name: str,
    add_member: tuple[str, ...],
    remove_member: tuple[str, ...],
    add_admin: tuple[str, ...],
    remove_admin: tuple[str, ...],
    **terms: str | None,
) -> None:
    """Change the members, admins, budget, space for outputs, request limits and burst rule of a project."""
    people = bool(add_member or remove_member or add_admin or remove_admin)
    if not people and not any(terms.values()):
        raise BadRequest(
            "nothing to change",
            hint="give --add-member, --remove-member, --add-admin, --remove-admin, --budget, --outputs, --requests-per-minute, "
            "--tokens-per-minute, --weight or --burst",
        )
    head = connect()
    found = {str(project.id): project for project in head.projects()}
    check_exists("project", name, found)
    project = found[name]
    if not people:
        print(strip_control(_summary(head.put_project(name, **terms))))
        return
    members = {*map(str, project.members), *add_member, *add_admin} - {*remove_member}
    admins = {*map(str, project.admins), *add_admin} - {*remove_admin, *remove_member}
    changed = head.put_project(name, members=sorted(members), admins=sorted(admins), **terms)
    print(strip_control(_summary(changed)))


def _summary(project: ProjectView) -> str:
    admins = f"; admins {', '.join(project.admins)}" if project.admins else ""
    budget = f"; budget {project.budget}" if project.budget else ""
    outputs = f"; outputs at most {format_bytes(project.outputs_bytes)}" if project.outputs_bytes else ""
    limits = RequestLimits(requests_per_minute=project.requests_per_minute, tokens_per_minute=project.tokens_per_minute)
    rates = f"; services: {limits}" if limits else ""
    weight = f"; weight {project.request_weight:g}" if project.request_weight != 1.0 else ""
    burst = f"; burst {project.burst}" if project.burst else ""
    return f"project {project.id}: members {', '.join(project.members) or 'none'}{admins}{budget}{outputs}{rates}{weight}{burst}"
