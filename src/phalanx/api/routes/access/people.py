"""Users, projects and tokens."""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_project_admin
from phalanx.api.auth.login_tokens import TOKEN_LIFETIME_S, browser_token_id
from phalanx.api.http.bodies import json_response, no_content, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.people import project_view, token_view, user_view
from phalanx.core.access.caller import Caller, may
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import BadRequest, NotFound, NotPermitted
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ProjectId, TokenId, UserId
from phalanx.core.state.events import ChangeProject, ChangeUser, PutToken, RevokeToken
from phalanx.core.units import format_duration, parse_duration_s, parse_memory_bytes
from phalanx.core.work.burst_rule import parse_burst_rule
from phalanx.core.work.names import is_name
from phalanx.core.work.services.request_limits import RequestLimits, parse_per_minute, parse_weight
from phalanx.core.work.usage.monthly_budget import parse_budget
from phalanx.core.work.users import (
    Action,
    Token,
    UserRole,
)
from phalanx.wire.api.head import CurrentUser
from phalanx.wire.api.people import (
    ProjectBody,
    ProjectList,
    ProjectReply,
    TokenBody,
    TokenCreated,
    TokenList,
    UserBody,
    UserList,
    UserReply,
)

TOKEN_BITS: Final = 256
NEVER: Final = "never"
NO_BUDGET: Final = "none"
NO_LIMIT: Final = "none"
OUTPUTS_BYTES_MAX: Final = 1 << 62

routes = RouteTable()


@routes.get("/v1/me", Action.VIEW, reply=CurrentUser)
async def show_caller(request: Request) -> Response:
    """Show the caller's own user, role, projects and allowed actions."""
    caller = caller_of(request)
    actions = [action for action in Action if may(caller, action)]
    return json_response(
        CurrentUser(
            user=caller.user,
            role=caller.role,
            token_id=caller.token_id,
            projects=sorted(caller.projects),
            admin_of=sorted(caller.admin_of),
            scope=sorted(caller.scope),
            actions=actions,
            requests_per_minute=caller.request_limits.requests_per_minute,
            tokens_per_minute=caller.request_limits.tokens_per_minute,
            limited_as=caller.limited_as,
        )
    )


# ---- users ------------------------------------------------------------------------------------------------------------


@routes.get("/v1/users", Action.VIEW, reply=UserList)
async def list_users(request: Request, after: AfterKey = "") -> Response:
    """List all users."""
    services = runtime_of(request).services
    now_s = services.clock.now_s()
    views = [user_view(user, now_s) for user in await run_in_thread(services.store.users)]
    page, further = key_page(views, after, lambda view: view.id, services.limits.answer_bytes)
    return json_response(UserList(users=page, next=further))


@routes.get("/v1/users/{user_id}", Action.VIEW, reply=UserReply)
async def show_user(request: Request, user_id: UserId) -> Response:
    """Show one user."""
    services = runtime_of(request).services
    user = services.store.user(user_id)
    if user is None:
        raise NotFound(f"no user {user_id!r}", hint=Hint(HintCode.LIST_USERS))
    return json_response(UserReply(user=user_view(user, services.clock.now_s())))


@routes.put("/v1/users/{user_id}", Action.ADMINISTER, body=UserBody, reply=UserReply)
async def put_user(request: Request, user_id: UserId) -> Response:
    """Add or change a user. Absent fields of an existing user stay unchanged; a new user gets the role user."""
    runtime = runtime_of(request)
    body = await read_record(request, UserBody, runtime.services.limits.body_bytes)
    if body.role is UserRole.NODE:
        raise BadRequest("role node is for supervisors, not for users", hint="use viewer, user, operator or admin")
    caller = caller_of(request)
    if user_id == caller.user and (body.disabled or body.linked or body.role not in (None, UserRole.ADMIN)):
        raise BadRequest(f"{user_id} cannot disable, link or demote their own account", hint="ask another admin")
    command = ChangeUser(
        user_id=UserId(check_name(user_id, "user")),
        role=body.role,
        disabled=body.disabled,
        linked=body.linked,
        by=caller.user,
    )
    user = await runtime.request(command)
    return json_response(UserReply(user=user_view(user, runtime.services.clock.now_s())))


# ---- projects ---------------------------------------------------------------------------------------------------------


@routes.get("/v1/projects", Action.VIEW, reply=ProjectList)
async def list_projects(request: Request, after: AfterKey = "") -> Response:
    """List all projects."""
    services = runtime_of(request).services
    settings = runtime_of(request).provider_sign_in.settings()
    views = [project_view(project, settings) for project in await run_in_thread(services.store.projects)]
    page, further = key_page(views, after, lambda view: view.id, services.limits.answer_bytes)
    return json_response(ProjectList(projects=page, next=further))


