"""Sign-in at a provider of OpenID Connect: its settings, and what the groups of a person there give that person here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from phalanx.core.ids import ProjectId, UserId
from phalanx.core.work.users import UserRole

PROVIDER: Final = "provider"
"""The id of the only document."""
EVERYONE: Final = "*"
"""In place of a group: all people whom the provider signs in."""
RECHECK_S: Final = 15 * 60.0
OUTAGE_S: Final = 8 * 3600.0  # a working day
GROUPS_MAX: Final = 10_000  # of one person; more are not read
_RANKS: Final = (UserRole.VIEWER, UserRole.USER, UserRole.OPERATOR, UserRole.ADMIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGrant:
    """What the members of one group at the provider get.

    Attributes:
        role: None for none of its own: then another group must give one.
        projects, admin_of: of which they are members, and admins.
    """

    group: str
    role: UserRole | None = None
    projects: frozenset[ProjectId] = frozenset()
    admin_of: frozenset[ProjectId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SignInSettings:
    """The provider, and how this head uses it.

    Attributes:
        issuer: its address, exactly as in its tokens.
        client_id: the name of this head at the provider.
        secret_file: name of the file with the client's secret, in the folder `secrets` of the head; "" for a client without secret.
        urls: of the heads as browsers see them, without a path; the provider leads back to a page below them.
        user_claim, groups_claim: claims with the person's name and groups; dots lead into an object.
        scopes: to request; empty for those of SCOPES that the provider offers.
        recheck_s: how often the provider is asked about each person.
        outage_s: how long access lasts if the provider does not answer, or can not be asked about the person.
        at_s: when it was set (Unix seconds).
    """

    issuer: str
    client_id: str
    urls: tuple[str, ...]
    by: UserId
    at_s: float
    secret_file: str = ""
    user_claim: str = "preferred_username"
    groups_claim: str = "groups"
    scopes: tuple[str, ...] = ()
    recheck_s: float = RECHECK_S
    outage_s: float = OUTAGE_S
    grants: tuple[GroupGrant, ...] = ()
    id: str = PROVIDER

    @property
    def projects(self) -> frozenset[ProjectId]:
        """The projects that groups give. They are not open to all, even without members of their own."""
        return frozenset(name for grant in self.grants for name in (*grant.projects, *grant.admin_of))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantedAccess:
    """What the groups of one person give."""

    role: UserRole
    projects: frozenset[ProjectId]
    admin_of: frozenset[ProjectId]


def granted_access(settings: SignInSettings, groups: Iterable[str]) -> GrantedAccess | None:
    """Return what groups give: the highest of their roles, and all their projects. None if none of them gives a role."""
    known = {EVERYONE, *groups}
    grants = [grant for grant in settings.grants if grant.group in known]
    roles = [grant.role for grant in grants if grant.role is not None]
    if not roles:
        return None
    return GrantedAccess(
        role=max(roles, key=_RANKS.index),
        projects=frozenset(name for grant in grants for name in grant.projects),
        admin_of=frozenset(name for grant in grants for name in grant.admin_of),
    )


def claim_at(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim: that of this name, else the one to which its dots lead; None if it is missing."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for word in name.split("."):
        if not isinstance(found, Mapping) or word not in found:
            return None
        found = found[word]
    return found


def groups_of(settings: SignInSettings, claims: Mapping[str, Any]) -> list[str] | None:
    """Return the groups in a person's claims; a text is one group. None if the claim is missing or of another type."""
    found = claim_at(claims, settings.groups_claim)
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list):
        return None
    return [one for one in found[:GROUPS_MAX] if isinstance(one, str)]
