"""Users, their roles and their tokens. `access` decides what each may do."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from phalanx.core.ids import NodeId, ProjectId, TokenId, UserId
from phalanx.core.work.services.request_limits import NO_REQUEST_LIMITS, RequestLimits


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
class Identity:
    """A person at the sign-in provider, and what the provider last said. Role and projects follow from its groups there.

    Attributes:
        issuer, subject: of which provider, and who there; they never change. `subject` is "" before the first sign-in.
        confirmed_s: when the provider last confirmed it (Unix seconds).
        lapses_s: when access ends unless the provider confirms it again; None for never.
        projects, admin_of: given by its groups.
        sealed: its refresh token, encrypted by the head; "" if the provider gave none.
        ended: why access was lost; "" while it lasts.
    """

    issuer: str
    subject: str
    confirmed_s: float
    lapses_s: float | None
    projects: frozenset[ProjectId] = frozenset()
    admin_of: frozenset[ProjectId] = frozenset()
    sealed: str = field(default="", repr=False)
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person (or a robot) with one role. `identity`: of one that signs in at the provider."""

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False
    identity: Identity | None = None

    @property
    def stays_admin(self) -> bool:
        """Whether the user is an admin whatever a sign-in provider says."""
        return self.role is UserRole.ADMIN and not self.disabled and self.identity is None

    def refusal(self, now_s: float) -> str:
        """Return why none of the user's tokens is valid at that Unix time; "" if they are."""
        if self.disabled:
            return f"user {self.id} is disabled"
        if self.identity is None:
            return ""
        if self.identity.ended:
            return f"user {self.id} has lost access: {self.identity.ended}"
        if self.identity.lapses_s is not None and now_s >= self.identity.lapses_s:
            return f"the sign-in of user {self.id} has lapsed: the provider has not confirmed it for too long"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, stored as the SHA-256 of its 256 random bits; the bits are shown once and never stored.

    Attributes:
        scope: the actions it is limited to; empty for all that its user may do.
        node_id: the node of a supervisor's token.
        made_by: the token that was used to create it.
        used_s: when it was last used, to within some minutes.
        request_limits: of requests to services; `limited_as`: the token with which it shares them, None if that is itself.
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
    request_limits: RequestLimits = NO_REQUEST_LIMITS
    limited_as: TokenId | None = None

    def is_valid(self, now_s: float) -> bool:
        """Whether it is neither expired nor revoked."""
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)
