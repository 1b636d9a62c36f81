"""Who may do what. A role is what a user is everywhere; a project's admins are more only inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId, ProjectId, TokenId, UserId
from phalanx.core.work.people import Action, Token, User, UserRole

__all__ = ["Action", "Caller", "Token", "User", "UserRole", "may", "may_touch"]

_GRANTS: Final = {
    UserRole.VIEWER: {Action.SEE},
    UserRole.USER: {Action.SEE, Action.SUBMIT, Action.CHANGE_OWN, Action.SEE_OUTPUT, Action.OWN_TOKENS},
    UserRole.OPERATOR: {
        Action.SEE, Action.SUBMIT, Action.CHANGE_OWN, Action.SEE_OUTPUT, Action.OWN_TOKENS, Action.OPERATE,
    },
    UserRole.ADMIN: {
        Action.SEE, Action.SUBMIT, Action.CHANGE_OWN, Action.SEE_OUTPUT, Action.OWN_TOKENS, Action.OPERATE,
        Action.ADMINISTER, Action.JOIN,
    },
    UserRole.NODE: {Action.SUPERVISE, Action.JOIN},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever a request's token belongs to."""

    user: UserId
    role: UserRole
    token_id: TokenId
    scope: frozenset[Action] = frozenset()
    node_id: NodeId | None = None
    projects: frozenset[ProjectId] = frozenset()
    admin_of: frozenset[ProjectId] = frozenset()


def may(caller: Caller, action: Action) -> bool:
    """Whether the caller's role and token allow the action at all."""
    return action in _GRANTS[caller.role] and (not caller.scope or action in caller.scope)


def may_touch(caller: Caller, action: Action, *, owner: UserId, project: ProjectId) -> bool:
    """Whether the caller may do it to this owner's job in this project. Operators touch all, project admins their project's."""
    if not may(caller, action):
        return False
    if caller.role in (UserRole.OPERATOR, UserRole.ADMIN):
        return True
    return caller.user == owner or project in caller.admin_of
