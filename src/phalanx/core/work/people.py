"""Who there is: users, their roles, and the tokens that speak for them. What each may do is decided in `access`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phalanx.core.ids import NodeId, TokenId, UserId


class UserRole(enum.StrEnum):
    """From least to most. NODE is no person: a supervisor's token has it and nothing else."""

    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"
    NODE = "node"


class Action(enum.StrEnum):
    """What a route does; every route names exactly one."""

    SEE = "see"
    SUBMIT = "submit"
    CHANGE_OWN = "change_own"  # cancel, hold, attach, exec, get ... of a job
    SEE_OUTPUT = "see_output"  # logs and files of a job
    MANAGE_PROJECT = "manage_project"  # who belongs to a project that one is an admin of
    OPERATE = "operate"  # nodes, queues
    ADMINISTER = "administer"  # users, projects, others' tokens
    OWN_TOKENS = "own_tokens"
    SUPERVISE = "supervise"  # the supervisors' channel
    JOIN = "join"  # bring a server in: be given a node's token


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person (or a robot) with one role."""

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token by the SHA-256 of its 256 random bits; the bits themselves are shown once and kept nowhere.

    Attributes:
        scope: actions it is narrowed to; empty for all its user may do.
        node_id: for a supervisor's token, the node it speaks for.
        made_by: the token that it was made with.
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

    def good(self, now_s: float) -> bool:
        """Neither expired nor revoked."""
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)
