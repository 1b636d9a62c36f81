"""Callers and their permissions, by the table in `access.rules`."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.core.access.rules import (
    AccessDecision,
    AccessScope,
    CallerRelation,
    allows,
    decide,
)
from phalanx.core.ids import NodeId, ProjectId, TokenId, UserId
from phalanx.core.work.services.request_limits import NO_REQUEST_LIMITS, RequestLimits
from phalanx.core.work.users import (
    Action,
    Token,
    User,
    UserRole,
)

__all__ = ["Action", "Caller", "Token", "User", "UserRole", "may", "may_access_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a request's token.

    Attributes:
        sha256: of the token, to check it again while a stream is open; empty for derived tokens.
        request_limits: of the token, on requests to services; `limited_as`: the token with which it shares them, None if that is itself.
        joins_as: the only node as which it may join; None if it may choose the name.
        session: key of the browser's session that the request came with; empty if the request carried the token itself.
    """

    user: UserId
    role: UserRole
    token_id: TokenId
    scope: frozenset[Action] = frozenset()
    node_id: NodeId | None = None
    joins_as: NodeId | None = None
    projects: frozenset[ProjectId] = frozenset()
    admin_of: frozenset[ProjectId] = frozenset()
    request_limits: RequestLimits = NO_REQUEST_LIMITS
    limited_as: TokenId | None = None
    sha256: str = field(default="", repr=False)
    session: str = field(default="", repr=False)


def may(caller: Caller, action: Action) -> bool:
    """Whether the caller's role and token allow the action in general."""
    return allows(caller.role, caller.scope, action)


def may_access_job(caller: Caller, action: Action, *, owner: UserId, project: ProjectId) -> bool:
    """Whether the caller may do this to the owner's job in this project. Operators may for all jobs, project admins for their project's."""
    tie = (
        CallerRelation.OWN
        if caller.user == owner
        else CallerRelation.SAME_PROJECT
        if project in caller.projects
        else CallerRelation.OTHER_PROJECT
    )
    found = decide(caller.role, caller.scope, action, AccessScope.JOB, tie, project_admin=project in caller.admin_of)
    return found is AccessDecision.ALLOWED
