"""Renders the access matrix: every route of an app, and which callers may use it on whose objects, from core.access.rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI

from phalanx.api.http.routing import AuthorizedRoute, AuthorizedWebSocketRoute
from phalanx.core.access.rules import (
    AccessDecision,
    AccessScope,
    CallerRelation,
    decide,
)
from phalanx.core.work.users import Action, UserRole

_TIES: Final = (CallerRelation.OWN, CallerRelation.SAME_PROJECT, CallerRelation.OTHER_PROJECT)
_NO: Final = "-"
GatedRoute = AuthorizedRoute | AuthorizedWebSocketRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerKind:
    """A kind of caller. `scope` is that of its token; `project_admin`: of the project that "same project" means."""

    title: str
    role: UserRole
    scope: frozenset[Action] = frozenset()
    project_admin: bool = False

    def judge(self, route: GatedRoute, tie: CallerRelation) -> AccessDecision:
        """Return whether this caller may use a route on an object with that relation to the caller."""
        declared = route.declared
        if declared.open_to_all:
            return AccessDecision.ALLOWED
        over = self.project_admin and tie is not CallerRelation.OTHER_PROJECT
        return decide(self.role, self.scope, declared.action, route.scope, tie, project_admin=over)


CALLER_KINDS: Final = (
    CallerKind(title="viewer", role=UserRole.VIEWER),
    CallerKind(title="user", role=UserRole.USER),
    CallerKind(title="project admin", role=UserRole.USER, project_admin=True),
    CallerKind(title="operator", role=UserRole.OPERATOR),
    CallerKind(title="admin", role=UserRole.ADMIN),
    CallerKind(title="supervisor", role=UserRole.NODE),
    CallerKind(title="join token", role=UserRole.NODE, scope=frozenset({Action.JOIN})),
)
_HEAD: Final = """# Who may call what

*Generated from the table in `phalanx.core.access.rules` and the routes. A test compares this page with them, and sends every call below
to a real head: refused calls change nothing. After an intended change run `PHALANX_GOLDEN=write pytest tests/contract/test_access_matrix.py`.*

A cell states on whose objects the caller may act: `all`; `own`; `project`: own, and those of projects that the caller is an admin of;
`-`: refused. Without a token, or with one that is unknown, expired, revoked or of a disabled user, every route except the open ones
answers 401 before any other check. A token with a scope may do what its user may do *and* its scope names. Refused calls are answered
403; another user's token, or another supervisor's exec session, is answered 404, as its existence is private. `WEBSOCKET`: a GET with
`Upgrade: websocket`. `audit`: the call leaves a line in the
[audit trail](operations.md#audit-trail).

"""


def gated_routes(app: FastAPI) -> list[GatedRoute]:
    """Return all routes of the app, by path."""
    found = [route for route in app.router.routes if isinstance(route, GatedRoute)]
    return sorted(found, key=lambda route: (route.path, sorted(route.methods or ())))


def render_page(app: FastAPI) -> str:
    """Return the page in Markdown."""
    titles = ["route", "action", "touches", *(column.title for column in CALLER_KINDS), "audit"]
    rows = [titles, ["---"] * len(titles)]
    for route in gated_routes(app):
        cells = [render_cell(column, route) for column in CALLER_KINDS]
        rows += [
            [f"`{method} {route.path}`", _action(route), route.scope.value, *cells, "yes" if route.audited else ""]
            for method in sorted(route.methods or ())
        ]
    return _HEAD + "\n".join(_line(row) for row in rows) + "\n"


def render_cell(column: CallerKind, route: GatedRoute) -> str:
    """Return on whose objects this caller may act."""
    ties = [tie for tie in _TIES if column.judge(route, tie) is AccessDecision.ALLOWED]
    return (
        {3: "all", 2: "project", 1: "own", 0: _NO}[len(ties)]
        if route.scope is not AccessScope.PROJECT
        else _of_project(ties)
    )


def _of_project(ties: Sequence[CallerRelation]) -> str:
    """Return the cell of a route on a project: projects have no owner, only admins."""
    return {3: "all", 0: _NO}.get(len(ties), "project")


def _action(route: GatedRoute) -> str:
    return "open" if route.declared.open_to_all else route.declared.action.value


def _line(row: Iterable[str]) -> str:
    return "| " + " | ".join(row) + " |"
