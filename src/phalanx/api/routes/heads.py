"""The heads that share one store: the leader and the standbys."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import runtime_of
from phalanx.core.work.users import Action
from phalanx.ports.election import HeadRecord, Leader
from phalanx.wire.api.head import HeadList, HeadView

SILENT_AFTER_S: Final = 5.0  # heads report their presence every second

routes = RouteTable()


@routes.get("/v1/heads", Action.VIEW, reply=HeadList)
async def list_heads(request: Request) -> Response:
    """List the heads that share this head's store: the leader and its term, the standbys, and the silent heads."""
    among = runtime_of(request).services.leader_status
    if among is None:
        return json_response(HeadList(heads=[]))
    leader = among.leader()
    views = [_view(head, leader) for head in among.heads()]
    return json_response(HeadList(heads=views, term=leader.term, since_s=leader.since_s, renewed_s=leader.renewed_s))


def _view(head: HeadRecord, leader: Leader) -> HeadView:
    role = "leader" if head.head_id == leader.holder else "silent" if head.seen_ago_s > SILENT_AFTER_S else "standby"
    return HeadView(
        name=head.name,
        url=head.url,
        role=role,
        version=head.version,
        started_s=head.started_s,
        seen_ago_s=head.seen_ago_s,
    )
