"""The one table of who may do what: by role, by scope, and by whose thing it is. The gate, the routes and the printed matrix read it.

A role is what a user is everywhere. An admin of a project is more only inside it, and never more than a user: a viewer who is named one
stays a viewer.
"""

from __future__ import annotations

import enum
from typing import Final

from phalanx.core.work.people import Action, UserRole


class Reach(enum.StrEnum):
    """Whose thing a route touches, and so what is asked beside the role."""

    NOBODY = "nobody's"  # what belongs to nobody in particular: nodes, queues, lists, the caller's own new things
    JOB = "a job"  # its owner; admins of its project; operators
    TOKEN = "a token"  # noqa: S105  # its user; admins. To all others it does not exist
    SESSION = "an exec session"  # who opened it. To all others it does not exist
    PROJECT = "a project"  # its admins, as far as members go; admins
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

# What a wider action brings with it where a token's scope names only that one.
INCLUDES: Final[dict[Action, frozenset[Action]]] = {Action.ADMINISTER: frozenset({Action.MANAGE_PROJECT})}


class Verdict(enum.StrEnum):
    """What a call is answered."""

    YES = "yes"
    NOT_SIGNED_IN = "401"
    NOT_PERMITTED = "403"
    NOT_FOUND = "404"  # where even that it exists is nobody else's business


class Tie(enum.StrEnum):
    """What the caller has to do with the thing."""

    OWN = "own"
    SAME_PROJECT = "same project"
    OTHER_PROJECT = "other project"


def judge(
    role: UserRole, scope: frozenset[Action], action: Action, reach: Reach, tie: Tie, *, project_admin: bool = False
) -> Verdict:
    """What somebody signed in is answered.

    Args:
        role: of the user, or NODE for a supervisor and for a join token.
        scope: what the token is narrowed to; empty for all that the role may.
        action: of the route.
        reach: of the route.
        tie: between the caller and the thing.
        project_admin: whether the caller is an admin of the thing's project (or of the project itself).
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


OVER_JOBS: Final = frozenset({UserRole.OPERATOR, UserRole.ADMIN})  # who touch everybody's jobs


def allows(role: UserRole, scope: frozenset[Action], action: Action) -> bool:
    """Whether role and scope have the action at all."""
    return action in GRANTS[role] and (
        not scope or action in scope or any(action in INCLUDES.get(one, ()) for one in scope)
    )


def _yes_or(otherwise: Verdict, yes: bool) -> Verdict:
    return Verdict.YES if yes else otherwise
