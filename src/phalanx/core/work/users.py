"""Users, their roles and their tokens. `access` decides what each may do."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.core.ids import NodeId, TokenId, UserId


class UserRole(enum.StrEnum):
    """From least to most privileged. NODE is the role of a supervisor's token, not of a person."""

    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"
    NODE = "node"


class Action(enum.StrEnum):
    """What a route does; every route declares exactly one."""

    VIEW = "see"
    SUBMIT = "submit"
    CHANGE_OWN = "change_own"  # cancel, hold, attach, exec, get ... of a job
    VIEW_OUTPUT = "see_output"  # logs and files of a job
    MANAGE_PROJECT = "manage_project"  # members of a project that the user administers
    OPERATE = "operate"  # nodes, queues
    ADMINISTER = "administer"  # users, projects, others' tokens
    MANAGE_OWN_TOKENS = "own_tokens"
    SUPERVISE = "supervise"  # the supervisors' API
    JOIN = "join"  # add a server: obtain a node's token


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person (or a robot) with one role."""

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, stored as the SHA-256 of its 256 random bits; the bits are shown once and never stored.

    Attributes:
        scope: the actions it is limited to; empty for all that its user may do.
        node_id: the node of a supervisor's token.
        made_by: the token that was used to create it.
        used_s: when it was last used, to within some minutes.
    """

    id: TokenId
    user: UserId
    sha256: str
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    scope: frozenset[Action] = frozenset()
    node_id: NodeId | None = None
    note: str = ""
    made_by: TokenId | None = None
    used_s: float | None = None

    def is_valid(self, now_s: float) -> bool:
        """Whether it is neither expired nor revoked."""
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)
