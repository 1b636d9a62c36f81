"""Which nodes reservations close to a job, until when that holds, and which jobs must leave when one begins.

The scheduler calls `closed_nodes` once for a class of jobs and keeps the answer until its `until_s`; the controller calls `jobs_to_evict`.
A reservation closes its nodes to a job that it does not admit while it holds, and before that as soon as the job could still be
running when it begins: a job is not started only to be stopped again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, nextafter
from typing import Final

from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId, UserId
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.reservation import Reservation

# The assumed run time of a job without a time limit. Zero would start jobs that are stopped minutes later; infinite would
# leave nodes idle for weeks before a window that was announced early. A day: 97 of 100 jobs of the Philly trace (October 2017)
# ran shorter, and the others save and move when the window begins.
DEFAULT_HORIZON_S: Final = 86_400.0
_MEMO_MAX: Final = 4096  # cached answers; they differ by admission and number of windows reached, a handful in practice


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationQuery:
    """The properties of a job that matter here: jobs with equal ones get the same answer.

    Attributes:
        limit_s: its time limit; None for no limit.
        reservation: the one it must run in; "" for none.
    """

    user: UserId
    queue: QueueId
    limit_s: float | None = None
    reservation: str = ""


def reservation_query_of(job: Job) -> ReservationQuery:
    """The properties of a job."""
    return ReservationQuery(
        user=job.user, queue=job.queue, limit_s=job.spec.time_limit_s, reservation=job.spec.reservation
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedNodes:
    """The nodes that a job may not use.

    Attributes:
        nodes: closed to it.
        only: it may use no other nodes; None for any. Empty if the reservation is not active or does not admit the job.
        reservations: the reservations that close `nodes` or restrict `only`, the earliest first.
    """

    nodes: frozenset[NodeId] = frozenset()
    only: frozenset[NodeId] | None = None
    reservations: tuple[ReservationId, ...] = ()

    def closed_in(self, fleet: Collection[NodeId]) -> frozenset[NodeId]:
        """The closed nodes of the fleet, with `only` taken into account. Linear in the fleet only for jobs that name a reservation."""
        if self.only is None:
            return self.nodes
        return frozenset(node_id for node_id in fleet if node_id in self.nodes or node_id not in self.only)


NOTHING_CLOSED: Final = ClosedNodes()  # the answer while nothing is reserved


class ReservationCalendar:
    """All reservations that have not ended, by start. Rebuilt when one is added or ended."""

    __slots__ = ("_begins", "_ends", "_masks", "_memo", "_windows")

    def __init__(self, reservations: Iterable[Reservation] = ()) -> None:
        # Ties by id, so that equal sets of reservations give equal answers, byte for byte.
        self._windows = sorted((one for one in reservations if not one.ended), key=lambda one: (one.start_s, one.id))
        self._begins = [one.start_s for one in self._windows]
        self._ends = sorted(one.end_s for one in self._windows)
        self._masks: dict[tuple[UserId, QueueId], int] = {}
        self._memo: dict[tuple[int, int, int, int, str], ClosedNodes] = {}

    def __bool__(self) -> bool:
        """Whether anything is reserved; if not, no check is needed."""
        return bool(self._windows)

    def closed_nodes(self, asker: ReservationQuery, now_s: float) -> ClosedNodes:
        """The nodes where such a job may not start at `now_s`; valid until `until_s(asker, now_s)`.

        Cost: two bisections; the sets are computed once for all jobs with the same admissions that reach the same windows.
        """
        if not self._windows:
            return NOTHING_CLOSED if not asker.reservation else ClosedNodes(only=frozenset())
        reached, over = self._reached(asker, now_s), bisect_right(self._ends, now_s)
        begun = bisect_right(self._begins, now_s) if asker.reservation else 0  # other jobs are excluded in any case
        key = (self._admitted(asker.user, asker.queue), reached, over, begun, asker.reservation)
        cached = self._memo.get(key)
        if cached is None:
            if len(self._memo) >= _MEMO_MAX:
                self._memo.clear()
            cached = self._memo[key] = self._closed_nodes(key[0], reached, asker.reservation, now_s)
        return cached

    def valid_until_s(self, asker: ReservationQuery, now_s: float) -> float:
        """When the answer may change next without a change of reservations; later than `now_s`, `inf` for never."""
        reached, over = self._reached(asker, now_s), bisect_right(self._ends, now_s)
        ends = self._ends[over] if over < len(self._ends) else inf
        # At `meets` a job just fits before the next window; at the next representable time it does not.
        meets = self._begins[reached] - _run_s(asker) if reached < len(self._begins) else inf
        named = next((one.start_s for one in self._windows if one.id == asker.reservation), inf)
        return min(ends, nextafter(max(meets, now_s), inf), named if named > now_s else inf)

    def next_change_s(self, now_s: float) -> float:
        """When a reservation next begins or ends; `inf` for never. For one class, see `until_s`."""
        begin = bisect_right(self._begins, now_s)
        end = bisect_right(self._ends, now_s)
        return min(
            self._begins[begin] if begin < len(self._begins) else inf, self._ends[end] if end < len(self._ends) else inf
        )

    def explain(self, closed: ClosedNodes, asker: ReservationQuery, now_s: float) -> str:
        """Why the nodes are closed, for users: the first reservation, and when it begins or ends. Empty for `NOTHING_CLOSED`."""
        if asker.reservation and closed.only is not None and not closed.only:
            return self._named_text(asker, now_s)
        one = next((one for one in self._windows if closed.reservations and one.id == closed.reservations[0]), None)
        if one is None:
            return ""
        what = f"{len(one.nodes)} node{'' if len(one.nodes) == 1 else 's'} reserved for {one.holders_text} ({one.id})"
        if one.is_active(now_s):
            return f"{what} for another {format_duration(one.end_s - now_s)}"
        runs = (
            "it has no time limit" if asker.limit_s is None else f"its time limit is {format_duration(asker.limit_s)}"
        )
        return f"{what} in {format_duration(one.start_s - now_s)}, when it could still run: {runs}"

    def _named_text(self, asker: ReservationQuery, now_s: float) -> str:
        one = next((one for one in self._windows if one.id == asker.reservation), None)
        if one is None or one.end_s <= now_s:
            return f"reservation {asker.reservation} has ended"
        if not one.admits(asker.user, asker.queue):
            return f"reservation {one.id} is for {one.holders_text}"
        return f"reservation {one.id} begins in {format_duration(one.start_s - now_s)}"

    def _reached(self, asker: ReservationQuery, now_s: float) -> int:
        """Number of windows that begin before a job that starts now must have ended, including those that have begun."""
        return max(bisect_left(self._begins, now_s + _run_s(asker)), bisect_right(self._begins, now_s))

    def _admitted(self, user: UserId, queue: QueueId) -> int:
        """The windows that admit this user and queue, as a bitset."""
        mask = self._masks.get((user, queue))
        if mask is None:
            mask = sum(1 << number for number, one in enumerate(self._windows) if one.admits(user, queue))
            if len(self._masks) >= _MEMO_MAX:
                self._masks.clear()
            self._masks[user, queue] = mask
        return mask

    def _closed_nodes(self, admitted: int, reached: int, named: str, now_s: float) -> ClosedNodes:
        nodes: set[NodeId] = set()
        by: list[ReservationId] = []
        for number, one in enumerate(self._windows[:reached]):
            if one.end_s > now_s and (not admitted >> number & 1 or (one.open_cordoned and one.id != named)):
                nodes.update(one.nodes)
                by.append(one.id)
        only: frozenset[NodeId] | None = None
        if named:
            inside = (
                one
                for number, one in enumerate(self._windows)
                if one.id == named and one.is_active(now_s) and admitted >> number & 1
            )
            only = frozenset(node_id for one in inside for node_id in one.nodes)
        return (
            ClosedNodes(nodes=frozenset(nodes), only=only, reservations=tuple(by)) if nodes or named else NOTHING_CLOSED
        )


def jobs_to_evict(
    reservation: Reservation, on_node: Mapping[NodeId, Mapping[JobId, Attempt]], jobs: Mapping[JobId, Job]
) -> tuple[JobId, ...]:
    """Jobs on the reservation's nodes that it does not admit: to be saved and stopped when it begins. In submit order."""
    found = {job_id: jobs[job_id] for node_id in reservation.nodes for job_id in on_node.get(node_id, ())}
    leave = [
        job
        for job in found.values()
        if not reservation.admits(job.user, job.queue)
        or (reservation.open_cordoned and job.spec.reservation != reservation.id)
    ]
    return tuple(job.id for job in sorted(leave, key=lambda job: job.seq))


def _run_s(asker: ReservationQuery) -> float:
    return DEFAULT_HORIZON_S if asker.limit_s is None else asker.limit_s
