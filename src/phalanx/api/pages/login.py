"""The page on which a signed-in person gives a token to a command line that waits for it.

The command line opens it with a port of its own machine and the SHA-256 of a verifier that only it has (PKCE): the code that the browser
brings there is worth nothing to others. The page shows the word that the command line shows too, so that a person does not give a token to
the command line of somebody who sent them the address.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.authenticator import require_action, require_csrf
from phalanx.api.auth.session_cookie import session_secret
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.pages.responses import error_page, page_response, read_form, viewer_of
from phalanx.api.runtime import runtime_of
from phalanx.core.access.rules import AccessScope
from phalanx.core.errors import BadRequest, NotSignedIn
from phalanx.core.work.users import Action
from phalanx.web.assets import load_assets
from phalanx.web.login_page import login_done_page, login_page

PATH: Final = "/login/{port}/{challenge}/{state}"
_CHALLENGE: Final = re.compile(r"[A-Za-z0-9_-]{43}")  # SHA-256 in base64url
_STATE: Final = re.compile(r"[A-Za-z0-9_-]{16,64}")

routes = RouteTable()


@routes.get(PATH, Action.MANAGE_OWN_TOKENS, reply=MediaType.HTML, scope=AccessScope.UNOWNED, error_page=error_page)
async def show_login(request: Request, port: int, challenge: str, state: str) -> Response:
    """Ask whether a command line may have a token."""
    _check(port, challenge, state)
    viewer = viewer_of(request)
    return page_response(request, login_page(request.url.path, login_word(challenge), viewer))


@routes.post(PATH, Action.VIEW, body=MediaType.NOTHING, reply=MediaType.HTML, open_to_all=True, error_page=error_page)
async def allow_login(request: Request, port: int, challenge: str, state: str) -> Response:
    """Lead the browser to the command line with a code that is good for one token, once, within a minute."""
    _check(port, challenge, state)
    form, authenticator = await read_form(request), runtime_of(request).authenticator
    secret = session_secret(request)
    if secret is None:
        raise NotSignedIn("sign in to give a token to the command line")
    caller, session = authenticator.authenticate_session(secret)
    require_csrf(session, form.get("csrf", ""))
    require_action(caller, Action.MANAGE_OWN_TOKENS)
    code = authenticator.browser_sessions.make_code(caller, challenge)
    return page_response(request, login_done_page(port, code, state, assets=load_assets().path))


def login_word(challenge: str) -> str:
    """Return the word that page and command line show."""
    digits = hashlib.sha256(challenge.encode()).hexdigest()[:8].upper()
    return f"{digits[:4]}-{digits[4:]}"


def _check(port: int, challenge: str, state: str) -> None:
    if not 1024 <= port <= 65535 or not _CHALLENGE.fullmatch(challenge) or not _STATE.fullmatch(state):
        raise BadRequest("this is not the address of a login", hint="open the one that the command line printed")