@routes.get("/v1/projects/{project_id}", Action.VIEW, reply=ProjectReply)
async def show_project(request: Request, project_id: ProjectId) -> Response:
    """Show one project."""
    for project in await run_in_thread(runtime_of(request).services.store.projects):
        if project.id == project_id:
            settings = runtime_of(request).provider_sign_in.settings()
            used = await run_in_thread(runtime_of(request).output_usage.used_bytes, project.id)
            return json_response(ProjectReply(project=project_view(project, settings), outputs_used_bytes=used))
    raise NotFound(f"no project {project_id!r}", hint=Hint(HintCode.LIST_PROJECTS))


@routes.put("/v1/projects/{project_id}", Action.MANAGE_PROJECT, body=ProjectBody, reply=ProjectReply)
async def put_project(request: Request, project_id: ProjectId) -> Response:
    """Add or change a project. Absent fields of an existing project stay unchanged. A project without members is open to all.

    The project's own admins may change its members; everything else needs an admin.
    """
    runtime = runtime_of(request)
    require_project_admin(caller_of(request), project_id)
    body = await read_record(request, ProjectBody, runtime.services.limits.body_bytes)
    caller = caller_of(request)
    require_project_admin(caller, project_id)  # again: the caller may have lost the right while the body arrived
    known = any(project.id == project_id for project in await run_in_thread(runtime.services.store.projects))
    command = ChangeProject(
        project_id=project_id if known else ProjectId(check_name(project_id, "project")),
        by=caller.user,
        as_admin=may(caller, Action.ADMINISTER),
        members=None if body.members is None else frozenset(body.members),
        admins=None if body.admins is None else frozenset(body.admins),
        budget=None if body.budget in (None, NO_BUDGET) else parse_budget(body.budget),
        without_budget=body.budget == NO_BUDGET,
        outputs_bytes=_outputs_limit(body.outputs),
        requests_per_minute=_per_minute(body.requests_per_minute, "requests_per_minute"),
        tokens_per_minute=_per_minute(body.tokens_per_minute, "tokens_per_minute"),
        burst=None if body.burst in (None, NO_LIMIT) else parse_burst_rule(body.burst),
        without_burst=body.burst == NO_LIMIT,
        request_weight=None if body.request_weight is None else parse_weight(body.request_weight, "request_weight"),
    )
    project = await runtime.request(command)
    return json_response(ProjectReply(project=project_view(project, runtime.provider_sign_in.settings())))


def _outputs_limit(text: str | None) -> int | None:
    if text is None or text == NO_LIMIT:
        return None if text is None else 0
    size = parse_memory_bytes(text, what="outputs")
    if not 0 < size < OUTPUTS_BYTES_MAX:
        raise BadRequest(f"outputs: {text[:60]!r} is not a limit", hint='write "500G", or "none"')
    return size


def _per_minute(text: str | None, what: str) -> int | None:
    return None if text is None else parse_per_minute(text, what)


# ---- tokens -----------------------------------------------------------------------------------------------------------


@routes.get("/v1/tokens", Action.MANAGE_OWN_TOKENS, reply=TokenList, scope=AccessScope.UNOWNED)
async def list_tokens(request: Request, after: AfterKey = "") -> Response:
    """List the caller's own tokens; an admin sees all tokens. Secrets are not stored."""
    caller = caller_of(request)
    tokens = await run_in_thread(runtime_of(request).services.store.tokens)
    gate = runtime_of(request).authenticator
    shown = [token for token in tokens if token.user == caller.user or may(caller, Action.ADMINISTER)]
    views = [token_view(token, gate.last_used_s(token)) for token in shown]
    page, further = key_page(views, after, lambda view: view.id, runtime_of(request).services.limits.answer_bytes)
    return json_response(TokenList(tokens=page, next=further))


