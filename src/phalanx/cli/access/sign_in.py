"""`phalanx sign-in`: the provider of OpenID Connect at which people sign in, and what its groups give."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from phalanx.cli import cells
from phalanx.cli.command_groups import list_group
from phalanx.cli.connection import PROVIDER_ANSWER_S, connect
from phalanx.cli.list_output import ListView
from phalanx.cli.option_types import GrammarType
from phalanx.cli.tables import Column, table
from phalanx.cli.terminal import Terminal, strip_control, terminal
from phalanx.core.errors import BadRequest
from phalanx.core.units import format_duration, parse_duration_s
from phalanx.core.work.users import UserRole

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.sign_in import SignInView

_DURATION: Final = GrammarType("TIME", lambda text: parse_duration_s(text, what="time"))
_NEXT: Final = "phalanx sign-in set --issuer https://id.example.org --client-id phalanx --url https://gpu-head:7600"


@list_group("Sign-in at a provider (OpenID Connect), and what its groups give.", subcommand="show")
def sign_in(head: Client, now_s: float) -> ListView:
    """Show the provider and its groups."""
    found = head.sign_in()
    following = "" if found.groups else "phalanx sign-in map GROUP --role user"
    return ListView(
        value=found,
        lines=lambda screen: _lines(found, screen, now_s),
        next_command=following if found.issuer else _NEXT,
    )


@sign_in.command("set")
@click.option("--issuer", metavar="URL", help="Address of the provider, exactly as it calls itself.")
@click.option("--client-id", metavar="NAME", help="Name of this head at the provider.")
@click.option(
    "--client-secret-file",
    "secret_file",
    metavar="NAME",
    help="File with the client's secret, in the folder `secrets` of the head; '' for a client without one.",
)
@click.option(
    "--url",
    metavar="URL",
    help="URL of the head in browsers, several with commas; the provider leads back to /sign-in/return there.",
)
@click.option(
    "--groups-claim", metavar="CLAIM", help="Claim with the groups: groups by default; dots lead into objects."
)
@click.option("--user-claim", metavar="CLAIM", help="Claim with the name: preferred_username by default.")
@click.option("--scopes", metavar="LIST", help="Scopes to request, with spaces; '' for those that the provider offers.")
@click.option("--recheck", "recheck_s", type=_DURATION, help="How often each person is checked there: 15m by default.")
@click.option("--outage", "outage_s", type=_DURATION, help="How long access outlasts the last check: 8h by default.")
def set_(**given: str | None) -> None:
    """Set the provider, or change it. The head then reads what the provider says about itself."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise BadRequest("nothing to set", hint=_NEXT)
    for name in ("recheck_s", "outage_s"):
        if name in changes:
            changes[name] = parse_duration_s(changes[name], what=name.removesuffix("_s"))
    if "scopes" in changes:
        changes["scopes"] = changes["scopes"].split()
    head = connect(answer_timeout_s=PROVIDER_ANSWER_S)
    found = head.put_sign_in(changes)
    print("\n".join(_lines(found, terminal(), time.time())))
    _check(head)


@sign_in.command()
def check() -> None:
    """Let the head read the provider's metadata and keys, and the client's secret."""
    _check(connect(answer_timeout_s=PROVIDER_ANSWER_S))


@sign_in.command("map")
@click.argument("group")
@click.option(
    "--role",
    type=click.Choice([role.value for role in UserRole if role is not UserRole.NODE]),
    help="Role of its members; of several groups the highest counts.",
)
@click.option(
    "--project", "projects", multiple=True, metavar="PROJECT", help="Of which they are members; may be repeated."
)
@click.option("--admin-of", multiple=True, metavar="PROJECT", help="Of which they are admins; may be repeated.")
def map_(group: str, role: str | None, projects: tuple[str, ...], admin_of: tuple[str, ...]) -> None:
    """Set what the members of GROUP get; '*' is everyone at the provider. Replaces what they got before."""
    if role is None and not projects and not admin_of:
        raise BadRequest(
            "nothing to give", hint="give --role, --project or --admin-of; phalanx sign-in unmap GROUP takes all"
        )
    head = connect()
    kept = [_plain(one) for one in _settings(head).groups if one.group != group]
    new = {"group": group, "role": role, "projects": list(projects), "admin_of": list(admin_of)}
    print("\n".join(_lines(head.put_sign_in({"groups": [*kept, new]}), terminal(), time.time())))


@sign_in.command()
@click.argument("group")
def unmap(group: str) -> None:
    """Give nothing to the members of GROUP any more."""
    head = connect()
    groups = _settings(head).groups
    kept = [_plain(one) for one in groups if one.group != group]
    if len(kept) == len(groups):
        raise BadRequest(f"group {group!r} gives nothing", hint="phalanx sign-in lists the groups")
    print("\n".join(_lines(head.put_sign_in({"groups": kept}), terminal(), time.time())))


@sign_in.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(yes: bool) -> None:
    """Remove the provider. All who signed in there lose access."""
    head = connect()
    issuer = _settings(head).issuer
    if not yes and not click.confirm(strip_control(f"Remove {issuer}? All who signed in there lose access.")):
        return
    head.remove_sign_in()
    print(strip_control(f"{issuer} removed"))


def _settings(head: Client) -> SignInView:
    found = head.sign_in()
    if not found.issuer:
        raise BadRequest("this head has no sign-in provider", hint=_NEXT)
    return found


def _plain(grant: Any) -> dict[str, Any]:
    return {"group": grant.group, "role": grant.role, "projects": grant.projects, "admin_of": grant.admin_of}


def _check(head: Client) -> None:
    found = head.check_sign_in()
    device = ", signs in devices by a code" if "device_authorization_endpoint" in found.endpoints else ""
    print(strip_control(f"{found.issuer} answers: {found.keys} keys, scopes {' '.join(found.scopes)}{device}"))


def _lines(found: SignInView, screen: Terminal, now_s: float) -> list[str]:
    if not found.issuer:
        return ["no sign-in provider: people sign in with tokens and links"]
    facts = [
        ("provider", f"{found.issuer}, client {found.client_id}"),
        ("register there", " ".join(found.return_urls)),
        ("client's secret", f"secrets/{found.secret_file}" if found.secret_file else "none"),
        ("claims", f"name {found.user_claim}, groups {found.groups_claim}"),
        (
            "checks",
            f"each {format_duration(found.recheck_s)}; without an answer access ends after {format_duration(found.outage_s)}",
        ),
        ("set by", f"{found.by}, {cells.age(found.at_s, now_s)} ago"),
    ]
    if found.scopes:
        facts.insert(4, ("scopes", " ".join(found.scopes)))
    columns = (
        Column(title="GROUP", min_width=8),
        Column(title="ROLE"),
        Column(title="PROJECTS"),
        Column(title="ADMIN OF", hide_empty=True),
    )
    rows = [[one.group, one.role or "", ", ".join(one.projects), ", ".join(one.admin_of)] for one in found.groups]
    lines = [strip_control(f"{name + ':':<17}{value}") for name, value in facts]
    return [
        *lines,
        "",
        *(table(columns, rows, screen) if rows else ["no group gives anything: no user can sign in there"]),
    ]
