"""Responses with a page: compressed, with the pages' own security headers; the page of a refused request."""

from __future__ import annotations

import gzip
import re
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.api.auth.session_cookie import session_secret, set_session_cookie
from phalanx.api.http.bodies import read_open_body
from phalanx.api.http.security import same_origin
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.access.caller import Caller, may
from phalanx.core.errors import BadRequest, NotFound, NotSignedIn, PhalanxError
from phalanx.core.work.users import Action
from phalanx.web.assets import load_assets
from phalanx.web.document import CONTENT_SECURITY_POLICY, Viewer, error_document, sign_in_document

# With `no-referrer` browsers send `Origin: null` with the forms of a page, which then look like those of another site.
_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding, cookie",
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_FORM_BYTES: Final = 16 << 10
_COMPRESSED_FROM: Final = 1000  # bytes; below it costs more than it saves
_OWN_PATH: Final = re.compile(r"/(?:[A-Za-z0-9_.~%+@:-]+(?:/[A-Za-z0-9_.~%+@:-]+)*/?)?")


def page_response(request: Request, page: str, status: int = 200) -> Response:
    """Return a page as a response."""
    body = page.encode()
    headers = dict(_HEADERS)
    if len(body) >= _COMPRESSED_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 5, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers, "text/html")


def asset_response(connection: HTTPConnection, version: str, name: str) -> Response:
    """Return a file that pages load.

    Raises:
        NotFound: it does not exist, or the page is of another version of the head.
    """
    assets = load_assets()
    asset = assets.by_name.get(name)
    if asset is None or version != assets.version:
        raise NotFound("no such file; the page is of another version of the head", hint="load the page again")
    headers = {"cache-control": _FOR_EVER, "etag": asset.etag, "vary": "accept-encoding"}
    if asset.etag in connection.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in connection.headers.get("accept-encoding", ""):
        return Response(asset.compressed, 200, {**headers, "content-encoding": "gzip"}, asset.media_type)
    return Response(asset.body, 200, headers, asset.media_type)


def sign_in_page(request: Request, error: PhalanxError | None = None, *, next_path: str = "/") -> Response:
    """Return the sign-in page, with the reason why a sign-in failed."""
    settings = runtime_of(request).provider_sign_in.settings()
    shown = sign_in_document(
        assets=load_assets().path,
        message="" if error is None else error.message,
        hint="" if error is None else str(error.hint),
        next_path=own_path(next_path),
        provider="" if settings is None else urlsplit(settings.issuer).netloc,
        elsewhere="" if settings is None or any(serves_at(request, url) for url in settings.urls) else settings.urls[0],
    )
    return page_response(request, shown, 200 if error is None else error.http_status)


def error_page(request: Request, error: PhalanxError) -> Response:
    """Return the page of a refused request: the sign-in page that leads back to it, if only that is missing."""
    if isinstance(error, NotSignedIn):
        if session_secret(request) is None and "authorization" not in request.headers:
            error = NotSignedIn("sign in to see this page")
        return sign_in_page(request, error, next_path=request.url.path)
    return page_response(request, error_document(error, assets=load_assets().path), error.http_status)


def serves_at(request: Request, url: str) -> bool:
    """Return whether the browser knows this head by that URL, which has no path."""
    return same_origin(f"{request.scope['scheme']}://{request.headers.get('host', '')}", url)


def open_session(request: Request, caller: Caller, next_path: str) -> Response:
    """Open a session, close that of the cookie which it replaces, and lead to a page. The sign-in is in the audit trail already."""
    runtime = runtime_of(request)
    sessions, earlier = runtime.authenticator.browser_sessions, session_secret(request)
    if earlier is not None:
        sessions.close(earlier)
        runtime.access_changes.notify_all()
    secret, _ = sessions.open(caller)
    response = see_other(own_path(next_path))
    set_session_cookie(response, request, secret)
    return response


def own_path(path: str) -> str:
    """Return the path if it is one of this head's pages, and `/` otherwise: a sign-in must not lead to another site."""
    return path if _OWN_PATH.fullmatch(path) else "/"


def see_other(path: str) -> Response:
    """Return a redirect to a page of this head, to be read by GET."""
    return RedirectResponse(own_path(path), 303)


def viewer_of(request: Request) -> Viewer:
    """Return who sees the page of this request."""
    caller = caller_of(request)
    session: BrowserSession | None = getattr(request.state, "browser_session", None)
    return Viewer(
        user=caller.user,
        role=caller.role,
        csrf="" if session is None else session.csrf,
        assets=load_assets().path,
        actions=tuple(action.value for action in Action if may(caller, action)),
    )


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of a form; of several values of one field, the first.

    Raises:
        BadRequest: the body is no form.
    """
    body = await read_open_body(request, _FORM_BYTES)
    try:
        found = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=10, errors="strict")
    except ValueError as error:
        raise BadRequest("the body is not a form", hint="use the page's own form") from error
    return {name: values[0].strip() for name, values in found.items()}
