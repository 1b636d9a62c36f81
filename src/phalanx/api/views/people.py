"""Converts projects, users and tokens to the views that the API returns. Pure."""

from __future__ import annotations

import msgspec

from phalanx.core.work.queue import Project
from phalanx.core.work.sign_in import SignInSettings
from phalanx.core.work.users import Token, User
from phalanx.wire.api.people import ProjectView, TokenView, UserView


def project_view(project: Project, settings: SignInSettings | None) -> ProjectView:
    """Return the view of a project; names are sorted. `settings`: of the sign-in provider, None without one."""
    grants = () if settings is None else settings.grants
    return ProjectView(
        id=project.id,
        members=sorted(project.members),
        admins=sorted(project.admins),
        created_s=project.created_s,
        groups=[one.group for one in grants if project.id in one.projects | one.admin_of],
        budget="" if project.budget is None else str(project.budget),
        outputs_bytes=project.outputs_bytes,
        requests_per_minute=project.request_limits.requests_per_minute,
        tokens_per_minute=project.request_limits.tokens_per_minute,
        request_weight=project.request_weight,
        burst="" if project.burst is None else str(project.burst),
    )


def user_view(user: User, now_s: float) -> UserView:
    """Return the view of a user, without its refresh token."""
    view = UserView(id=user.id, role=user.role, created_s=user.created_s, disabled=user.disabled)
    identity = user.identity
    if identity is None:
        return view
    return msgspec.structs.replace(
        view,
        provider=identity.issuer,
        group_projects=sorted(identity.projects),
        group_admin_of=sorted(identity.admin_of),
        confirmed_s=identity.confirmed_s or None,
        refused="" if user.disabled else user.refusal(now_s),
    )


def token_view(token: Token, used_s: float | None = None) -> TokenView:
    """Return the view of a token, without its hash."""
    return TokenView(
        id=token.id,
        user=token.user,
        created_s=token.created_s,
        expires_s=token.expires_s,
        revoked_s=token.revoked_s,
        scope=sorted(token.scope),
        note=token.note,
        made_by=token.made_by,
        used_s=used_s,
        requests_per_minute=token.request_limits.requests_per_minute,
        tokens_per_minute=token.request_limits.tokens_per_minute,
        limited_as=token.limited_as,
    )
