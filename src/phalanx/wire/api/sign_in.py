"""Records of the sign-in at a provider."""

from __future__ import annotations

import msgspec

from phalanx.core.ids import ProjectId, UserId
from phalanx.core.work.users import UserRole


class GroupGrantBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the members of a group at the provider get; group `*`: all people whom it signs in."""

    group: str
    role: UserRole | None = None
    projects: list[ProjectId] = []
    admin_of: list[ProjectId] = []


class SignInView(msgspec.Struct, frozen=True, kw_only=True):
    """The provider, or an empty issuer without one. `return_urls`: to register there. `secret_file`: its name, in the folder `secrets`."""

    issuer: str
    client_id: str = ""
    secret_file: str = ""
    url: str = ""
    return_urls: list[str] = []
    user_claim: str = ""
    groups_claim: str = ""
    scopes: list[str] = []
    recheck_s: float = 0.0
    outage_s: float = 0.0
    groups: list[GroupGrantBody] = []
    by: UserId = UserId("")
    at_s: float = 0.0


class SignInBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the sign-in at a provider; absent fields stay unchanged. `groups` replaces all groups; `url`: several heads with commas."""

    issuer: str | None = None
    client_id: str | None = None
    secret_file: str | None = None
    url: str | None = None
    user_claim: str | None = None
    groups_claim: str | None = None
    scopes: list[str] | None = None
    recheck_s: float | None = None
    outage_s: float | None = None
    groups: list[GroupGrantBody] | None = None


class ProviderCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider says about itself. `scopes`: that the head requests; `keys`: the number of its keys."""

    issuer: str
    endpoints: dict[str, str]
    scopes: list[str]
    keys: int
