"""The list of waste: which jobs and nodes waste GPUs now, and what mends it."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import run_in_thread, runtime_of
from phalanx.controller.usage.waste_monitor import WasteNow
from phalanx.core.accounting.usage_alarms import Spell, WasteSighting
from phalanx.core.accounting.waste_advice import ADVICE, remedy
from phalanx.core.ids import ProjectId, QueueId, UserId
from phalanx.core.resources import MILLI_PER_DEVICE
from phalanx.core.work.usage.waste_terms import WasteKind
from phalanx.core.work.users import Action
from phalanx.wire.api.waste import WasteRowView, WasteView

ROWS_MAX: Final = 500  # in one answer: with long names of jobs and nodes half a megabyte
NODES_MAX: Final = 8  # named in one row
routes = RouteTable()


@routes.get("/v1/waste", Action.VIEW, reply=WasteView)
async def list_waste(
    request: Request,
    user: UserId | None = None,
    project: ProjectId | None = None,
    queue: QueueId | None = None,
    kind: WasteKind | None = None,
    early: bool = False,
    limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_MAX,
) -> Response:
    """List the jobs and nodes that waste GPUs now. `early` includes those that have not wasted them for long enough to be an alarm."""
    only = {"user": user, "project": project, "queue": queue}
    found = runtime_of(request).services.waste()
    return json_response(await run_in_thread(waste_view, found, only, kind, early, limit))


def waste_view(
    found: WasteNow,
    only: dict[str, UserId | ProjectId | QueueId | None],
    kind: WasteKind | None,
    early: bool,
    limit: int,
) -> WasteView:
    """The list of waste, of the jobs of a user, project or queue, or of all. What is no alarm yet is listed only while it lasts."""
    chosen = [
        spell
        for spell in found.spells
        if (spell.alarmed or (early and spell.seen_ms == found.at_ms))
        and (kind is None or spell.newest.kind is kind)
        and all(value is None or getattr(spell.newest.job, key, None) == value for key, value in only.items())
    ]
    return WasteView(
        at_s=found.at_ms / 1000,
        rows=[waste_row(spell) for spell in chosen[:limit]],
        alarms=sum(spell.alarmed for spell in chosen),
        gpus=sum(spell.newest.milli for spell in chosen) / MILLI_PER_DEVICE,
        gpu_hours=sum(spell.gpu_hours for spell in chosen),
        left_off=max(0, len(chosen) - limit),
    )


def waste_row(spell: Spell[WasteSighting]) -> WasteRowView:
    """The row of one spell."""
    seen, job, hint = spell.newest, spell.newest.job, remedy(spell.newest)
    reason = ADVICE[seen.kind]
    return WasteRowView(
        kind=seen.kind.value,
        alarm=spell.alarmed,
        gpus=seen.milli / MILLI_PER_DEVICE,
        gpus_held=seen.held_milli / MILLI_PER_DEVICE,
        since_s=spell.since_ms / 1000,
        after_s=spell.after_ms / 1000,
        gpu_hours=spell.gpu_hours,
        gpu_us=spell.lost,
        advice=f"{reason}: {seen.why}" if seen.why else reason,
        hint=str(hint),
        hint_code=hint.code.value,
        hint_args=dict(hint.arguments),
        job="" if job is None else job.id,
        name="" if job is None else job.name,
        user="" if job is None else job.user,
        project="" if job is None else job.project,
        queue="" if job is None else job.queue,
        service="" if job is None or job.replica is None else job.replica.service,
        nodes=list(seen.nodes[:NODES_MAX]),
        nodes_more=max(0, len(seen.nodes) - NODES_MAX),
        model=seen.model,
    )
