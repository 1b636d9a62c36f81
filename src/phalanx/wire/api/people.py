"""Records of users, projects and tokens."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.work.users import Action, UserRole


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """A user. Of one that signs in at a provider: its issuer, the projects of its groups, and when the provider last confirmed it.

    `refused`: why none of its tokens is valid now, other than being disabled; "" if they are.
    """

    id: UserId
    role: UserRole
    created_s: float = 0.0
    disabled: bool = False
    provider: str = ""
    group_projects: list[ProjectId] = []
    group_admin_of: list[ProjectId] = []
    confirmed_s: float | None = None
    refused: str = ""


class UserList(msgspec.Struct, frozen=True, kw_only=True):
    """All users by id."""

    users: list[UserView]
    next: str = ""


class UserReply(msgspec.Struct, frozen=True, kw_only=True):
    """One user."""

    user: UserView


class UserBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's settings; absent fields of an existing user stay unchanged. `linked`: the first person of that name at the sign-in provider
    becomes this user; false: its tokens no longer depend on the provider.
    """

    role: UserRole | None = None
    disabled: bool | None = None
    linked: bool | None = None


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project: an accounting group and its members. `budget`: as "5000 EUR/month"; empty without one. `outputs_bytes`: what nodes may
    store at the head of its jobs' outputs; 0 for no limit. `requests_per_minute`, `tokens_per_minute`: limits on its requests to services, 0 for
    none; `request_weight`: its part of a busy service. `burst`: when its jobs order nodes that cost money, where their queue says nothing; empty
    without a rule.

    `groups`: at the sign-in provider, whose members belong to it too. Without members and groups it is open to all users.
    """

    id: ProjectId
    members: list[UserId]
    admins: list[UserId]
    created_s: float = 0.0
    budget: str = ""
    groups: list[str] = []
    outputs_bytes: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    request_weight: float = 1.0
    burst: str = ""


class ProjectList(msgspec.Struct, frozen=True, kw_only=True):
    """All projects by id."""

    projects: list[ProjectView]
    next: str = ""


class ProjectReply(msgspec.Struct, frozen=True, kw_only=True):
    """One project. `outputs_used_bytes`: the disk space of its jobs' outputs at the head, up to 10 minutes old; None if not asked for."""

    project: ProjectView
    outputs_used_bytes: int | None = None


class ProjectBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project's settings; absent fields of an existing project stay unchanged. `budget`: "5000 EUR/month", or "none". `outputs`: the limit on
    outputs at the head, "500G" or "none". `requests_per_minute`, `tokens_per_minute`: limits on requests to services, "600", "200k" or "none";
    `request_weight`: the part of a busy service, 0.01 to 1000, 1 by default. `burst`: a rule as in a queue file, or "none".
    """

    members: list[UserId] | None = None
    admins: list[UserId] | None = None
    budget: str | None = None
    outputs: str | None = None
    requests_per_minute: str | None = None
    tokens_per_minute: str | None = None
    request_weight: str | None = None
    burst: str | None = None


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret. `requests_per_minute`, `tokens_per_minute`: limits on requests to services, 0 for none; `limited_as`: the token
    with which it shares them, None if that is itself.
    """

    id: TokenId
    user: UserId
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    scope: list[Action] = []
    note: str = ""
    made_by: TokenId | None = None
    used_s: float | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    limited_as: TokenId | None = None


class TokenList(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, oldest first."""

    tokens: list[TokenView]
    next: str = ""


class TokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token to create. Only an admin may name another `user`; `expires`: "30d" or "never", default 90 days; `scope`: actions, empty for all;
    `requests_per_minute`, `tokens_per_minute`: limits on its requests to services, "600", "200k" or "none".
    """

    user: UserId | None = None
    expires: str | None = None
    scope: list[Action] = []
    note: str = ""
    requests_per_minute: str | None = None
    tokens_per_minute: str | None = None


class TokenCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new token. The secret is shown only here."""

    secret: str
    token: TokenView
