"""Begins and ends reservations: stops other jobs on their nodes, and releases the nodes at the end.

Reservations follow the wall clock: if the head's clock is set, they begin and end by the new time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from phalanx.controller.maintenance_notices import withdraw_notices
from phalanx.controller.requests.pools import leaving_member
from phalanx.controller.step_context import StepContext
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import Cordon
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.lifecycle.events import StopRequested
from phalanx.core.scheduling.reservation_calendar import ReservationCalendar, jobs_to_evict
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.reservation import Reservation


@dataclass(slots=True)
class ReservationWindows:
    """When to check the reservations next. A check that changed something is repeated, since the store may refuse the step."""

    _checked: Mapping[ReservationId, Reservation] | None = None
    _checked_s: float = inf
    _next_s: float = inf

    def update(self, context: StepContext) -> None:
        """Begin and end reservations that are due, and stop jobs on nodes reserved for others. O(1) while nothing is due."""
        reservations = context.world.reservations
        now_s = context.now.wall_s
        # `now_s` before the last check: the clock was set back.
        if reservations is self._checked and self._checked_s <= now_s < self._next_s:
            return
        self._checked = None
        settled = True
        for reservation in sorted(reservations.values(), key=lambda one: (one.start_s, one.id)):
            settled &= self._update(context, reservation)
        if settled:
            self._checked, self._checked_s = reservations, now_s
            self._next_s = ReservationCalendar(reservations.values()).next_change_s(now_s)

    def due_in_s(self, reservations: Mapping[ReservationId, Reservation], wall_s: float) -> float:
        """Time until the next begin or end. Jobs that are being stopped cause events of their own, so they need no wake-up."""
        if reservations is not self._checked:
            return min((max(0.0, _next_s(one, wall_s) - wall_s) for one in reservations.values()), default=inf)
        return max(0.0, self._next_s - wall_s)

    def _update(self, context: StepContext, reservation: Reservation) -> bool:
        """Bring one reservation up to date; return whether nothing had to change."""
        now_s = context.now.wall_s
        if now_s >= reservation.end_s:
            end(context, reservation, "has ended", by="")
            return False
        if not reservation.is_active(now_s):
            if reservation.begun:  # the clock was set back: it will begin again
                context.change.put(replace(reservation, begun=False))
            return not reservation.begun
        if not reservation.begun:
            if reservation.open_ended:
                drain_nodes(context, reservation)
                return False
            begin(context, reservation)
        to_stop = jobs_to_evict(reservation, context.world.attempts_by_node, context.world.jobs)
        for job_id in to_stop:
            # Repeated until the job is gone: StopRequested is idempotent, so no state is needed for whom to stop.
            why = f"reservation {reservation.id} begins"
            context.apply_event(job_id, StopRequested(cause=EndCause.DRAINED, why=why, by=reservation.by))
        return reservation.begun and not to_stop


def begin(context: StepContext, reservation: Reservation) -> None:
    """Mark the reservation as begun: jobs that waited for it may start."""
    context.change.put(
        replace(reservation, begun=True, cordons=reservation.cordons + _lift_cordons(context, reservation))
    )
    length = format_duration(reservation.end_s - reservation.start_s)
    text = f"reservation {reservation.id} begins: {fold_hostlist(sorted(reservation.nodes))} for {reservation.holders_text}, for {length}"
    context.add_history(_kind(reservation, "begun"), text, by=reservation.by)


def _lift_cordons(context: StepContext, reservation: Reservation) -> tuple[tuple[NodeId, Cordon], ...]:
    """Open nodes that an operator cordoned to the reservation's holders, if it asks for that; return the cordons."""
    lifted = []
    for node_id in reservation.nodes if reservation.open_cordoned else ():
        node = context.world.nodes.get(node_id)
        if node is None or node.cordon is None or node.cordoned_by_engine or leaving_member(context, node_id):
            continue
        lifted.append((node_id, node.cordon))
        context.change.put(replace(node, cordon=None, changed_s=context.now.wall_s))
        text = f"{node_id} is open to {reservation.holders_text} for reservation {reservation.id}, and then cordoned again: {node.cordon.why}"
        context.add_history("cordon_lifted", text, node_id=node_id, by=reservation.by)
    return tuple(lifted)


