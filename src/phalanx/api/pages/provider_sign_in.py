"""Sign-in of browsers at the provider: begin, the page to which the provider leads back, and the end.

The provider leads back by a request from another site, with which browsers send no cookie of this head (SameSite=Strict). So that page has no
effect and only leads on to this head's own address, where the browser sends the cookie of the sign-in that it has begun.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from phalanx.api.auth.audited_call import audit_call_of
from phalanx.api.auth.authenticator import require_action
from phalanx.api.auth.session_cookie import attempt_value, clear_attempt_cookie, set_attempt_cookie
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, open_session, own_path, page_response, serves_at, sign_in_page
from phalanx.api.runtime import runtime_of
from phalanx.core.access.audit import AuditCall
from phalanx.core.access.caller import Caller
from phalanx.core.errors import NotPermitted, NotSignedIn, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import TokenId, UserId
from phalanx.core.work.sign_in import SignInSettings
from phalanx.core.work.users import Action, UserRole
from phalanx.ports.identity import RETURN_PATH
from phalanx.web.assets import load_assets
from phalanx.web.document import leading_document

BEGIN_PATH: Final = "/sign-in/provider"
FINISH_PATH: Final = "/sign-in/finish"
UNKNOWN: Final = UserId("unknown")
ANSWER_MAX: Final = 4096  # characters of a parameter; codes of some providers have 1,500
_ANSWER: Final = ("code", "state", "iss", "error")

routes = RouteTable()


@routes.get(BEGIN_PATH, Action.VIEW, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def begin_sign_in(request: Request) -> Response:
    """Lead a browser to the provider."""
    sign_in = runtime_of(request).provider_sign_in
    settings = sign_in.require_settings()
    next_path = own_path(request.query_params.get("next", "/"))
    url = _own_url(request, settings)
    attempt = sign_in.attempts.begin(next_path)
    try:
        address = await sign_in.ask(
            lambda provider: provider.authorization_url(
                settings, url=url, state=attempt.state, nonce=attempt.nonce, verifier=attempt.verifier
            )
        )
    except PhalanxError as error:
        return sign_in_page(request, error, next_path=next_path)
    response = RedirectResponse(address, 303)
    set_attempt_cookie(response, request, attempt.cookie)
    return response


@routes.get(RETURN_PATH, Action.VIEW, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def return_from_provider(request: Request) -> Response:
    """Lead a browser that comes from the provider on to the end of its sign-in."""
    query = {name: value for name in _ANSWER if (value := request.query_params.get(name, "")[:ANSWER_MAX])}
    return page_response(request, leading_document(f"{FINISH_PATH}?{urlencode(query)}", assets=load_assets().path))


@routes.get(FINISH_PATH, Action.VIEW, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def finish_sign_in(request: Request) -> Response:
    """Sign a browser in with the provider's answer, in a new session; or show why not."""
    runtime = runtime_of(request)
    unknown = Caller(user=UNKNOWN, role=UserRole.VIEWER, token_id=TokenId(""))
    call = audit_call_of(request, unknown, FINISH_PATH)
    try:
        response = await _finish(request, call)
    except PhalanxError as error:
        runtime.record_refusal(call, error, detail=error.message)
        response = sign_in_page(request, error)
    clear_attempt_cookie(response, request)
    return response


async def _finish(request: Request, call: AuditCall) -> Response:
    runtime, asked = runtime_of(request), request.query_params
    sign_in = runtime.provider_sign_in
    settings = sign_in.require_settings()
    url = _own_url(request, settings)
    attempt = sign_in.attempts.take(asked.get("state", ""), attempt_value(request))
    if "error" in asked or not asked.get("code"):
        word = asked.get("error", "")
        reason = word if word.isascii() and word.isidentifier() else "no code"
        raise NotSignedIn(f"the sign-in provider refused: {reason[:80]}", hint=Hint(HintCode.SIGN_IN_AGAIN))
    answer = await sign_in.ask(
        lambda provider: provider.redeem(
            settings,
            url=url,
            code=asked["code"],
            nonce=attempt.nonce,
            verifier=attempt.verifier,
            issuer=asked.get("iss", ""),
        )
    )
    user = await sign_in.admit(settings, answer, call)
    token = await sign_in.browser_token(user)
    caller = runtime.authenticator.caller_of_digest(token.sha256)
    require_action(caller, Action.VIEW)
    return open_session(request, caller, attempt.next_path)


def _own_url(request: Request, settings: SignInSettings) -> str:
    """Return the URL of the settings by which the browser knows this head.

    Raises:
        NotPermitted: it knows it by another one.
    """
    url = next((url for url in settings.urls if serves_at(request, url)), None)
    if url is None:
        raise NotPermitted(f"people sign in at {settings.urls[0]}", hint=f"open {settings.urls[0]} in the browser")
    return url
