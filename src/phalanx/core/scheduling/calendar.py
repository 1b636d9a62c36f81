"""Which nodes reservations shut to a job, until when that holds, and who must leave when one begins.

The scheduler asks `closed_to` once for a class of jobs and keeps the answer until its `until_s`; the controller asks `intruders`.
A reservation shuts its nodes to a job that it does not admit while it holds, and before that as soon as the job could still be
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

# For how long a job without a time limit is believed to run. None at all would start what is stopped minutes later; for ever would
# leave nodes idle for weeks before a window that was announced early. A day: 97 of 100 jobs of the Philly trace (October 2017)
# ran shorter, and the others save and move when the window begins.
DEFAULT_HORIZON_S: Final = 86_400.0
_MEMO_MAX: Final = (
    4096  # answers kept: askers are parted by whom they are and how many windows they reach, a handful in practice
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """What of a job counts here: jobs of one such class get one answer.

    Attributes:
        limit_s: its time limit; None for no limit.
        reservation: the one it must run in; "" for none.
    """

    user: UserId
    queue: QueueId
    limit_s: float | None = None
    reservation: str = ""


def asker_of(job: Job) -> Asker:
    """The class of a job."""
    return Asker(
        user=job.user, queue=job.queue, limit_s=job.spec.time_limit_s, reservation=job.spec.reservation
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Where a job may not go.

    Attributes:
        nodes: shut to it.
        only: it may go nowhere else; None for anywhere. Empty for a reservation that does not hold, or not for it.
        by: the reservations that shut `nodes` or withhold `only`, first to begin first.
    """

    nodes: frozenset[NodeId] = frozenset()
    only: frozenset[NodeId] | None = None
    by: tuple[ReservationId, ...] = ()

    def among(self, fleet: Collection[NodeId]) -> frozenset[NodeId]:
        """Which nodes of the fleet are shut, `only` taken into account. Linear in the fleet only for jobs that name a reservation."""
        if self.only is None:
            return self.nodes
        return frozenset(node_id for node_id in fleet if node_id in self.nodes or node_id not in self.only)


OPEN: Final = Closed()  # what everybody is told while nothing is reserved


