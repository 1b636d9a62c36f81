"""What becomes of each Slurm job of ours, judged from the queue: (order, its row, now) -> what to report and what to cancel. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import Cancel, Event, SeatLost, Withdrawn
from phalanx.core.work.attempt import Attempt, Cause, MemberState
from phalanx.engines.slurm.parse import SlurmJob
from phalanx.wire.seat import SEAT_CUT_OFF, SEAT_DISTRUSTS

BEGIN_S: Final = 15.0  # a job of ours that Slurm has not started by then is taken back (issue 5); others were faster
NUDGE_S: Final = 1.5  # Slurm looks at new batch jobs within 3 s (batch_sched_delay); at what did not start then, after 30 s (bf_interval)
CLEARED_S: Final = (
    60.0  # with the time that Slurm clears away what was ours there: KillWait (30 s by default) and its own calls
)
LAST_WORDS_S: Final = 3.0  # from the end of a Slurm job to its judgement: the supervisors' own report is the better one
LINGER_S: Final = (
    20.0  # from the end of an attempt until what is left of its Slurm job is cancelled; supervisors leave by themselves
)
GONE_LOOKS: Final = 3  # a job that squeue shows no more this often is over; one look may come before its row does
_NOT_FOUND: Final = (126, 127)
_CANCELLED_TOO: Final = (Cause.CANCELLED, Cause.PREEMPTED, Cause.MOVED, Cause.DRAINED, Cause.REQUEUED)
"""Somebody's wish: CANCELLED in Slurm's books, by its supervisors' last word or by ours. Else the job ends with its own exit code, and at
its time limit as TIMEOUT (`render.PARTING`)."""


class Phase(enum.Enum):
    """QUEUED: Slurm has it. BEGUN: it was given its nodes. SETTLED: we have said all there is to say."""

    QUEUED = "queued"
    BEGUN = "begun"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt's Slurm job. Times are seconds of a clock that nobody sets.

    Attributes:
        ended_s: when the attempt ended on our side; None while it lives.
        over_s: when Slurm's job was first seen over; None before.
        unseen: looks in a row in which squeue did not show it.
        cancelled: we have told Slurm to end it, or tried to: should it show as cancelled, that is our doing.
        unheard: Slurm has not said that it heard that, or was silent since: it is told again.
        told_cancel: somebody else has, and we have said so.
        nudged_s: when Slurm was last asked to look at it again.
        clearing_s: when its nodes were last seen to clear away another job of ours.
    """

    attempt: Attempt
    slurm_id: str
    since_s: float
    phase: Phase = Phase.QUEUED
    ended_s: float | None = None
    over_s: float | None = None
    unseen: int = 0
    cancelled: bool = False
    unheard: bool = False
    told_cancel: bool = False
    nudged_s: float = 0.0
    clearing_s: float = 0.0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Of the attempt."""
        return tuple(grant.node_id for grant in self.attempt.allocation.grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from one look.

    Attributes:
        order: as it is now; None when nothing is left to follow.
        reports: for the controller, in order.
        cancel: tell Slurm to end the job.
        contended: nodes whose place went to others, for a while.
        nudge: ask Slurm to look at the job again: its place may be free since without Slurm having looked, where a node is lost for one.
    """

    order: Order | None
    reports: tuple[Event, ...] = ()
    cancel: bool = False
    contended: tuple[NodeId, ...] = field(default=())
    nudge: bool = False


def look(
    order: Order,
    row: SlurmJob | None,
    now_s: float,
    *,
    gone: Sequence[str],
    holders: Sequence[str],
    python: str,
    head_url: str = "",
    clearing: bool = False,
) -> Verdict:
    """Judge one order.

    Args:
        order: as it was.
        row: the job as squeue shows it; None where it shows none.
        now_s: now.
        gone: nodes that Slurm calls gone: what runs there has its lease, and that decides.
        holders: others' jobs on the order's nodes, for people.
        python: what Slurm was to start, for people.
        head_url: where that was to call home, for people.
        clearing: an ended job of ours is not yet cleared away on one of the order's nodes.
    """
    unseen = order.unseen + 1 if row is None else 0
    order = replace(order, unseen=unseen)
    over = row.over if row is not None else unseen >= GONE_LOOKS
    if over:
        return _over(order, row, now_s, gone, python, head_url)
    if row is not None and row.holds and order.phase is Phase.QUEUED:
        order = replace(order, phase=Phase.BEGUN)
    if order.ended_s is not None:
        asked = order.attempt.ending in _CANCELLED_TOO
        left = order.phase is Phase.QUEUED or asked or bereft(order.attempt) or now_s - order.ended_s >= LINGER_S
        if left and not order.cancelled:
            order = replace(order, cancelled=True, unheard=True)
        return Verdict(order=order, cancel=_to_tell(order, row))
    if clearing:
        order = replace(order, clearing_s=now_s)
    waited_s = now_s - max(order.since_s, order.clearing_s)
    if order.phase is Phase.QUEUED and (waited_s >= BEGIN_S or now_s - order.since_s >= CLEARED_S):
        return _contended(order, row, now_s, holders)
    if order.phase is Phase.QUEUED and now_s - max(order.since_s, order.nudged_s) >= NUDGE_S:
        return Verdict(order=replace(order, nudged_s=now_s), nudge=True)
    return Verdict(order=order, cancel=_to_tell(order, row))


