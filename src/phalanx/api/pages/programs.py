"""Where a browser begins: /j/JOB/PORT/ at the dashboard's own origin. It sends people on to the origin of programs, and shows no page of one."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.auth.audited_call import audit_call_of
from phalanx.api.auth.authenticator import authorize_job
from phalanx.api.auth.browser_sessions import BrowserSession
from phalanx.api.http.routing import MediaType, RouteTable
from phalanx.api.http.security import PROGRAMS_PATH, host_name, is_foreign
from phalanx.api.pages.responses import error_page, page_response
from phalanx.api.programs.targets import OPEN_PATH, parse_program_path
from phalanx.api.runtime import caller_of, runtime_of
from phalanx.core.errors import Conflict, NotFound, NotPermitted, NotSignedIn, PhalanxError
from phalanx.core.hints import Hint, HintCode
from phalanx.core.work.users import Action
from phalanx.web.assets import load_assets
from phalanx.web.program_pages import asking_page, leading_page, problem_page

_PATH: Final = f"{PROGRAMS_PATH}{{address:path}}"

routes = RouteTable()


def _entry_error_page(request: Request, error: PhalanxError) -> Response:
    """Return the page of a refusal; to a page of another site, only the question whether to open the program."""
    if is_foreign(request):
        return _asking(request)
    if isinstance(error, NotSignedIn):
        return error_page(request, error)
    return page_response(request, problem_page(error, assets=load_assets().path), error.http_status)


@routes.get(_PATH, Action.CHANGE_OWN, reply=MediaType.HTML, error_page=_entry_error_page)
async def open_program(request: Request) -> Response:
    """Lead a browser to a web program of a job: a ticket lets it in there, once, within a minute."""
    runtime, caller = runtime_of(request), caller_of(request)
    if is_foreign(request):
        return _asking(request)
    found = parse_program_path(request.scope["raw_path"].decode("latin-1"))
    if found is None:
        raise NotFound("no program of a job is here", hint="the address is /j/JOB/PORT/, as in /j/17/8888/")
    target, rest = found
    try:
        job = authorize_job(runtime.services.store, caller, Action.CHANGE_OWN, target.job_id)
    except NotPermitted as error:
        runtime.record_refusal(audit_call_of(request, caller, _PATH), error)
        raise
    listener = runtime.services.programs
    session: BrowserSession | None = getattr(request.state, "browser_session", None)
    if listener is None or session is None:
        raise Conflict(
            "this head serves no pages of jobs",
            hint=Hint(HintCode.FORWARD_PORT, job=job.id, port=str(target.port)),
        )
    query = request.scope["query_string"].decode("latin-1")
    path = f"{target.prefix}{rest.removeprefix('/')}{'?' if query else ''}{query}"
    host = host_name(request.headers["host"].encode("latin-1"))
    if listener.names:
        host = f"{target.label}.{listener.names}"
        if not any(one.port == target.port and one.keep_path for one in job.spec.ports):
            path = "/" + path.removeprefix(target.prefix)
    ticket = runtime.program_access.make_ticket(session, target.prefix, path)
    url = f"{request.scope['scheme']}://{host}:{listener.port}{target.prefix}{OPEN_PATH}?ticket={ticket}"
    response = page_response(request, leading_page(url, assets=load_assets().path))
    response.headers["referrer-policy"] = "no-referrer"
    return response


def _asking(request: Request) -> Response:
    query = request.scope["query_string"].decode("latin-1")
    path = request.scope["raw_path"].decode("latin-1") + ("?" if query else "") + query
    return page_response(request, asking_page(path, assets=load_assets().path))