class Calendar:
    """All reservations that have not ended, in order of their beginning. Made anew when one is put or ended; asked at any time after."""

    __slots__ = ("_begins", "_ends", "_masks", "_memo", "_windows")

    def __init__(self, reservations: Iterable[Reservation] = ()) -> None:
        # By id at last, so that equal sets of reservations give equal answers, byte for byte.
        self._windows = sorted((one for one in reservations if not one.ended), key=lambda one: (one.start_s, one.id))
        self._begins = [one.start_s for one in self._windows]
        self._ends = sorted(one.end_s for one in self._windows)
        self._masks: dict[tuple[UserId, QueueId], int] = {}
        self._memo: dict[tuple[int, int, int, int, str], Closed] = {}

    def __bool__(self) -> bool:
        """Whether anything is reserved; while not, nobody need ask."""
        return bool(self._windows)

    def closed_to(self, asker: Asker, now_s: float) -> Closed:
        """Where such a job may not be started at `now_s`; good until `until_s(asker, now_s)`.

        Cost: two bisections; the sets are made once for all askers who are admitted alike and reach the same windows.
        """
        if not self._windows:
            return OPEN if not asker.reservation else Closed(only=frozenset())
        reached, over = self._reached(asker, now_s), bisect_right(self._ends, now_s)
        begun = bisect_right(self._begins, now_s) if asker.reservation else 0  # others are kept off before as after
        key = (self._admitted(asker.user, asker.queue), reached, over, begun, asker.reservation)
        known = self._memo.get(key)
        if known is None:
            if len(self._memo) >= _MEMO_MAX:
                self._memo.clear()
            known = self._memo[key] = self._judge(key[0], reached, asker.reservation, now_s)
        return known

    def until_s(self, asker: Asker, now_s: float) -> float:
        """When the answer to this asker may change next without a reservation being put or ended; later than `now_s`, `inf` for never."""
        reached, over = self._reached(asker, now_s), bisect_right(self._ends, now_s)
        ends = self._ends[over] if over < len(self._ends) else inf
        # At `meets` a job just fits before the next window; the first moment after it does not.
        meets = self._begins[reached] - _run_s(asker) if reached < len(self._begins) else inf
        named = next((one.start_s for one in self._windows if one.id == asker.reservation), inf)
        return min(ends, nextafter(max(meets, now_s), inf), named if named > now_s else inf)

    def next_change_s(self, now_s: float) -> float:
        """When a reservation next begins or ends; `inf` for never. For one class, `until_s` says when to look again."""
        begin = bisect_right(self._begins, now_s)
        end = bisect_right(self._ends, now_s)
        return min(
            self._begins[begin] if begin < len(self._begins) else inf, self._ends[end] if end < len(self._ends) else inf
        )  # fmt: skip

    def said(self, closed: Closed, asker: Asker, now_s: float) -> str:
        """Why the nodes are shut, for people: the first reservation in the way, and when it begins or ends. Empty for `OPEN`."""
        if asker.reservation and closed.only is not None and not closed.only:
            return self._said_of_named(asker, now_s)
        one = next((one for one in self._windows if closed.by and one.id == closed.by[0]), None)
        if one is None:
            return ""
        what = f"{len(one.nodes)} node{'' if len(one.nodes) == 1 else 's'} set aside for {one.holders} ({one.id})"
        if one.holds(now_s):
            return f"{what} for another {format_duration(one.end_s - now_s)}"
        runs = (
            "it has no time limit" if asker.limit_s is None else f"its time limit is {format_duration(asker.limit_s)}"
        )
        return f"{what} in {format_duration(one.start_s - now_s)}, when it could still run: {runs}"

    def _said_of_named(self, asker: Asker, now_s: float) -> str:
        one = next((one for one in self._windows if one.id == asker.reservation), None)
        if one is None or one.end_s <= now_s:
            return f"reservation {asker.reservation} is over, or was ended"
        if not one.admits(asker.user, asker.queue):
            return f"reservation {one.id} is for {one.holders}"
        return f"reservation {one.id} begins in {format_duration(one.start_s - now_s)}"

    def _reached(self, asker: Asker, now_s: float) -> int:
        """How many windows begin before a job that starts now must have ended, those that have begun included."""
        return max(bisect_left(self._begins, now_s + _run_s(asker)), bisect_right(self._begins, now_s))

    def _admitted(self, user: UserId, queue: QueueId) -> int:
        """Which windows admit this user and queue, as a bit for each."""
        mask = self._masks.get((user, queue))
        if mask is None:
            mask = sum(1 << number for number, one in enumerate(self._windows) if one.admits(user, queue))
            if len(self._masks) >= _MEMO_MAX:
                self._masks.clear()
            self._masks[user, queue] = mask
        return mask

    def _judge(self, admitted: int, reached: int, named: str, now_s: float) -> Closed:
        nodes: set[NodeId] = set()
        by: list[ReservationId] = []
        for number, one in enumerate(self._windows[:reached]):
            if one.end_s > now_s and not admitted >> number & 1:
                nodes.update(one.nodes)
                by.append(one.id)
        only: frozenset[NodeId] | None = None
        if named:
            inside = (
                one for number, one in enumerate(self._windows)
                if one.id == named and one.holds(now_s) and admitted >> number & 1
            )  # fmt: skip
            only = frozenset(node_id for one in inside for node_id in one.nodes)
        return Closed(nodes=frozenset(nodes), only=only, by=tuple(by)) if nodes or named else OPEN


def intruders(
    reservation: Reservation, on_node: Mapping[NodeId, Mapping[JobId, Attempt]], jobs: Mapping[JobId, Job]
) -> tuple[JobId, ...]:
    """Jobs that hold something on the reservation's nodes and may not: to be saved and stopped as it begins. In submit order."""
    found = {job_id: jobs[job_id] for node_id in reservation.nodes for job_id in on_node.get(node_id, ())}
    leave = [job for job in found.values() if not reservation.admits(job.user, job.queue)]
    return tuple(job.id for job in sorted(leave, key=lambda job: job.seq))


def _run_s(asker: Asker) -> float:
    return DEFAULT_HORIZON_S if asker.limit_s is None else asker.limit_s
