"""Tells owners which of their jobs a planned reservation will stop: when it is planned, when such a job starts, and when it is cancelled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf

from phalanx.controller.step_context import StepContext
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.ids import NodeId, ReservationId
from phalanx.core.state.history import HistoryLine
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.reservation import Reservation

NAMED_MAX = 10  # jobs in the text of one line; each has a line of its own


@dataclass(slots=True)
class NewAttemptNotices:
    """Notices for attempts that start on nodes with a planned reservation. Keeps an index by node while no reservation changes."""

    _indexed: Mapping[ReservationId, Reservation] | None = None
    _by_node: dict[NodeId, list[Reservation]] = field(default_factory=dict)

    def announce(self, context: StepContext, attempt: Attempt) -> None:
        """Add a line to the history of a job that was just placed where a planned reservation will stop it."""
        reservations = context.world.reservations
        if reservations is not self._indexed:
            self._indexed, self._by_node = reservations, {}
            for one in sorted(reservations.values(), key=lambda one: (one.start_s, one.id)):
                for node_id in one.nodes if not one.begun else ():
                    self._by_node.setdefault(node_id, []).append(one)
        if not self._by_node:
            return
        job = context.world.jobs[attempt.job_id]
        found = {one.id: one for member in attempt.members for one in self._by_node.get(member.node_id, ())}
        stopping = [one for one in found.values() if one.interrupts(job.user, job.queue, latest_end_s(job, attempt))]
        if stopping:
            first = min(stopping, key=lambda one: (one.start_s, one.id))
            _notify(context, job, attempt, first, notice_text(first, context.now.wall_s))


def announce_reservation(context: StepContext, reservation: Reservation) -> str:
    """Add a line to the history of each job that the reservation will stop; return them in words, empty for none."""
    text = notice_text(reservation, context.now.wall_s)
    named = []
    planned = reservation.start_s > context.now.wall_s
    for job, attempt in interrupted_jobs(context, reservation, reservation.nodes):
        if planned:
            _notify(context, job, attempt, reservation, text)
        named.append(f"{job.id} ({job.user})")
    more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
    word = "job" if len(named) == 1 else "jobs"
    return f"it will stop {word} {', '.join(named[:NAMED_MAX])}{more}" if named else ""


def withdraw_notices(context: StepContext, reservation: Reservation, nodes: Collection[NodeId]) -> None:
    """Tell the jobs on these nodes that the planned reservation no longer stops them."""
    if reservation.start_s <= context.now.wall_s:
        return
    text = f"{_what(reservation)} of {fold_hostlist(sorted(nodes))} is cancelled"
    for job, attempt in interrupted_jobs(context, reservation, nodes):
        _notify(context, job, attempt, reservation, text)


def interrupted_jobs(
    context: StepContext, reservation: Reservation, nodes: Collection[NodeId]
) -> Iterator[tuple[Job, Attempt]]:
    """Jobs on these nodes that the start of the reservation would stop, in submit order."""
    found = {attempt.job_id: attempt for node_id in nodes for attempt in context.world.attempts_on(node_id)}
    for job, attempt in sorted(
        ((context.world.jobs[job_id], attempt) for job_id, attempt in found.items()), key=lambda pair: pair[0].seq
    ):
        if reservation.interrupts(job.user, job.queue, latest_end_s(job, attempt)):
            yield job, attempt


def latest_end_s(job: Job, attempt: Attempt) -> float:
    """When the attempt ends at the latest, Unix seconds; infinite without a time limit."""
    return inf if job.spec.time_limit_s is None else attempt.placed_s + job.spec.time_limit_s


def notice_text(reservation: Reservation, now_s: float) -> str:
    """What a planned reservation means for a job on its nodes. The time is in UTC: the head does not know its readers' zones."""
    when = datetime.fromtimestamp(reservation.start_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    ahead = format_duration(max(0.0, reservation.start_s - now_s))
    why = f": {reservation.why}" if reservation.why else ""
    return f"{_what(reservation)} begins in {ahead} ({when}); this job is then saved, stopped and placed elsewhere{why}"


def _what(reservation: Reservation) -> str:
    return f"{'maintenance' if reservation.maintenance else 'reservation'} {reservation.id}"


def _notify(context: StepContext, job: Job, attempt: Attempt, reservation: Reservation, text: str) -> None:
    kind = "maintenance_notice" if reservation.maintenance else "reservation_notice"
    line = HistoryLine(seq=0, at_s=context.now.wall_s, kind=kind, text=text, job_id=job.id, epoch=attempt.epoch)
    context.change.add_history(line)
