"""The audit trail: lists its lines, and verifies that it was not altered."""

from __future__ import annotations

import threading
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.paging import fitting
from phalanx.api.http.routing import OptionalNonNegative, RouteTable
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.core.access.audit import (
    AuditLine,
    ChainTip,
    ChainVerifier,
    parse_anchor,
)
from phalanx.core.errors import BadRequest, PhalanxError, TryLater
from phalanx.core.ids import UserId
from phalanx.core.work.users import Action
from phalanx.wire.api.audit import AuditFlaw, AuditLineView, AuditList, AuditReport

PAGE_MAX: Final = 1000
FLAWS_MAX: Final = 100  # in one reply
ANCHORS_MAX: Final = 100  # in one request
_verifying: Final = threading.Lock()

routes = RouteTable()


@routes.get("/v1/audit", Action.ADMINISTER, reply=AuditList)
async def list_audit(
    request: Request,
    user: UserId | None = None,
    since_s: Annotated[float, Query(ge=0)] = 0.0,
    after: OptionalNonNegative = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> Response:
    """List who changed what: the newest lines, oldest first; with `after` the lines that follow that seq."""
    services = runtime_of(request).services
    tip = services.controller.audit_tip
    lines = await run_in_thread(services.store.audit, after=after, user=user, since_s=since_s, limit=limit)
    views = [audit_line_view(line) for line in lines]
    if after is None:  # the newest ones that fit
        shown = fitting(reversed(views), services.limits.answer_bytes)[::-1]
    else:
        shown = fitting(views, services.limits.answer_bytes)
    anchor = str(tip) if tip.seq else ""
    return json_response(AuditList(lines=shown, anchor=anchor, truncated=len(shown) < len(views)))


@routes.get("/v1/audit/verify", Action.ADMINISTER, reply=AuditReport)
async def verify_audit(request: Request, anchor: Annotated[list[str] | None, Query()] = None) -> Response:
    """Read the whole trail and check its hash chain against the head's own anchors and the given anchors."""
    given = anchor or []
    if len(given) > ANCHORS_MAX:
        raise BadRequest(
            f"{len(given)} anchors; at most {ANCHORS_MAX}", hint="send only the newest anchor; it covers the older ones"
        )
    anchors = [parse_anchor(text) for text in given]
    return json_response(await run_in_thread(_verify, runtime_of(request).services, anchors))


def audit_line_view(line: AuditLine) -> AuditLineView:
    """Return the view of one line."""
    return AuditLineView(
        seq=line.seq,
        at_s=line.at_s,
        user=line.user,
        token_id=line.token_id,
        origin=line.origin,
        action=line.action,
        target=line.target,
        detail=line.detail,
        result=line.result,
    )


def _verify(services: HeadServices, given: list[ChainTip]) -> AuditReport:
    """Verify the whole trail: about 10 us per line, one verification at a time.

    Raises:
        TryLater: another verification is running.
    """
    if not _verifying.acquire(blocking=False):
        raise TryLater("another verification of the audit trail is running", hint="try again in a moment")
    try:
        stored = services.audit_checkpoints.read_all() if services.audit_checkpoints is not None else []
        anchors = [*given, *stored, services.controller.audit_tip]
        examined = ChainVerifier.for_anchors(services.audit_key, anchors)
        while lines := _page(services, examined):
            for line in lines:
                examined.verify(line)
        examined.finish()
    finally:
        _verifying.release()
    flaws = [AuditFlaw(seq=flaw.seq, text=flaw.text) for flaw in examined.flaws[:FLAWS_MAX]]
    wanted = len({str(tip) for tip in anchors if tip.seq})
    return AuditReport(lines=examined.lines, anchors=wanted, anchor=str(examined.tip), flaws=flaws)


def _page(services: HeadServices, examined: ChainVerifier) -> list[AuditLine]:
    """Return the next lines. Lines that the database cannot read are recorded as flaws and skipped."""
    after = examined.tip.seq
    try:
        return services.store.audit(after=after, limit=PAGE_MAX)
    except PhalanxError:
        pass
    readable: list[AuditLine] = []
    for seq in range(after + 1, after + 1 + PAGE_MAX):
        try:
            found = services.store.audit(after=seq - 1, limit=1)
        except PhalanxError:
            examined.add_flaw(seq, "cannot be read: its checksum or form is wrong")
            if readable:
                break
            examined.tip = ChainTip(seq=seq)  # continue after it; the next line is then reported as unproven
            continue
        if not found or found[0].seq != seq:
            break
        readable.append(found[0])
    return readable or services.store.audit(after=examined.tip.seq, limit=PAGE_MAX)
