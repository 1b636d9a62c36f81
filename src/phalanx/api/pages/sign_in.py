"""Sign-in of browsers, by a one-time link or by a token; sign-out; and the files that pages load.

A link is used up by its first request. It carries a code, never a token, and no part of a query is logged.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.audited_call import audit_call_of
from phalanx.api.auth.authenticator import require_action, require_csrf
from phalanx.api.auth.browser_sessions import CODE_LIFETIME_S
from phalanx.api.auth.session_cookie import clear_session_cookie, session_secret
from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import ASSET_PATH, MediaType, RouteTable
from phalanx.api.pages.responses import asset_response, error_page, open_session, read_form, see_other, sign_in_page
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.access.caller import Caller
from phalanx.core.errors import NotPermitted, NotSignedIn
from phalanx.core.work.users import Action
from phalanx.wire.api.head import DashboardLink

routes = RouteTable()


@routes.post("/v1/dashboard/link", Action.VIEW, body=MediaType.NOTHING, reply=DashboardLink)
async def make_dashboard_link(request: Request) -> Response:
    """Make a link that signs one browser in, once, within a minute, with the rights of the caller's token."""
    code = runtime_of(request).authenticator.browser_sessions.make_code(caller_of(request))
    return json_response(DashboardLink(path=f"/sign-in?code={code}", lifetime_s=CODE_LIFETIME_S))


@routes.get("/sign-in", Action.VIEW, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def sign_in_by_link(request: Request, code: str = "") -> Response:
    """Sign a browser in by a one-time code; without one, show the sign-in page."""
    if not code:
        return sign_in_page(request)
    if "prefetch" in request.headers.get("sec-purpose", "") or "prefetch" in request.headers.get("purpose", ""):
        raise NotPermitted("a sign-in link is not opened in advance", hint="open the link")
    authenticator = runtime_of(request).authenticator
    try:
        caller = authenticator.caller_of_digest(authenticator.browser_sessions.take_code(code))
        return await _signed_in(request, caller, "/")
    except (NotSignedIn, NotPermitted) as error:
        return sign_in_page(request, error)


@routes.post(
    "/sign-in", Action.VIEW, body=MediaType.NOTHING, reply=MediaType.HTML, open_to_all=True, error_page=error_page
)
async def sign_in_by_token(request: Request) -> Response:
    """Sign a browser in by the token in a form."""
    form = await read_form(request)
    next_path = form.get("next", "/")
    try:
        caller = runtime_of(request).authenticator.authenticate(f"Bearer {form.get('token', '')}")
        return await _signed_in(request, caller, next_path)
    except (NotSignedIn, NotPermitted) as error:
        return sign_in_page(request, error, next_path=next_path)


@routes.post(
    "/sign-out", Action.VIEW, body=MediaType.NOTHING, reply=MediaType.HTML, open_to_all=True, error_page=error_page
)
async def sign_out(request: Request) -> Response:
    """End the session of the browser, and all streams that it opened."""
    form, secret, runtime = await read_form(request), session_secret(request), runtime_of(request)
    response = see_other("/")
    if secret is not None:
        sessions = runtime.authenticator.browser_sessions
        try:
            session = sessions.find(secret)
        except NotSignedIn:
            pass
        else:
            require_csrf(session, form.get("csrf", ""))
            sessions.close(secret)
            runtime.access_changes.notify_all()
    clear_session_cookie(response, request)
    return response


@routes.get(ASSET_PATH, Action.VIEW, reply=MediaType.ASSET, open_to_all=True)
async def show_asset(request: Request, version: str, name: str) -> Response:
    """Return a file that pages load. Its path changes with its content, so that browsers may keep it for ever."""
    return asset_response(request, version, name)


async def _signed_in(request: Request, caller: Caller, next_path: str) -> Response:
    """Open a session, close that of the cookie which it replaces, and lead to a page.

    Raises:
        NotPermitted: the token is not one of a person who may see the fleet.
    """
    require_action(caller, Action.VIEW)
    runtime = runtime_of(request)
    await runtime.controller_futures.result_of(
        runtime.services.controller.record_call(audit_call_of(request, caller, "/sign-in"))
    )
    return open_session(request, caller, next_path)
