"""The table of permissions: by role, by token scope, and by the caller's relation to the object. Authentication, routes and the printed
permission matrix use it.

A role applies everywhere. A project admin has additional rights only in that project, and only with role `user`: a viewer who is a project
admin stays a viewer.
"""

from __future__ import annotations

import enum
from typing import Final

from phalanx.core.work.people import Action, UserRole


class Reach(enum.StrEnum):
    """Kind of object that a route acts on; it determines what is checked besides the role."""

    NOBODY = "nobody's"  # objects without an owner: nodes, queues, lists, new objects of the caller
    JOB = "a job"  # its owner; admins of its project; operators
    TOKEN = "a token"  # noqa: S105  # its user; admins. For all others it does not exist
    SESSION = "an exec session"  # who opened it. For all others it does not exist
    PROJECT = "a project"  # its admins, for its members; admins
    NODE = "a node"  # its own supervisor


REACH_OF: Final[dict[Action, Reach]] = {
    Action.SEE: Reach.NOBODY,
    Action.SUBMIT: Reach.NOBODY,
    Action.CHANGE_OWN: Reach.JOB,
    Action.SEE_OUTPUT: Reach.JOB,
    Action.OWN_TOKENS: Reach.TOKEN,
    Action.MANAGE_PROJECT: Reach.PROJECT,
    Action.OPERATE: Reach.NOBODY,
    Action.ADMINISTER: Reach.NOBODY,
    Action.SUPERVISE: Reach.NODE,
    Action.JOIN: Reach.NOBODY,
}

_USER: Final = frozenset(
    {Action.SEE, Action.SUBMIT, Action.CHANGE_OWN, Action.SEE_OUTPUT, Action.OWN_TOKENS, Action.MANAGE_PROJECT}
)
GRANTS: Final[dict[UserRole, frozenset[Action]]] = {
    UserRole.VIEWER: frozenset({Action.SEE}),
    UserRole.USER: _USER,
    UserRole.OPERATOR: _USER | {Action.OPERATE},
    UserRole.ADMIN: _USER | {Action.OPERATE, Action.ADMINISTER, Action.JOIN},
    UserRole.NODE: frozenset({Action.SUPERVISE, Action.JOIN}),
}

# Actions included in a wider one if a token's scope contains only that one.
INCLUDES: Final[dict[Action, frozenset[Action]]] = {Action.ADMINISTER: frozenset({Action.MANAGE_PROJECT})}


class Verdict(enum.StrEnum):
    """The answer to a call."""

    YES = "yes"
    NOT_SIGNED_IN = "401"
    NOT_PERMITTED = "403"
    NOT_FOUND = "404"  # if the caller must not even learn that the object exists


class Tie(enum.StrEnum):
    """The caller's relation to the object."""

    OWN = "own"
    SAME_PROJECT = "same project"
    OTHER_PROJECT = "other project"


def judge(
    role: UserRole, scope: frozenset[Action], action: Action, reach: Reach, tie: Tie, *, project_admin: bool = False
) -> Verdict:
    """Decide on a call by an authenticated caller.

    Args:
        role: of the user; NODE for a supervisor and for a join token.
        scope: actions that the token is limited to; empty for all that the role allows.
        action: of the route.
        reach: of the route.
        tie: of the caller to the object.
        project_admin: whether the caller is an admin of the object's project (or of the project itself).
    """
    if not allows(role, scope, action):
        return Verdict.NOT_PERMITTED
    own = tie is Tie.OWN
    match reach:
        case Reach.NOBODY:
            return Verdict.YES
        case Reach.JOB:
            return _yes_or(Verdict.NOT_PERMITTED, own or project_admin or role in OVER_JOBS)
        case Reach.TOKEN:
            return _yes_or(Verdict.NOT_FOUND, own or allows(role, scope, Action.ADMINISTER))
        case Reach.SESSION:
            return _yes_or(Verdict.NOT_FOUND, own)
        case Reach.PROJECT:
            return _yes_or(Verdict.NOT_PERMITTED, project_admin or allows(role, scope, Action.ADMINISTER))
        case Reach.NODE:
            return _yes_or(Verdict.NOT_PERMITTED, own)


OVER_JOBS: Final = frozenset({UserRole.OPERATOR, UserRole.ADMIN})  # roles that may change all users' jobs


def allows(role: UserRole, scope: frozenset[Action], action: Action) -> bool:
    """Whether role and scope include the action."""
    return action in GRANTS[role] and (
        not scope or action in scope or any(action in INCLUDES.get(one, ()) for one in scope)
    )


def _yes_or(otherwise: Verdict, yes: bool) -> Verdict:
    return Verdict.YES if yes else otherwise
