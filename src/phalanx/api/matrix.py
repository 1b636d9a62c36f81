"""The access matrix as a page: every route of an app, who may call it, and on whose things. Made from the table (core.access.rules)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI

from phalanx.api.routes import GatedRoute
from phalanx.core.access.rules import Reach, Tie, Verdict, judge
from phalanx.core.work.people import Action, UserRole

_TIES: Final = (Tie.OWN, Tie.SAME_PROJECT, Tie.OTHER_PROJECT)
_NO: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Somebody who calls. `scope` as of a token; `project_admin`: of the project that "same project" means."""

    title: str
    role: UserRole
    scope: frozenset[Action] = frozenset()
    project_admin: bool = False

    def judge(self, route: GatedRoute, tie: Tie) -> Verdict:
        """What this caller is answered by a route about a thing so tied to them."""
        declared = route.declared
        if declared.open_to_all:
            return Verdict.YES
        over = self.project_admin and tie is not Tie.OTHER_PROJECT
        return judge(self.role, self.scope, declared.action, route.reach, tie, project_admin=over)


COLUMNS: Final = (
    Column(title="viewer", role=UserRole.VIEWER),
    Column(title="user", role=UserRole.USER),
    Column(title="project admin", role=UserRole.USER, project_admin=True),
    Column(title="operator", role=UserRole.OPERATOR),
    Column(title="admin", role=UserRole.ADMIN),
    Column(title="supervisor", role=UserRole.NODE),
    Column(title="join token", role=UserRole.NODE, scope=frozenset({Action.JOIN})),
)
_HEAD: Final = """# Who may call what

*Made from the table in `phalanx.core.access.rules` and the routes themselves; a test compares this page with them, and sends every call
below to a real head: what is refused changes nothing. After a wanted change: `PHALANX_GOLDEN=write pytest tests/contract/test_access_matrix.py`.*

A cell says on whose things: `all`; `own`; `project`: own, and those of the project they are an admin of; `-`: refused. Without a token, or
with one that is unknown, expired, revoked or of a disabled user, every route but the open ones answers 401, and nothing else is looked at.
A token with a scope does what its user may *and* its scope names. What is refused is 403; another's token or exec session is 404,
since that it exists is nobody's business. `audit`: the call leaves a line in the [audit trail](operations.md#audit-trail).

"""


def gated_routes(app: FastAPI) -> list[GatedRoute]:
    """All routes of the app, by path."""
    found = [route for route in app.router.routes if isinstance(route, GatedRoute)]
    return sorted(found, key=lambda route: (route.path, sorted(route.methods or ())))


def page(app: FastAPI) -> str:
    """The page in Markdown."""
    titles = ["route", "action", "touches", *(column.title for column in COLUMNS), "audit"]
    rows = [titles, ["---"] * len(titles)]
    for route in gated_routes(app):
        cells = [cell(column, route) for column in COLUMNS]
        rows += [
            [f"`{method} {route.path}`", _action(route), route.reach.value, *cells, "yes" if route.lasting else ""]
            for method in sorted(route.methods or ())
        ]
    return _HEAD + "\n".join(_line(row) for row in rows) + "\n"


def cell(column: Column, route: GatedRoute) -> str:
    """On whose things this caller may."""
    ties = [tie for tie in _TIES if column.judge(route, tie) is Verdict.YES]
    return (
        {3: "all", 2: "project", 1: "own", 0: _NO}[len(ties)] if route.reach is not Reach.PROJECT else _of_project(ties)
    )


def _of_project(ties: Sequence[Tie]) -> str:
    """A project belongs to nobody: what counts is who is its admin."""
    return {3: "all", 0: _NO}.get(len(ties), "project")


def _action(route: GatedRoute) -> str:
    return "open" if route.declared.open_to_all else route.declared.action.value


def _line(row: Iterable[str]) -> str:
    return "| " + " | ".join(row) + " |"