def bereft(attempt: Attempt) -> bool:
    """Whether the attempt ended because it lost a node: its Slurm job would hold the others as long as Slurm believes in that one."""
    return not attempt.live and any(member.state is MemberState.LOST for member in attempt.members)


def after_silence(order: Order, now_s: float) -> Order:
    """The order when Slurm answers again: neither the start nor the end of its job could be seen, so both have their time anew.

    A word to end it is said once more: a controller that fell may have forgotten it, and twice it does no harm.
    """
    return replace(
        order,
        since_s=now_s if order.phase is Phase.QUEUED else order.since_s,
        ended_s=None if order.ended_s is None else now_s,
        unheard=order.cancelled,
    )


def _to_tell(order: Order, row: SlurmJob | None) -> bool:
    """Whether Slurm is to be told to end the job; one that is leaving needs no word."""
    return order.unheard and (row is None or row.state != "COMPLETING")


def _contended(order: Order, row: SlurmJob | None, now_s: float, holders: Sequence[str]) -> Verdict:
    names = ", ".join(order.nodes)
    why = "" if row is None or row.reason in {"", "None"} else f" (Slurm's reason: {row.reason})"
    said = f"{', '.join(holders)} took {names}" if holders else f"Slurm did not give {names}"
    text = f"{said} before our Slurm job {order.slurm_id} began, in {now_s - order.since_s:.0f} s{why}"
    back = Withdrawn(
        job_id=order.attempt.job_id, epoch=order.attempt.epoch, why=text, nodes=order.nodes, cause=Cause.CONTENDED
    )
    return Verdict(
        order=replace(order, phase=Phase.SETTLED, cancelled=True, unheard=True), reports=(back,), cancel=True,
        contended=order.nodes,
    )  # fmt: skip


def _over(order: Order, row: SlurmJob | None, now_s: float, gone: Sequence[str], python: str, head_url: str) -> Verdict:
    """Slurm's job has ended. If the attempt has not, say so, once its supervisors have had time for their own words."""
    ours = order.cancelled or order.attempt.ending in _CANCELLED_TOO
    by_hand = row is not None and row.state == "CANCELLED" and not ours and not order.told_cancel
    reports: list[Event] = []
    if by_hand:  # somebody's scancel means the job, not this try of it; also where the supervisors were faster to say that they leave
        why = f"Slurm job {order.slurm_id} was cancelled in Slurm"
        reports.append(Cancel(job_id=order.attempt.job_id, by=UserId("slurm"), why=why))
        order = replace(order, told_cancel=True)
    if order.ended_s is not None:
        return Verdict(order=None, reports=tuple(reports))
    if order.phase is Phase.SETTLED:  # kept until the attempt's end is heard of: its records may still come
        return Verdict(order=order)
    if order.over_s is None:
        return Verdict(order=replace(order, over_s=now_s), reports=tuple(reports))
    if now_s - order.over_s < LAST_WORDS_S:
        return Verdict(order=order)
    attempt = order.attempt
    state = (
        "is gone" if row is None else f"ended as {row.state}" + (f" with code {row.exit_code}" if row.exit_code else "")
    )
    if all(member.state is MemberState.ASKED for member in attempt.members):
        hint = _hint(0 if row is None else row.exit_code, ", ".join(order.nodes), python, head_url)
        why = f"Slurm job {order.slurm_id} {state} before its supervisors came{hint}"
        reports.append(
            Withdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=order.nodes, cause=Cause.START_FAIL)
        )
    else:
        there = tuple(node for node in order.nodes if node not in gone)
        why = f"Slurm job {order.slurm_id} {state}"
        reports.append(SeatLost(job_id=attempt.job_id, epoch=attempt.epoch, node_ids=there, why=why))
    return Verdict(order=replace(order, phase=Phase.SETTLED), reports=tuple(reports))


def _hint(code: int, nodes: str, python: str, head_url: str) -> str:
    """What the exit code of a job without supervisors tells."""
    if code in _NOT_FOUND:
        return f"; is {python} on {nodes}?"
    if code == SEAT_CUT_OFF:
        return f"; from {nodes} the head is not reached at {head_url}: does --listen name an address that the nodes see, and is its port open to them?"
    if code == SEAT_DISTRUSTS:
        return f"; on {nodes} the certificate of the head at {head_url} does not hold: date -u there and here tells whether a clock is wrong"
    return ""
