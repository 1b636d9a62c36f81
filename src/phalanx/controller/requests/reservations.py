"""Requests about reservations: create one, end one, submit a job to one. Each is validated before anything is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.controller import reservation_windows
from phalanx.controller.maintenance_notices import announce_reservation
from phalanx.controller.requests.request_handlers import RequestHandlers
from phalanx.controller.step_context import StepContext
from phalanx.core.access.audit import join_names
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ReservationId
from phalanx.core.state.events import EndReservation, PutReservation, SubmitJob
from phalanx.core.state.records import USERS
from phalanx.core.units import format_duration
from phalanx.core.work.reservation import NO_USER, Reservation
from phalanx.core.work.users import Action

AHEAD_MAX_S: Final = 366 * 86_400.0  # limit of start and length: anything further off is a typo in the year
RESERVATIONS_MAX: Final = 1000  # at once; two a week on each of ten racks for a year. Each change copies the table


handlers: Final = RequestHandlers()


@handlers.add(
    PutReservation,
    Action.OPERATE,
    audit=lambda request, _: (
        f"reservation {request.reservation.id} nodes {join_names(sorted(request.reservation.nodes))}"
    ),
)
def put(context: StepContext, request: PutReservation) -> Reservation:
    """Create a reservation. Idempotent: an equal one is returned as it is.

    Raises:
        BadRequest: no nodes, no duration, or too far in the future.
        NotFound: a node, user or queue does not exist.
        Conflict: the name is taken, or another reservation has one of the nodes at that time.
    """
    wanted = replace(request.reservation, begun=False, ended=False, cordons=())
    existing = context.world.reservations.get(wanted.id)
    if existing is not None:
        if replace(existing, begun=False, by=NO_USER, cordons=()) == replace(wanted, by=NO_USER):
            return existing
        raise Conflict(
            f"reservation {wanted.id} already exists",
            hint=Hint(HintCode.RENAME_RESERVATION, reservation=wanted.id),
        )
    _check_time(wanted, context.now.wall_s)
    _check_names(context, wanted)
    _check_clash(context, wanted)
    context.change.put(wanted)
    stops = announce_reservation(context, wanted)
    text = "; ".join(filter(None, [_summary(wanted, context.now.wall_s), stops]))
    context.add_history("maintenance_planned" if wanted.maintenance else "reserved", text, by=wanted.by)
    return wanted


@handlers.add(EndReservation, Action.OPERATE, audit=lambda request, _: f"reservation {request.reservation_id}")
def end(context: StepContext, request: EndReservation) -> Reservation:
    """End a reservation: its nodes accept any job again.

    Raises:
        NotFound: no such reservation, or it has ended.
    """
    return reservation_windows.end(context, _known(context, request.reservation_id), "was ended", by=request.by)


def check_named(context: StepContext, submit: SubmitJob) -> None:
    """Check the reservation that a submit names, if any.

    Raises:
        NotFound: no such reservation, or it has ended.
        NotPermitted: it does not admit this user and queue.
    """
    if not submit.spec.reservation:
        return
    reservation = _known(context, ReservationId(submit.spec.reservation))
    if not reservation.admits(submit.user, submit.queue):
        raise NotPermitted(
            f"reservation {reservation.id} is for {reservation.holders_text}, not for {submit.user} in queue {submit.queue}",
            hint="submit without the reservation, or to a queue that it admits",
        )


def _known(context: StepContext, reservation_id: ReservationId) -> Reservation:
    reservation = context.world.reservations.get(reservation_id)
    if reservation is None:
        raise NotFound(f"no reservation {reservation_id!r}", hint=Hint(HintCode.LIST_RESERVATIONS))
    return reservation


def _check_time(wanted: Reservation, now_s: float) -> None:
    if abs(wanted.start_s - now_s) > AHEAD_MAX_S or wanted.end_s - wanted.start_s > AHEAD_MAX_S:
        raise BadRequest(
            f"reservation {wanted.id} begins or ends more than {format_duration(AHEAD_MAX_S)} from now",
            hint="check the year",
        )
    if wanted.end_s <= wanted.start_s:
        raise BadRequest(f"reservation {wanted.id} has no duration", hint="give a duration, for example 4h")
    if wanted.end_s <= now_s:
        ago = format_duration(now_s - wanted.end_s)
        raise BadRequest(f"reservation {wanted.id} would have ended {ago} ago", hint="let it start now")


def _check_names(context: StepContext, wanted: Reservation) -> None:
    world = context.world
    if not wanted.nodes:
        raise BadRequest(f"reservation {wanted.id} names no node", hint="name nodes, for example gpu[001-004]")
    if len(set(wanted.nodes)) != len(wanted.nodes):
        raise BadRequest(f"reservation {wanted.id} names a node twice")
    for kind, names, known, code in (
        ("node", wanted.nodes, world.nodes, HintCode.LIST_NODES),
        ("user", sorted(wanted.users), world.table(USERS), HintCode.LIST_USERS),
        ("queue", sorted(wanted.queues), world.queues, HintCode.LIST_QUEUES),
    ):
        missing = [name for name in names if name not in known]
        if missing:
            raise NotFound(f"no {kind} {missing[0]!r}", hint=Hint(code))


def _check_clash(context: StepContext, wanted: Reservation) -> None:
    others = context.world.reservations
    if len(others) >= RESERVATIONS_MAX:
        raise Conflict(
            f"there are already {len(others)} reservations, the maximum", hint=Hint(HintCode.END_A_RESERVATION)
        )
    for other in sorted(others.values(), key=lambda one: (one.start_s, one.id)):
        shared = wanted.conflicting_nodes(other)
        if shared:
            raise Conflict(
                f"{fold_hostlist(sorted(shared))} {'is' if len(shared) == 1 else 'are'} already reserved at that time:"
                f" {_summary(other, context.now.wall_s)}",
                hint=Hint(HintCode.MOVE_RESERVATION, reservation=other.id),
            )


def _summary(reservation: Reservation, now_s: float) -> str:
    """The reservation in one line, with relative times: the head does not know its readers' time zones."""
    ahead_s = reservation.start_s - now_s
    lasting = (
        "open-ended" if reservation.open_ended else f"for {format_duration(reservation.end_s - reservation.start_s)}"
    )
    if reservation.begun:
        lasts = f"for another {format_duration(reservation.end_s - now_s)}"
    else:
        lasts = f"in {format_duration(ahead_s)}, {lasting}" if ahead_s > 0 else f"from now on, {lasting}"
    why = f": {reservation.why}" if reservation.why else ""
    nodes = fold_hostlist(sorted(reservation.nodes))
    return f"{reservation.id}, {nodes} for {reservation.holders_text}, {lasts}{why}"
