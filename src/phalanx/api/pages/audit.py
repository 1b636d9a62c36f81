"""The page of the audit trail: lines from the newest backwards, all or those of a user or of an object."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.routing import MediaType, OptionalNonNegative, RouteTable
from phalanx.api.pages.responses import error_page, page_response, viewer_of
from phalanx.api.routes.access.audit import audit_line_view
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.access.audit import AuditLine
from phalanx.core.ids import UserId
from phalanx.core.work.users import Action
from phalanx.web.audit_page import audit_page

LINES_SHOWN: Final = 100  # on one page
_READ: Final = 1000  # lines at once
READS_MAX: Final = 10  # for one page: 10,000 lines, about 10 us each

routes = RouteTable()


@routes.get("/audit", Action.ADMINISTER, reply=MediaType.HTML, error_page=error_page)
async def show_audit_trail(
    request: Request,
    user: Annotated[str, Query(max_length=200)] = "",
    object_: Annotated[str, Query(alias="object", max_length=200)] = "",
    before: OptionalNonNegative = None,
) -> Response:
    """Show lines of the audit trail, newest first: those of a user, or of an object, or before a line."""
    services = runtime_of(request).services
    lines, older = await run_in_thread(_find_lines, services, user.strip(), object_.strip(), before)
    asked = {"user": user, "object": object_}
    return page_response(
        request, audit_page([audit_line_view(line) for line in lines], older, asked, viewer_of(request))
    )


def _find_lines(
    services: HeadServices, user: str, wanted: str, before: int | None
) -> tuple[list[AuditLine], int | None]:
    """Return the newest matching lines before the line `before`, newest first, and where to search further; None at the beginning.

    Numbers of lines have no gaps, so that a range of them is a range of numbers.
    """
    end = services.controller.audit_tip.seq + 1
    end = end if before is None else min(before, end)
    found: list[AuditLine] = []
    for _ in range(READS_MAX):
        if end <= 1:
            return found, None
        begin = max(1, end - (_READ if user or wanted else LINES_SHOWN))
        read = services.store.audit(after=begin - 1, user=UserId(user) if user else None, limit=end - begin)
        for line in reversed(read):
            if line.seq < end and (not wanted or _is_about(line, wanted)):
                found.append(line)
                if len(found) == LINES_SHOWN:
                    return found, line.seq if line.seq > 1 else None
        end = begin
    return found, end if end > 1 else None


def _is_about(line: AuditLine, wanted: str) -> bool:
    """Whether a word of the object or of the detail is what is wanted: "job_id=17", or its value "17"."""
    words = f"{line.target} {line.detail}".replace(",", " ").split()
    return any(wanted in (word, word.partition("=")[2]) for word in words)