@routes.post(
    "/v1/tokens", Action.MANAGE_OWN_TOKENS, body=TokenBody, reply=TokenCreated, status=201, scope=AccessScope.UNOWNED
)
async def make_token(request: Request) -> Response:
    """Make a token. Only this reply contains its secret."""
    runtime = runtime_of(request)
    services = runtime.services
    body = await read_record(request, TokenBody, services.limits.body_bytes)
    caller = caller_of(request)
    user = body.user or caller.user
    if user != caller.user and not may(caller, Action.ADMINISTER):
        raise NotPermitted(f"{caller.user} may not make tokens for {user}", hint="ask an admin")
    if services.store.user(user) is None:
        raise NotFound(f"no user {user!r}", hint=Hint(HintCode.ADD_USER))
    now_s = services.clock.now_s()
    expires_s = _until(services, body.expires, now_s)
    secret = secrets.token_urlsafe(TOKEN_BITS // 8)
    token = Token(
        id=TokenId(secrets.token_hex(6)),
        user=user,
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        created_s=now_s,
        expires_s=_no_longer(services.store.tokens(), caller, expires_s),
        scope=_narrowed(caller, body.scope),
        note=body.note[:200],
        made_by=caller.token_id,
        request_limits=_limits(caller, body),
    )
    made = await runtime.request(PutToken(token=token))
    return json_response(TokenCreated(secret=secret, token=token_view(made)), 201)


@routes.delete("/v1/tokens/{token_id}", Action.MANAGE_OWN_TOKENS)
async def revoke_token(request: Request, token_id: TokenId, made_too: bool = False) -> Response:
    """Revoke a token at once; with `with_derived` also all tokens made with it, as for a stolen token. Idempotent."""
    runtime, caller = runtime_of(request), caller_of(request)
    token = next((token for token in await run_in_thread(runtime.services.store.tokens) if token.id == token_id), None)
    # Another user's token is answered as if it did not exist: unlike jobs, tokens are private.
    if token is None or (token.user != caller.user and not may(caller, Action.ADMINISTER)):
        raise NotFound(f"no token {token_id}", hint=Hint(HintCode.LIST_TOKENS))
    await runtime.request(RevokeToken(token_id=token_id, with_derived=made_too))
    return no_content()


def _until(services: HeadServices, asked: str | None, now_s: float) -> float | None:
    """Return when a token expires: as asked, within the operator's maximum; TOKEN_LIFETIME_S from now by default.

    Raises:
        BadRequest: the lifetime exceeds the operator's maximum.
    """
    most_s = services.token_lifetime_max_s
    if asked == NEVER and most_s is None:
        return None
    if asked is None:
        return now_s + (TOKEN_LIFETIME_S if most_s is None else min(TOKEN_LIFETIME_S, most_s))
    life_s = math.inf if asked == NEVER else parse_duration_s(asked, what="expires")
    if most_s is not None and life_s > most_s:
        raise BadRequest(
            f"expires: {asked} is longer than tokens may last on this head",
            hint=f"at most {format_duration(most_s)}",
        )
    return now_s + life_s


def _narrowed(caller: Caller, scope: list[Action]) -> frozenset[Action]:
    """Return the scope asked for; a token made with a scoped token cannot have a wider scope."""
    if not caller.scope:
        return frozenset(scope)
    wider = set(scope) - caller.scope
    if wider:
        raise NotPermitted(
            f"this token is for {', '.join(sorted(caller.scope))}; it cannot make a token for {', '.join(sorted(wider))}"
        )
    return frozenset(scope) or caller.scope


def _limits(caller: Caller, body: TokenBody) -> RequestLimits:
    """Return the limits asked for a new token.

    Raises:
        BadRequest: they are no numbers, or the caller's own token is limited.
    """
    asked = RequestLimits(
        requests_per_minute=parse_per_minute(body.requests_per_minute or "none", "requests_per_minute"),
        tokens_per_minute=parse_per_minute(body.tokens_per_minute or "none", "tokens_per_minute"),
    )
    if caller.request_limits and asked:
        raise BadRequest(
            f"your token has request limits ({caller.request_limits}), which tokens made with it share",
            hint="leave the limits out",
        )
    return asked


def _no_longer(tokens: list[Token], caller: Caller, expires_s: float | None) -> float | None:
    """Return the expiry asked for, but not later than that of the caller's own token. A session at the provider does not limit it."""
    if caller.token_id == browser_token_id(
        caller.user
    ):  # its end is that of a session; all tokens of the user end with the access there
        return expires_s
    own = next((token.expires_s for token in tokens if token.id == caller.token_id), None)
    if own is None:
        return expires_s
    return own if expires_s is None else min(own, expires_s)


def check_name(name: str, what: str) -> str:
    """Return the name if it is valid for a user, project or queue.

    Raises:
        BadRequest: it is not.
    """
    if not is_name(name):
        raise BadRequest(
            f"{name[:80]!r} is not a valid name for a {what}",
            hint="use letters, digits and . _ - @ +, at most 63 characters, starting with a letter or digit",
        )
    return name
