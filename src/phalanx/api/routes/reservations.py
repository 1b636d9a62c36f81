"""Reservations: nodes reserved for users and queues, or for maintenance."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response, no_content, read_record
from phalanx.api.http.paging import AfterKey, key_page
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.node_records import reservation_view
from phalanx.core.errors import BadRequest
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ReservationId, UserId
from phalanx.core.state.events import EndReservation, PutReservation
from phalanx.core.state.records import RESERVATIONS
from phalanx.core.units import parse_duration_s
from phalanx.core.work.names import is_name
from phalanx.core.work.reservation import OPEN_ENDED_S, Reservation
from phalanx.core.work.users import Action
from phalanx.wire.api.nodes import ReservationBody, ReservationList, ReservationReply

routes = RouteTable()


@routes.get("/v1/reservations", Action.VIEW, reply=ReservationList)
async def list_reservations(request: Request, after: AfterKey = "") -> Response:
    """List all reservations that have not ended, by start time."""
    services = runtime_of(request).services
    found = await run_in_thread(services.store.reservations)
    found.sort(key=lambda one: (one.start_s, one.id))
    views = [reservation_view(one) for one in found]
    page, further = key_page(views, after, lambda view: view.id, services.limits.answer_bytes)
    return json_response(ReservationList(reservations=page, next=further))


@routes.put("/v1/reservations/{reservation_id}", Action.OPERATE, body=ReservationBody, reply=ReservationReply)
async def put_reservation(request: Request, reservation_id: ReservationId) -> Response:
    """Make a reservation. Idempotent; an existing reservation cannot be changed."""
    runtime = runtime_of(request)
    body = await read_record(request, ReservationBody, runtime.services.limits.body_bytes)
    wanted = await run_in_thread(_wanted, runtime.services, reservation_id, body, caller_of(request).user)
    made = await runtime.request(PutReservation(reservation=wanted))
    runtime.hub.notify(())
    return json_response(ReservationReply(reservation=reservation_view(made)))


@routes.delete("/v1/reservations/{reservation_id}", Action.OPERATE)
async def end_reservation(request: Request, reservation_id: ReservationId) -> Response:
    """End a reservation. Idempotent."""
    runtime = runtime_of(request)
    known = await run_in_thread(runtime.services.store.record, RESERVATIONS, reservation_id)
    if known is None or not known.ended:
        await runtime.request(EndReservation(reservation_id=reservation_id, by=caller_of(request).user))
        runtime.hub.notify(())
    return no_content()


def _wanted(services: HeadServices, reservation_id: ReservationId, body: ReservationBody, by: UserId) -> Reservation:
    if not is_name(reservation_id):
        raise BadRequest(
            f"{reservation_id[:80]!r} is not a valid name for a reservation",
            hint="use letters, digits and . _ - @ +, at most 63 characters, starting with a letter or digit",
        )
    if body.maintenance == bool(body.users or body.queues):
        raise BadRequest(
            f"reservation {reservation_id}: it must be either for maintenance or for users and queues",
            hint=Hint(HintCode.RESERVE_FOR),
        )
    if body.open_cordoned and body.maintenance:
        raise BadRequest(
            f"reservation {reservation_id}: no job may use the nodes during maintenance",
            hint="name the users or queues to which cordoned nodes are open",
        )
    if not body.time and not body.maintenance:
        raise BadRequest(f"reservation {reservation_id} has no duration", hint="give a duration, for example 4h")
    lasting_s = parse_duration_s(body.time, what="time") if body.time else OPEN_ENDED_S
    start_s = body.start_s
    if start_s is None:  # a repeated request keeps the start of the first one, so that it does not contradict it
        existing = services.store.record(RESERVATIONS, ReservationId(reservation_id))
        start_s = services.clock.now_s() if existing is None or existing.ended else existing.start_s
    return Reservation(
        id=reservation_id,
        nodes=tuple(body.nodes),
        start_s=start_s,
        end_s=start_s + lasting_s,
        users=frozenset(body.users),
        queues=frozenset(body.queues),
        why=body.why[:500],
        by=by,
        open_ended=not body.time,
        open_cordoned=body.open_cordoned,
    )
