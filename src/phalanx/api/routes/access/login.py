"""Login of a command line: by a code that the person types in at the provider or at this head, or by a code that their browser brings.

All routes are open: who calls them has no token yet. Each makes the token in one request to the controller, with its line in the audit trail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.audited_call import audit_call_of
from phalanx.api.auth.authenticator import require_action
from phalanx.api.auth.browser_sessions import code_challenge
from phalanx.api.auth.device_logins import INTERVAL_S, LIFETIME_S
from phalanx.api.auth.login_tokens import browser_token_id, login_token
from phalanx.api.http.bodies import decode_body, json_response, read_open_body
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import ApiRuntime, runtime_of
from phalanx.core.access.audit import AuditCall
from phalanx.core.access.caller import Caller
from phalanx.core.errors import NotPermitted, NotSignedIn, PhalanxError
from phalanx.core.ids import TokenId, UserId
from phalanx.core.state.events import PutToken
from phalanx.core.work.users import Action, Token, UserRole
from phalanx.wire.api.login import BrowserLoginBody, DeviceLogin, DeviceLoginBody, DeviceLoginStart, LoginReply

BODY_BYTES: Final = 16 << 10
DEVICE_PATH: Final = "/device"  # of the page on which a person confirms a code of this head
DEVICE: Final = UserId("a device's code")  # no user can have this name: what is sealed for it is no refresh token
_UNKNOWN: Final = Caller(user=UserId("unknown"), role=UserRole.VIEWER, token_id=TokenId(""))

routes = RouteTable()


@routes.post("/v1/login/device", Action.VIEW, body=DeviceLoginStart, reply=DeviceLogin, open_to_all=True)
async def start_device_login(request: Request) -> Response:
    """Make a code that a person can type in on any machine with a browser: at the provider if that offers codes, else at this head's page."""
    runtime, sign_in = runtime_of(request), runtime_of(request).provider_sign_in
    body = decode_body(await read_open_body(request, BODY_BYTES) or b"{}", DeviceLoginStart)
    settings = sign_in.settings()
    found = None if settings is None else await sign_in.ask(lambda provider: provider.start_device(settings))
    if found is None:
        address = "" if request.client is None else request.client.host
        handle, code = runtime.device_logins.start(body.note, address)
        return json_response(
            DeviceLogin(
                handle=handle,
                user_code=code,
                verification_url=DEVICE_PATH,
                complete_url=f"{DEVICE_PATH}/{code}",
                expires_in_s=LIFETIME_S,
                interval_s=INTERVAL_S,
            )
        )
    return json_response(
        DeviceLogin(
            handle=sign_in.seal.seal(DEVICE, found.device_code),
            user_code=found.user_code,
            verification_url=found.verification_url,
            complete_url=found.complete_url,
            expires_in_s=found.expires_in_s,
            interval_s=found.interval_s,
        )
    )


@routes.post("/v1/login/device/token", Action.VIEW, body=DeviceLoginBody, reply=LoginReply, open_to_all=True)
async def finish_device_login(request: Request) -> Response:
    """Return a token once the person has typed in the code."""
    runtime, call = runtime_of(request), audit_call_of(request, _UNKNOWN, "/v1/login/device/token")
    body = decode_body(await read_open_body(request, BODY_BYTES), DeviceLoginBody)
    sign_in = runtime.provider_sign_in
    settings = sign_in.settings()
    device_code = "" if settings is None else sign_in.seal.open(DEVICE, body.handle)
    if settings is None or not device_code:
        return await _finish_own_login(runtime, call, body)
    try:
        answer = await sign_in.ask(lambda provider: provider.poll_device(settings, device_code))
        if answer is None:
            return json_response(LoginReply(pending=True))
        user = await sign_in.admit(settings, answer, call)
    except (NotSignedIn, NotPermitted) as error:
        runtime.record_refusal(call, error, detail=error.message)
        raise
    secret, token = login_token(runtime.services, user.id, body.note)
    return await _reply(runtime, secret, token, replace(call, user=user.id))


@routes.post("/v1/login/token", Action.VIEW, body=BrowserLoginBody, reply=LoginReply, open_to_all=True)
async def finish_browser_login(request: Request) -> Response:
    """Return a token for the code that a browser brought, once, with the rights of the browser's session."""
    runtime, call = runtime_of(request), audit_call_of(request, _UNKNOWN, "/v1/login/token")
    body = decode_body(await read_open_body(request, BODY_BYTES), BrowserLoginBody)
    authenticator = runtime.authenticator
    try:
        caller = authenticator.caller_of_digest(
            authenticator.browser_sessions.take_code(body.code, code_challenge(body.verifier))
        )
        require_action(caller, Action.MANAGE_OWN_TOKENS)
    except PhalanxError as error:
        runtime.record_refusal(call, error)
        raise
    return await _token_like(runtime, caller, body.note, call)


async def _finish_own_login(runtime: ApiRuntime, call: AuditCall, body: DeviceLoginBody) -> Response:
    """Return a token with the rights of the user who allowed the login at the page, or that it is pending."""
    try:
        sha256 = runtime.device_logins.take(body.handle)
        if not sha256:
            return json_response(LoginReply(pending=True))
        caller = runtime.authenticator.caller_of_digest(sha256)
        require_action(caller, Action.MANAGE_OWN_TOKENS)
    except PhalanxError as error:
        runtime.record_refusal(call, error)
        raise
    return await _token_like(runtime, caller, body.note, call)


async def _token_like(runtime: ApiRuntime, caller: Caller, note: str, call: AuditCall) -> Response:
    """Return a token with the rights of the caller's, that ends no later."""
    own = runtime.services.store.token(caller.sha256)
    # The token of sessions at a provider ends with the session; that of a command line depends on the provider's checks instead.
    by_provider = caller.token_id == browser_token_id(caller.user)
    secret, token = login_token(
        runtime.services,
        caller.user,
        note,
        ends_s=None if own is None or by_provider else own.expires_s,
        scope=caller.scope,
        made_by=caller.token_id,
    )
    return await _reply(runtime, secret, token, replace(call, user=caller.user, token_id=caller.token_id))


async def _reply(runtime: ApiRuntime, secret: str, token: Token, call: AuditCall) -> Response:
    await runtime.controller_futures.result_of(runtime.services.controller.request(PutToken(token=token), call))
    return json_response(LoginReply(secret=secret, user=token.user, token_id=token.id, expires_s=token.expires_s))
