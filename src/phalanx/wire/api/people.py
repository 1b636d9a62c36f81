"""Records of users, projects and tokens."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.users import Action, UserRole


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """A user."""

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False


class UserList(msgspec.Struct, frozen=True, kw_only=True):
    """All users by id."""

    users: list[UserView]
    next: str = ""


class UserReply(msgspec.Struct, frozen=True, kw_only=True):
    """One user."""

    user: UserView


class UserBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's settings; absent fields of an existing user stay unchanged."""

    role: UserRole | None = None
    disabled: bool | None = None


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project: an accounting group and its members. `budget`: as "5000 EUR/month"; empty without one."""

    id: ProjectId
    members: list[UserId]
    admins: list[UserId]
    created_s: float = 0.0
    budget: str = ""


class ProjectList(msgspec.Struct, frozen=True, kw_only=True):
    """All projects by id."""

    projects: list[ProjectView]
    next: str = ""


class ProjectReply(msgspec.Struct, frozen=True, kw_only=True):
    """One project."""

    project: ProjectView


class ProjectBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project's settings; absent fields of an existing project stay unchanged. `budget`: "5000 EUR/month", or "none"."""

    members: list[UserId] | None = None
    admins: list[UserId] | None = None
    budget: str | None = None


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    id: TokenId
    user: UserId
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    scope: list[Action] = []
    note: str = ""
    made_by: TokenId | None = None
    used_s: float | None = None


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, oldest first."""

    tokens: list[TokenView]
    next: str = ""


class TokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to create. Only an admin may name another `user`; `expires`: "30d" or "never", default 90 days; `scope`: actions, empty for all."""

    user: UserId | None = None
    expires: str | None = None
    scope: list[Action] = []
    note: str = ""


class TokenCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new token. The secret is shown only here."""

    secret: str
    token: TokenView
