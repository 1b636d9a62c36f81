"""The pages of web programs of jobs, on a listener of their own: who may open them, and which program a request is for.

A program is code of a user. At the dashboard's origin its scripts could use a viewer's session. So it has another origin: another port of the
head (only for the owner of the job, as all programs share that origin), or a host name of its own. The session's cookie comes to all ports
of a host. It counts here only for requests that pages of this origin made or that a person typed, and no program gets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketState

from phalanx.api.auth.audited_call import audit_call_of
from phalanx.api.auth.authenticator import authorize_job, reauthorize, require_action
from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.api.auth.program_access import ProgramAccess
from phalanx.api.auth.session_cookie import program_value, session_secrets, set_program_cookie
from phalanx.api.http.errors import error_response
from phalanx.api.http.security import PROGRAMS_PATH, SecurityMiddleware, host_name, is_foreign
from phalanx.api.http.websocket_protocol import MESSAGE_LIMIT_SETTER
from phalanx.api.live.exec_start import check_while_running, running_attempt
from phalanx.api.pages.responses import asset_response, page_response
from phalanx.api.programs.forwarded_headers import ProgramAddress
from phalanx.api.programs.http_forwarding import BrowserLeft, HttpForwarding, NothingListens
from phalanx.api.programs.port_channels import PortChannels
from phalanx.api.programs.targets import OPEN_PATH, ProgramTarget, parse_label, parse_program_path
from phalanx.api.programs.websocket_forwarding import MESSAGE_BYTES_MAX, WebSocketForwarding
from phalanx.api.runtime import ApiRuntime
from phalanx.api.services import ProgramListener
from phalanx.core.access.caller import Caller
from phalanx.core.errors import Conflict, NotFound, NotPermitted, NotSignedIn, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.job import Job
from phalanx.core.work.states import JobState
from phalanx.core.work.users import Action
from phalanx.web.assets import load_assets
from phalanx.web.program_pages import leading_page, problem_page, sign_in_again_page

_log: Final = logging.getLogger("phalanx.api")
_ASSETS: Final = "/.phalanx/"
_AGAIN_S: Final = 5  # until the page of a job that waits, or of a node that is away, is tried again
_LIVE: Final = frozenset({JobState.PENDING, JobState.RUNNING})
_HEADERS: Final = ((b"referrer-policy", b"same-origin"),)
_AUTHORIZATION: Final = frozenset({b"authorization"})
_SCHEMES: Final = {"ws": "http", "wss": "https"}


class ProgramApp:
    """Serves the pages of programs; the whole app of their listener, and of requests with a token to /j/ at the API's."""

    def __init__(self, runtime: ApiRuntime, listener: ProgramListener, hosts_allowed: frozenset[str]) -> None:
        self._runtime, self._listener = runtime, listener
        self._channels = PortChannels(runtime)
        self._at_own_port = SecurityMiddleware(
            partial(self._serve, by_cookie=True),
            frozenset() if listener.names else hosts_allowed,
            names_below=listener.names,
            entry="/",
            headers=_HEADERS,
        )
        self._at_api = SecurityMiddleware(partial(self._serve, by_cookie=False), hosts_allowed, entry="/")

    def is_for_programs(self, scope: Scope) -> bool:
        """Whether this app serves a request: one on the port of programs, or with a token to their path at the API."""
        if scope["type"] == "lifespan":
            return False
        if self._on_own_port(scope):
            return True
        tokens = any(name == b"authorization" for name, _ in scope["headers"])
        return scope["path"].startswith(PROGRAMS_PATH) and (tokens or scope["type"] == "websocket")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        app = self._at_own_port if self._on_own_port(scope) else self._at_api
        await app(scope, receive, send)

    def _on_own_port(self, scope: Scope) -> bool:
        return scope["server"] is not None and scope["server"][1] == self._listener.port

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, by_cookie: bool) -> None:
        connection = HTTPConnection(scope)
        try:
            response = await self._answer(connection, receive, send, by_cookie=by_cookie)
        except PhalanxError as error:
            response = self._refusal(connection, error)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(
        self, connection: HTTPConnection, receive: Receive, send: Send, *, by_cookie: bool
    ) -> Response | None:
        """Return a response of the head; None once the program's was sent.

        Raises:
            PhalanxError: the request is refused, or the program does not answer; nothing was sent.
        """
        scope, path = connection.scope, connection.scope["raw_path"].decode("latin-1")
        if by_cookie and path.startswith(_ASSETS):
            return asset_response(connection, *path.removeprefix(f"{_ASSETS}web/").partition("/")[::2])
        target, rest = self._target(connection, path, at_own_name=by_cookie)
        if by_cookie and rest == f"/{OPEN_PATH}":
            return self._open(Request(scope), target)
        if is_foreign(connection):
            raise NotSignedIn("another page led here")  # as a navigation: all else was refused before
        if not rest:
            return Response(status_code=307, headers={"location": target.prefix})
        session = self._session(connection, target) if by_cookie else None
        caller, without = self._caller(connection, session)
        job = self._job(connection, caller, target, shared=session is not None and not self._listener.names)
        check = reauthorize(
            self._runtime.authenticator, self._runtime.services.store, caller, Action.CHANGE_OWN, job.id
        )
        own_name = by_cookie and self._listener.names
        address = ProgramAddress(
            port=target.port,
            job_id=target.job_id,
            origin=f"{_SCHEMES.get(scope['scheme'], scope['scheme'])}://{connection.headers['host']}",
            prefix="/" if own_name else target.prefix,
            keep_path=any(one.port == target.port and one.keep_path for one in job.spec.ports),
        )
        call = audit_call_of(connection, caller, f"{PROGRAMS_PATH}{{address}}")
        with self._channels.place_for(caller.user):
            attempt = running_attempt(self._runtime.services, job, target.node_rank, needed_by=f"port {target.port}")
            stream = await self._channels.connect(caller.user, job, attempt, target, call)
            check = check_while_running(self._runtime.services, attempt, check)
            try:
                if scope["type"] == "websocket":
                    websocket = WebSocket(scope, receive, send)
                    scope["state"].get(MESSAGE_LIMIT_SETTER, lambda _: None)(MESSAGE_BYTES_MAX)
                    forwarded = WebSocketForwarding(websocket, stream, address, without=without)
                    try:
                        await self._watched(forwarded.run, check)
                    except PhalanxError as error:
                        if websocket.application_state is WebSocketState.CONNECTING:
                            raise
                        _log.info("a WebSocket of port %d of job %s was closed: %s", target.port, job.id, error)
                else:
                    forwarding = HttpForwarding(scope, receive, send, stream, address, without=without)
                    await self._forward(forwarding, check)
            finally:
                stream.close()
        return None

    async def _forward(self, forwarding: HttpForwarding, check: Callable[[], None]) -> None:
        try:
            await self._watched(forwarding.run, check)
        except BrowserLeft:
            return
        except PhalanxError:
            if not forwarding.started:
                raise
            raise ConnectionAbortedError("the response was cut off") from None  # the server closes the connection

    async def _watched(self, run: Callable[[], Awaitable[None]], check: Callable[[], None]) -> None:
        """Forward until the end, or until the caller loses the permission.

        Raises:
            PhalanxError: the program does not answer, or the caller may no longer.
        """
        task = asyncio.current_task()
        assert task is not None, "a server runs each connection in a task"
        self._runtime.websockets.add(task)
        sides = [asyncio.ensure_future(run()), asyncio.ensure_future(self._runtime.permission_lost(check))]
        try:
            done, _ = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            for side in done:
                error = side.result()
                if error is not None:
                    raise error
        finally:
            self._runtime.websockets.discard(task)
            for side in sides:
                side.cancel()
            await asyncio.gather(*sides, return_exceptions=True)

    def _target(self, connection: HTTPConnection, path: str, *, at_own_name: bool) -> tuple[ProgramTarget, str]:
        """Return the program of a request, and the rest of the path.

        Raises:
            NotFound: it names none.
        """
        found = parse_program_path(path)
        if at_own_name and self._listener.names:
            target = parse_label(host_name(connection.headers["host"].encode("latin-1")).partition(".")[0])
            if target is not None:
                below = found is not None and found[0] == target and found[1] == f"/{OPEN_PATH}"
                return target, f"/{OPEN_PATH}" if below else path
        elif found is not None:
            return found
        raise NotFound("no program of a job is here", hint="the address is /j/JOB/PORT/, as in /j/17/8888/")

    def _session(self, connection: HTTPConnection, target: ProgramTarget) -> BrowserSession | None:
        """Return the session of the dashboard that a cookie belongs to; None without a valid one."""
        sessions = self._runtime.authenticator.browser_sessions
        try:
            if self._listener.names:
                value = program_value(connection)
                return (
                    None if value is None else sessions.require_open(self._access.session_key_of(value, target.prefix))
                )
        except NotSignedIn:
            return None
        found = []
        for secret in session_secrets(connection):
            try:
                found.append(sessions.find(secret))
            except NotSignedIn:  # of another head on this machine, or planted
                continue
        return found[0] if len(found) == 1 else None

    @property
    def _access(self) -> ProgramAccess:
        return self._runtime.program_access

    def _caller(self, connection: HTTPConnection, session: BrowserSession | None) -> tuple[Caller, frozenset[bytes]]:
        """Return the caller, and the headers that the program must not get: a token of this head; its own it gets.

        Raises:
            NotSignedIn: neither cookie nor token is valid.
        """
        authenticator, authorization = self._runtime.authenticator, connection.headers.get("authorization")
        if session is None:
            return authenticator.authenticate(authorization), _AUTHORIZATION
        caller = authenticator.caller_of_session(session)
        try:
            authenticator.authenticate(authorization)
        except NotSignedIn:
            return caller, frozenset()
        return caller, _AUTHORIZATION

    def _job(self, connection: HTTPConnection, caller: Caller, target: ProgramTarget, *, shared: bool) -> Job:
        """Return the job, if the caller may open its programs.

        Raises:
            NotFound, NotPermitted: there is no such job, or the caller may not.
        """
        store = self._runtime.services.store
        try:
            require_action(caller, Action.CHANGE_OWN)
            job = authorize_job(store, caller, Action.CHANGE_OWN, target.job_id)
            if shared and job.user != caller.user:
                raise NotPermitted(
                    f"job {job.id} belongs to {job.user}: a browser opens only programs of your own jobs here, as all of them share one origin",
                    hint=Hint(HintCode.FORWARD_PORT, job=job.id, port=str(target.port)),
                )
        except NotPermitted as error:
            self._runtime.record_refusal(audit_call_of(connection, caller, f"{PROGRAMS_PATH}{{address}}"), error)
            raise
        return job

    def _open(self, request: Request, target: ProgramTarget) -> Response:
        """Let the browser in that has a ticket of the head, and lead it on as a page of this origin.

        Raises:
            NotSignedIn: the ticket is not valid, or of another session than that of the browser.
            NotPermitted: the browser loads the page in advance.
        """
        if "prefetch" in request.headers.get("sec-purpose", "") or "prefetch" in request.headers.get("purpose", ""):
            raise NotPermitted("this link is not opened in advance", hint="open it")
        session_key, path = self._access.take_ticket(request.query_params.get("ticket", ""), target.prefix)
        session = self._session(request, target)
        if not self._listener.names and (session is None or session.key != session_key):
            raise NotSignedIn("this link was made for another browser or session")
        response = page_response(request, leading_page(path, assets=self._assets))
        response.headers["referrer-policy"] = "no-referrer"
        if self._listener.names:
            set_program_cookie(response, request, self._access.cookie_value(session_key, target.prefix))
        return response

    @property
    def _assets(self) -> str:
        return _ASSETS.rstrip("/") + load_assets().path

    def _refusal(self, connection: HTTPConnection, error: PhalanxError) -> Response:
        """Return a page for people who follow a link or type an address, else an error of the API."""
        headers = connection.headers
        is_page = connection.scope["type"] == "http" and connection.scope["method"] == "GET"
        if not (
            is_page
            and "text/html" in headers.get("accept", "")
            and headers.get("sec-fetch-dest", "document") == "document"
        ):
            return error_response(error)
        request = Request(connection.scope)
        found = parse_program_path(connection.scope["raw_path"].decode("latin-1"))
        if isinstance(error, NotSignedIn) and self._on_own_port(connection.scope):
            path = found[0].prefix + found[1].lstrip("/") if found else PROGRAMS_PATH
            return page_response(
                request, sign_in_again_page(self._head_url(connection) + path, assets=self._assets), 401
            )
        again_s = self._again_s(error, None if found is None else found[0])
        return page_response(request, problem_page(error, assets=self._assets, again_s=again_s), error.http_status)

    def _again_s(self, error: PhalanxError, target: ProgramTarget | None) -> int | None:
        """After how many seconds the page of a refusal tries again; None if that does not help."""
        if isinstance(error, NothingListens):
            return 2
        if (
            isinstance(error, Conflict) and target is not None
        ):  # the caller may see the job, which waits or starts again
            job = self._runtime.services.store.job(target.job_id)
            return _AGAIN_S if job is not None and job.state in _LIVE and job.parked_s is None else None
        return _AGAIN_S if error.retry_helps else None

    def _head_url(self, connection: HTTPConnection) -> str:
        scheme = connection.scope["scheme"]
        if self._listener.names:
            return self._listener.head_url
        return (
            f"{scheme}://{host_name(connection.headers['host'].encode('latin-1'))}:{self._listener.head_ports[scheme]}"
        )


class ProgramMiddleware:
    """Passes requests for programs on to their app, and all others to the API."""

    def __init__(self, app: ASGIApp, programs: ProgramApp) -> None:
        self._app, self._programs = app, programs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        await (self._programs if self._programs.is_for_programs(scope) else self._app)(scope, receive, send)