def _restore_cordons(context: StepContext, reservation: Reservation) -> None:
    """Cordon nodes again whose cordon was lifted, unless they have another one by now."""
    for node_id, cordon in reservation.cordons:
        node = context.world.nodes.get(node_id)
        if node is None or node.cordon is not None:
            continue
        context.change.put(replace(node, cordon=cordon, changed_s=context.now.wall_s))
        text = f"{node_id} is cordoned again: {cordon.why}"
        context.add_history("cordon_restored", text, node_id=node_id, by=reservation.by)


def forget_cordon(context: StepContext, node_id: NodeId) -> bool:
    """An operator returns a node to service: the cordon that a reservation lifted does not come back. Return whether there was one."""
    found = False
    for reservation in list(context.world.reservations.values()):
        kept = tuple(one for one in reservation.cordons if one[0] != node_id)
        if len(kept) < len(reservation.cordons):
            context.change.put(replace(reservation, cordons=kept))
            found = True
    return found


def drain_nodes(context: StepContext, reservation: Reservation) -> None:
    """Drain the nodes of an open-ended window, as an operator would now; from then on only their cordon keeps jobs away."""
    why = reservation.why or f"maintenance {reservation.id}"
    cordon = Cordon(by=reservation.by, why=why, since_s=context.now.wall_s, drain=True)
    for node_id in reservation.nodes:
        node = context.world.nodes.get(node_id)
        if node is None or (node.cordon is not None and node.cordon.drain):
            continue
        context.change.put(replace(node, cordon=cordon, changed_s=context.now.wall_s))
        text = f"{node_id} is drained by {reservation.by}: {why}"
        context.add_history("drained", text, node_id=node_id, by=reservation.by)
        context.stop_jobs_on(node_id, by=reservation.by, why=why)
    context.change.put(replace(reservation, begun=True, ended=True))


def end(context: StepContext, reservation: Reservation, how: str, *, by: str) -> Reservation:
    """End the reservation: its nodes accept any job again."""
    withdraw_notices(context, reservation, reservation.nodes)
    _restore_cordons(context, reservation)
    ended = replace(reservation, ended=True, cordons=())
    context.change.put(ended)
    text = f"reservation {reservation.id} {how}: {fold_hostlist(sorted(reservation.nodes))} no longer reserved for {reservation.holders_text}"
    context.add_history(_kind(reservation, "ended"), text, by=by)
    return ended


def release_nodes(context: StepContext, node_id: NodeId, *, planned: bool, by: str) -> bool:
    """Take a node out of its maintenance windows: those that have begun and, with `planned`, later ones. Return whether one changed."""
    changed = False
    for reservation in sorted(context.world.reservations.values(), key=lambda one: (one.start_s, one.id)):
        if not reservation.maintenance or node_id not in reservation.nodes or not (reservation.begun or planned):
            continue
        changed = True
        rest = tuple(other for other in reservation.nodes if other != node_id)
        if not rest:
            end(context, reservation, "was ended", by=by)
            continue
        withdraw_notices(context, reservation, (node_id,))
        context.change.put(replace(reservation, nodes=rest))
        text = f"reservation {reservation.id} no longer contains {node_id}"
        context.add_history("maintenance_ended", text, node_id=node_id, by=by)
    return changed


def _kind(reservation: Reservation, event: str) -> str:
    """Kind of the history line: maintenance is announced on channels, other reservations are not."""
    return f"{'maintenance' if reservation.maintenance else 'reservation'}_{event}"


def _next_s(reservation: Reservation, now_s: float) -> float:
    """When the reservation begins or, if it has begun, ends."""
    return reservation.end_s if reservation.begun else max(reservation.start_s, now_s)
