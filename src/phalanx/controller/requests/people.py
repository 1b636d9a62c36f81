"""Requests about users, projects and tokens. Fields that a request leaves out stay; the last admin stays.

The API authorises the caller before the request arrives here. Another request may have revoked that right in between, so it is checked
again here, where no other request interleaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import join_names
from phalanx.core.access.membership import administers
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted, NotSignedIn
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import TokenId, UserId
from phalanx.core.state.events import (
    ChangeProject,
    ChangeUser,
    PutProject,
    PutToken,
    PutUser,
    RecordTokenUse,
    RevokeToken,
)
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import PROJECTS, SIGN_IN, TOKENS, USERS
from phalanx.core.state.reports import OutputsReached
from phalanx.core.units import format_bytes
from phalanx.core.work.queue import Project
from phalanx.core.work.services.request_limits import RequestLimits
from phalanx.core.work.sign_in import PROVIDER
from phalanx.core.work.users import Action, Identity, Token, User, UserRole

OUTPUTS_WARNING: Final = "outputs_warning"  # kinds of history lines
OUTPUTS_FULL: Final = "outputs_full"
handlers: Final = RequestHandlers()


def _describe_user(user: User) -> str:
    linked = "" if user.identity is None else f" of {user.identity.issuer}"
    return f"user {user.id} role {user.role}{' disabled' if user.disabled else ''}{linked}"


def _describe_project(project: Project) -> str:
    return (
        f"project {project.id} members {join_names(sorted(project.members))} admins {join_names(sorted(project.admins))}"
        + (f" budget {project.budget}" if project.budget is not None else "")
        + (f" limits {project.request_limits}" if project.request_limits else "")
        + (f" weight {project.request_weight:g}" if project.request_weight != 1.0 else "")
        + (f" burst {project.burst}" if project.burst is not None else "")
    )


def _describe_token(token: Token) -> str:
    scope = f" scope {','.join(sorted(token.scope))}" if token.scope else ""
    ends = "" if token.expires_s is None else f" until {token.expires_s:.0f}"
    limits = f" limits {token.request_limits}" if token.request_limits else ""
    return f"token {token.id} of {token.user}{scope}{ends}{limits}"


@handlers.add(PutUser, None, audit=lambda request, _: _describe_user(request.user))
def put_user(context: StepContext, request: PutUser) -> User:
    """Add a user or replace one.

    Raises:
        Conflict: no admin would remain.
    """
    user = request.user
    before = context.world.table(USERS).get(user.id)
    others = (one for one in context.world.table(USERS).values() if one.id != user.id)
    if before is not None and before.stays_admin and not user.stays_admin and not any(o.stays_admin for o in others):
        raise Conflict(f"{user.id} is the last admin", hint=Hint(HintCode.MAKE_ADMIN))
    context.change.put(user)
    return user


@handlers.add(
    ChangeUser,
    Action.ADMINISTER,
    audit=lambda request, answer: (
        _describe_user(answer) if isinstance(answer, User) else f"user {request.user_id} role {request.role}"
    ),
)
def change_user(context: StepContext, request: ChangeUser) -> User:
    """Add a user with role `user`, or change the given fields of one.

    Raises:
        NotPermitted: the caller is no longer an admin.
        Conflict: no admin would remain; or the role follows from groups at the sign-in provider.
        BadRequest: this head has no such provider.
    """
    if request.by is not None:
        _check_admin(context, request.by)
    known = context.world.table(USERS).get(request.user_id)
    if known is None:
        known = User(id=request.user_id, role=UserRole.USER, created_s=context.now.wall_s)
    identity = _changed_identity(context, known, linked=request.linked)
    role = known.role if request.role is None else request.role
    if role != known.role and identity is not None and identity.subject:
        raise Conflict(
            f"the role of {known.id} follows from groups at {identity.issuer}", hint=Hint(HintCode.MAP_GROUPS)
        )
    disabled = known.disabled if request.disabled is None else request.disabled
    return put_user(context, PutUser(user=replace(known, role=role, disabled=disabled, identity=identity)))


def _changed_identity(context: StepContext, user: User, *, linked: bool | None) -> Identity | None:
    """Return the user's identity after a change: until the first sign-in a linked user keeps role and access.

    Raises:
        BadRequest: this head has no sign-in provider.
    """
    if linked is None or linked == (user.identity is not None):
        return user.identity
    if not linked:
        return None
    settings = context.world.table(SIGN_IN).get(PROVIDER)
    if settings is None:
        raise BadRequest("this head has no sign-in provider", hint=Hint(HintCode.SET_SIGN_IN))
    return Identity(issuer=settings.issuer, subject="", confirmed_s=0.0, lapses_s=None)


@handlers.add(PutProject, None, audit=lambda request, _: _describe_project(request.project))
def put_project(context: StepContext, request: PutProject) -> Project:
    """Add or replace a project."""
    context.change.put(request.project)
    return request.project


@handlers.add(
    ChangeProject,
    Action.MANAGE_PROJECT,
    audit=lambda request, answer: (
        _describe_project(answer) if isinstance(answer, Project) else f"project {request.project_id}"
    ),
)
def change_project(context: StepContext, request: ChangeProject) -> Project:
    """Add a project, or change the given fields of one. A project admin may only change the members.

    Raises:
        NotFound: a user does not exist.
        NotPermitted: the caller is no longer an admin of this project (or of the head, with `as_admin`), or changes more than members.
        BadRequest: a project admin would open the project to all users by removing every member.
    """
    unknown = sorted({*(request.members or ()), *(request.admins or ())} - context.world.table(USERS).keys())
    if unknown:
        raise NotFound(f"no user {unknown[0]!r}", hint=Hint(HintCode.ADD_USER))
    known = context.world.table(PROJECTS).get(request.project_id)
    if request.as_admin:
        _check_admin(context, request.by)
    else:
        _check_project_admin(context, known, request)
    project = known or Project(id=request.project_id, created_s=context.now.wall_s)
    project = replace(
        project,
        members=project.members if request.members is None else request.members,
        admins=project.admins if request.admins is None else request.admins,
    )
    if request.without_budget or request.budget not in (None, project.budget):
        project = replace(project, budget=request.budget, budget_warned=None)
    if request.outputs_bytes is not None and request.outputs_bytes != project.outputs_bytes:
        project = replace(project, outputs_bytes=request.outputs_bytes, outputs_warned=0)
    project = replace(
        project,
        request_limits=RequestLimits(
            requests_per_minute=_given(request.requests_per_minute, project.request_limits.requests_per_minute),
            tokens_per_minute=_given(request.tokens_per_minute, project.request_limits.tokens_per_minute),
        ),
        request_weight=project.request_weight if request.request_weight is None else request.request_weight,
        burst=None if request.without_burst else request.burst or project.burst,
    )
    context.change.put(project)
    return project


def _given(asked: int | None, known: int) -> int:
    return known if asked is None else asked


def warn_of_outputs(context: StepContext, reached: OutputsReached) -> None:
    """Write that the outputs of a project nearly fill their space, or do; nothing if the limit has changed since, or a line says so already."""
    project = context.world.table(PROJECTS).get(reached.project_id)
    if project is None or project.outputs_bytes != reached.limit_bytes or project.outputs_warned == reached.percent:
        return
    context.change.put(replace(project, outputs_warned=reached.percent))
    if reached.percent < project.outputs_warned:
        return
    used, limit = format_bytes(reached.used_bytes), format_bytes(reached.limit_bytes)
    text = f"outputs of project {project.id} take {used} of {limit} at the head"
    text += ": no more are taken from nodes" if reached.percent >= 100 else ""
    most = ", ".join(f"{job} ({format_bytes(size)})" for job, size in reached.most)
    context.change.add_history(
        HistoryLine(
            seq=0,
            at_s=context.now.wall_s,
            kind=OUTPUTS_FULL if reached.percent >= 100 else OUTPUTS_WARNING,
            text=text + (f"; most have jobs {most}" if most else ""),
            facts={
                "project": project.id,
                "percent": reached.percent,
                "used_bytes": reached.used_bytes,
                "limit_bytes": reached.limit_bytes,
            },
        )
    )


@handlers.add(PutToken, Action.MANAGE_OWN_TOKENS, audit=lambda request, _: _describe_token(request.token))
def put_token(context: StepContext, request: PutToken) -> Token:
    """Add a token, if the token that it was created with is still valid.

    Raises:
        NotSignedIn: that one is expired or revoked, or its user is disabled.
        NotPermitted: the new token is another user's, and its creator is no longer an admin.
    """
    token = request.token
    maker = None if token.made_by is None else context.world.table(TOKENS).get(token.made_by)
    if maker is not None:
        if not maker.is_valid(context.now.wall_s):
            raise NotSignedIn(f"token {maker.id} is expired or revoked", hint=Hint(HintCode.ADD_TOKEN))
        user = context.world.table(USERS).get(maker.user)
        if user is not None and (why := user.refusal(context.now.wall_s)):
            raise NotSignedIn(why, hint="ask an admin")
        if token.user != maker.user:
            _check_admin(context, maker.user)
        if maker.request_limits:  # shared, so that more tokens do not give more
            token = replace(token, request_limits=maker.request_limits, limited_as=maker.limited_as or maker.id)
    context.change.put(token)
    return token


@handlers.add(
    RevokeToken,
    Action.MANAGE_OWN_TOKENS,
    audit=lambda request, _: f"token {request.token_id}{' and all created with it' if request.with_derived else ''}",
)
def revoke_token(context: StepContext, request: RevokeToken) -> Token:
    """Revoke a token; with `with_derived` also the tokens created with it, transitively.

    Raises:
        NotFound: no such token.
    """
    token = context.world.table(TOKENS).get(request.token_id)
    if token is None:
        raise NotFound(f"no token {request.token_id}", hint=Hint(HintCode.LIST_TOKENS))
    revoked = {request.token_id}
    if request.with_derived:
        revoked |= _made_with(context, request.token_id)
    for token_id in sorted(revoked):
        one = context.world.table(TOKENS)[token_id]
        if one.revoked_s is None:
            context.change.put(replace(one, revoked_s=context.now.wall_s))
    return context.world.table(TOKENS)[request.token_id]


@handlers.add(RecordTokenUse, None, audit=lambda request, _: f"{len(request.used_s)} tokens used")
def record_token_use(context: StepContext, request: RecordTokenUse) -> None:
    """Record when tokens were last used; unknown tokens are ignored."""
    for token_id, used_s in request.used_s.items():
        token = context.world.table(TOKENS).get(token_id)
        if token is not None and used_s > (token.used_s or 0.0):
            context.change.put(replace(token, used_s=used_s))


def _check_admin(context: StepContext, user_id: UserId) -> None:
    user = context.world.table(USERS).get(user_id)
    if user is None or user.role is not UserRole.ADMIN or user.refusal(context.now.wall_s):
        raise NotPermitted(f"{user_id} is not an admin", hint="ask an admin")


def _check_project_admin(context: StepContext, project: Project | None, request: ChangeProject) -> None:
    if project is None or not administers(project, request.by, context.world.table(USERS).get(request.by)):
        raise NotPermitted(
            f"{request.by} is not an admin of project {request.project_id}",
            hint="ask an admin of the project or of the head",
        )
    if request.admins is not None and request.admins != project.admins:
        raise NotPermitted(
            f"{request.by} may not change the admins of project {project.id}", hint="ask an admin of the head"
        )
    if request.without_budget or request.budget is not None:
        raise NotPermitted(
            f"{request.by} may not change the budget of project {project.id}", hint="ask an admin of the head"
        )
    if request.outputs_bytes is not None:
        raise NotPermitted(
            f"{request.by} may not change the space for outputs of project {project.id}",
            hint="ask an admin of the head",
        )
    if (request.requests_per_minute, request.tokens_per_minute, request.request_weight) != (None, None, None):
        raise NotPermitted(
            f"{request.by} may not change the request limits of project {project.id}", hint="ask an admin of the head"
        )
    if request.without_burst or request.burst is not None:
        raise NotPermitted(
            f"{request.by} may not change the burst rule of project {project.id}", hint="ask an admin of the head"
        )
    if request.members is not None and not request.members and project.members:
        raise BadRequest(
            f"without members, project {project.id} would be open to all users",
            hint="keep one member, or ask an admin of the head",
        )


def _made_with(context: StepContext, token_id: TokenId) -> set[TokenId]:
    children: dict[TokenId, list[TokenId]] = {}
    for token in context.world.table(TOKENS).values():
        if token.made_by is not None:
            children.setdefault(token.made_by, []).append(token.id)
    found: set[TokenId] = set()
    queue = list(children.get(token_id, ()))
    while queue:
        one = queue.pop()
        if one not in found:
            found.add(one)
            queue += children.get(one, ())
    return found
