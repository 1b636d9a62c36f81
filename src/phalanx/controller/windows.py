"""Reservations begin and end: their nodes are cleared of who may not use them, and given back.

A window follows the wall clock, as the people do who agreed on it: a head whose clock is set begins and ends it by the new time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from phalanx.controller.turn import Turn
from phalanx.core.fleet.hostlist import fold
from phalanx.core.ids import ReservationId
from phalanx.core.lifecycle.happenings import StopWanted
from phalanx.core.scheduling.calendar import Calendar, intruders
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Cause
from phalanx.core.work.reservation import Reservation


@dataclass(slots=True)
class Windows:
    """When to look at the reservations again. A look that found something to do is followed by another: the store may refuse the step."""

    _seen: Mapping[ReservationId, Reservation] | None = None
    _looked_s: float = inf
    _next_s: float = inf

    def open(self, turn: Turn) -> None:
        """Begin and end what is due, and ask to leave whoever holds nodes set aside for others. O(1) while nothing is due."""
        reservations = turn.world.reservations
        now_s = turn.now.wall_s
        # Earlier than the last look: the clock was set back.
        if reservations is self._seen and self._looked_s <= now_s < self._next_s:
            return
        self._seen = None
        at_rest = True
        for reservation in sorted(reservations.values(), key=lambda one: (one.start_s, one.id)):
            at_rest &= self._look(turn, reservation)
        if at_rest:
            self._seen, self._looked_s = reservations, now_s
            self._next_s = Calendar(reservations.values()).next_change_s(now_s)

    def due_in_s(self, reservations: Mapping[ReservationId, Reservation], wall_s: float) -> float:
        """How long until something falls due by itself. Those who leave report it, so that waiting for them is no reason to wake."""
        if reservations is not self._seen:
            return min((max(0.0, _next_s(one, wall_s) - wall_s) for one in reservations.values()), default=inf)
        return max(0.0, self._next_s - wall_s)

    def _look(self, turn: Turn, reservation: Reservation) -> bool:
        """Bring one reservation up to now; whether it was already."""
        now_s = turn.now.wall_s
        if now_s >= reservation.end_s:
            end(turn, reservation, "is over", by="")
            return False
        if not reservation.holds(now_s):
            if reservation.begun:  # the clock was set back: it will begin again
                turn.change.put(replace(reservation, begun=False))
            return not reservation.begun
        if not reservation.begun:
            begin(turn, reservation)
        leave = intruders(reservation, turn.world.on_node, turn.world.jobs)
        for job_id in leave:
            # Said until they are gone, and heard once: nobody need remember whom a window has asked already.
            why = f"reservation {reservation.id} begins"
            turn.happen(job_id, StopWanted(cause=Cause.DRAINED, why=why, by=reservation.by))
        return reservation.begun and not leave


def begin(turn: Turn, reservation: Reservation) -> None:
    """The nodes are set aside from now on; jobs that waited for it may start."""
    turn.change.put(replace(reservation, begun=True))
    length = format_duration(reservation.end_s - reservation.start_s)
    text = f"reservation {reservation.id} begins: {fold(sorted(reservation.nodes))} for {reservation.holders}, for {length}"
    turn.tell("reservation_begun", text, by=reservation.by)


def end(turn: Turn, reservation: Reservation, how: str, *, by: str) -> Reservation:
    """The nodes take any work again."""
    ended = replace(reservation, ended=True)
    turn.change.put(ended)
    text = f"reservation {reservation.id} {how}: {fold(sorted(reservation.nodes))} set aside for {reservation.holders} no more"
    turn.tell("reservation_ended", text, by=by)
    return ended


def _next_s(reservation: Reservation, now_s: float) -> float:
    """When it begins or ends; `inf` while only its intruders are awaited."""
    return reservation.end_s if reservation.begun else max(reservation.start_s, now_s)
