"""The page on which a signed-in person confirms the code of a command line that waits on another machine."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_action, require_csrf
from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.api.auth.session_cookie import session_secret
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, read_form, see_other, viewer_of
from phalanx.api.routes.access.login import DEVICE_PATH
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.access.caller import Caller
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import BadRequest, NotFound, NotSignedIn
from phalanx.core.work.users import Action
from phalanx.web.assets import load_assets
from phalanx.web.login_page import device_done_page, device_login_page, device_page

CODE_PATH: Final = f"{DEVICE_PATH}/{{code}}"
_CODE_MAX: Final = 32  # characters of what a person types

routes = RouteTable()


@routes.get(
    DEVICE_PATH, Action.MANAGE_OWN_TOKENS, reply=MediaType.HTML, scope=AccessScope.UNOWNED, error_page=error_page
)
async def show_device(request: Request) -> Response:
    """Ask for the code that a command line shows."""
    return page_response(request, device_page(viewer_of(request)))


@routes.post(
    DEVICE_PATH, Action.VIEW, body=MediaType.NOTHING, reply=MediaType.HTML, open_to_all=True, error_page=error_page
)
async def find_device(request: Request) -> Response:
    """Look for the login with the code that a person typed in."""
    form, caller, _ = await _signed_in(request)
    try:
        found = runtime_of(request).device_logins.find(form.get("code", "")[:_CODE_MAX], caller.user)
    except NotFound as error:
        viewer = viewer_of(request)
        return page_response(request, device_page(viewer, f"{error.message}; {error.hint}"), error.http_status)
    return see_other(f"{DEVICE_PATH}/{found.code}")


@routes.get(CODE_PATH, Action.MANAGE_OWN_TOKENS, reply=MediaType.HTML, scope=AccessScope.UNOWNED, error_page=error_page)
async def show_device_login(request: Request, code: str) -> Response:
    """Show which machine asks, and ask whether it may have a token."""
    found = runtime_of(request).device_logins.find(code[:_CODE_MAX], caller_of(request).user)
    return page_response(
        request,
        device_login_page(f"{DEVICE_PATH}/{found.code}", found.code, found.note, found.address, viewer_of(request)),
    )


@routes.post(
    CODE_PATH, Action.VIEW, body=MediaType.NOTHING, reply=MediaType.HTML, open_to_all=True, error_page=error_page
)
async def decide_device_login(request: Request, code: str) -> Response:
    """Allow the login or refuse it."""
    form, caller, _ = await _signed_in(request)
    answer = form.get("answer", "")
    if answer not in {"allow", "refuse"}:
        raise BadRequest("the form has no answer", hint="use the page's own form")
    found = runtime_of(request).device_logins.decide(code[:_CODE_MAX], caller, allow=answer == "allow")
    return page_response(request, device_done_page(found.note, allowed=answer == "allow", assets=load_assets().path))


async def _signed_in(request: Request) -> tuple[dict[str, str], Caller, BrowserSession]:
    """The form, and who sent it from a page of this head."""
    form, authenticator = await read_form(request), runtime_of(request).authenticator
    secret = session_secret(request)
    if secret is None:
        raise NotSignedIn("sign in to give a token to a command line")
    caller, session = authenticator.authenticate_session(secret)
    require_csrf(session, form.get("csrf", ""))
    require_action(caller, Action.MANAGE_OWN_TOKENS)
    request.state.caller, request.state.browser_session = caller, session
    return form, caller, session
