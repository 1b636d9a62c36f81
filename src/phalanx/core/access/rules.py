"""The table of permissions: by role, by token scope, and by the caller's relation to the object. Authentication, routes and the printed
permission matrix use it.

A role applies everywhere. A project admin has additional rights only in that project, and only with role `user`: a viewer who is a project
admin stays a viewer.
"""

from __future__ import annotations

import enum
from typing import Final

from phalanx.core.work.users import Action, UserRole


class AccessScope(enum.StrEnum):
    """Kind of object that a route acts on; it determines what is checked besides the role."""

    UNOWNED = "unowned"  # objects without an owner: nodes, queues, lists, new objects of the caller
    JOB = "a job"  # its owner; admins of its project; operators
    TOKEN = "a token"  # noqa: S105  # its user; admins. For all others it does not exist
    SESSION = "an exec session"  # the supervisor that runs its command. For all others it does not exist
    PROJECT = "a project"  # its admins, for its members; admins
    NODE = "a node"  # its own supervisor


SCOPE_OF_ACTION: Final[dict[Action, AccessScope]] = {
    Action.VIEW: AccessScope.UNOWNED,
    Action.SUBMIT: AccessScope.UNOWNED,
    Action.CHANGE_OWN: AccessScope.JOB,
    Action.VIEW_OUTPUT: AccessScope.JOB,
    Action.MANAGE_OWN_TOKENS: AccessScope.TOKEN,
    Action.MANAGE_PROJECT: AccessScope.PROJECT,
    Action.OPERATE: AccessScope.UNOWNED,
    Action.ADMINISTER: AccessScope.UNOWNED,
    Action.SUPERVISE: AccessScope.NODE,
    Action.JOIN: AccessScope.UNOWNED,
}

_USER: Final = frozenset(
    {Action.VIEW, Action.SUBMIT, Action.CHANGE_OWN, Action.VIEW_OUTPUT, Action.MANAGE_OWN_TOKENS, Action.MANAGE_PROJECT}
)
GRANTS: Final[dict[UserRole, frozenset[Action]]] = {
    UserRole.VIEWER: frozenset({Action.VIEW}),
    UserRole.USER: _USER,
    UserRole.OPERATOR: _USER | {Action.OPERATE},
    UserRole.ADMIN: _USER | {Action.OPERATE, Action.ADMINISTER, Action.JOIN},
    UserRole.NODE: frozenset({Action.SUPERVISE, Action.JOIN}),
}

# Actions included in a wider one if a token's scope contains only that one.
INCLUDES: Final[dict[Action, frozenset[Action]]] = {Action.ADMINISTER: frozenset({Action.MANAGE_PROJECT})}


class AccessDecision(enum.StrEnum):
    """The answer to a call."""

    ALLOWED = "yes"
    NOT_SIGNED_IN = "401"
    NOT_PERMITTED = "403"
    NOT_FOUND = "404"  # if the caller must not even learn that the object exists


class CallerRelation(enum.StrEnum):
    """The caller's relation to the object."""

    OWN = "own"
    SAME_PROJECT = "same project"
    OTHER_PROJECT = "other project"


def decide(
    role: UserRole,
    scope: frozenset[Action],
    action: Action,
    access_scope: AccessScope,
    relation: CallerRelation,
    *,
    project_admin: bool = False,
) -> AccessDecision:
    """Decide on a call by an authenticated caller.

    Args:
        role: of the user; NODE for a supervisor and for a join token.
        scope: actions that the token is limited to; empty for all that the role allows.
        action: of the route.
        access_scope: of the route.
        relation: of the caller to the object.
        project_admin: whether the caller is an admin of the object's project (or of the project itself).
    """
    if not allows(role, scope, action):
        return AccessDecision.NOT_PERMITTED
    own = relation is CallerRelation.OWN
    match access_scope:
        case AccessScope.UNOWNED:
            return AccessDecision.ALLOWED
        case AccessScope.JOB:
            return _yes_or(AccessDecision.NOT_PERMITTED, own or project_admin or role in ALL_JOBS_ROLES)
        case AccessScope.TOKEN:
            return _yes_or(AccessDecision.NOT_FOUND, own or allows(role, scope, Action.ADMINISTER))
        case AccessScope.SESSION:
            return _yes_or(AccessDecision.NOT_FOUND, own)
        case AccessScope.PROJECT:
            return _yes_or(AccessDecision.NOT_PERMITTED, project_admin or allows(role, scope, Action.ADMINISTER))
        case AccessScope.NODE:
            return _yes_or(AccessDecision.NOT_PERMITTED, own)


ALL_JOBS_ROLES: Final = frozenset({UserRole.OPERATOR, UserRole.ADMIN})  # roles that may change all users' jobs


def allows(role: UserRole, scope: frozenset[Action], action: Action) -> bool:
    """Whether role and scope include the action."""
    return action in GRANTS[role] and (
        not scope or action in scope or any(action in INCLUDES.get(one, ()) for one in scope)
    )


def _yes_or(otherwise: AccessDecision, yes: bool) -> AccessDecision:
    return AccessDecision.ALLOWED if yes else otherwise
