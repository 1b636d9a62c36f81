"""Follow each of our Slurm jobs through Slurm's queue: (order, its row, now) -> events to report, jobs to cancel. Pure."""

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

BEGIN_S: Final = 15.0  # a job that Slurm has not started by then is withdrawn (issue 5); others took its nodes
NUDGE_S: Final = 1.5  # Slurm first tries a batch job within 3 s (batch_sched_delay), and again after 30 s (bf_interval)
# As BEGIN_S, while Slurm still cleans up an earlier job of ours there: KillWait (30 s by default) and its own calls.
CLEARED_S: Final = 60.0
LAST_WORDS_S: Final = 3.0  # after the end of a Slurm job, time for the supervisors' own report, which says more
LINGER_S: Final = 20.0  # after an attempt's end, time for its supervisors to exit before the Slurm job is cancelled
GONE_LOOKS: Final = 3  # polls in a row without its row after which a job is over; the first may come before the row
_NOT_FOUND: Final = (126, 127)
_CANCELLED_TOO: Final = (Cause.CANCELLED, Cause.PREEMPTED, Cause.MOVED, Cause.DRAINED, Cause.REQUEUED)
"""Ends requested by users or the scheduler: Slurm's accounting shows CANCELLED. Other jobs end with their own exit code, and at their time
limit as TIMEOUT (`render.PARTING`)."""


class Phase(enum.Enum):
    """QUEUED: submitted. BEGUN: its nodes are allocated. SETTLED: all events are reported."""

    QUEUED = "queued"
    BEGUN = "begun"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt's Slurm job. Times are seconds of a monotonic clock.

    Attributes:
        ended_s: when the attempt ended on our side; None while it is live.
        over_s: when Slurm's job was first seen ended; None before.
        unseen: polls in a row in which squeue did not show it.
        cancelled: we have cancelled it in Slurm, or tried to, so that its state CANCELLED is our doing.
        unheard: Slurm has not confirmed the cancel, or was unreachable since: cancel again.
        told_cancel: another user cancelled it, and this is reported.
        nudged_s: when Slurm was last asked to schedule it.
        clearing_s: when its nodes were last seen cleaning up another job of ours.
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
        """Nodes of the attempt."""
        return tuple(grant.node_id for grant in self.attempt.allocation.grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one poll for one order.

    Attributes:
        order: its new state; None if it is finished.
        reports: events for the controller, in order.
        cancel: cancel the Slurm job.
        contended: nodes that Slurm gave to others; they count as taken for a while.
        nudge: ask Slurm to schedule the job now: its nodes may have become free without a scheduling pass, as after the loss of a node.
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
    """Evaluate one order after a poll.

    Args:
        order: its state before.
        row: the job's row in squeue; None if it has none.
        now_s: now.
        gone: nodes that Slurm reports as down; their leases decide about what runs there.
        holders: other users' jobs on the order's nodes, for the message.
        python: the program that Slurm was to start, for the message.
        head_url: the head's URL for the supervisors, for the message.
        clearing: an ended job of ours is still being cleaned up on one of the order's nodes.
    """
    unseen = order.unseen + 1 if row is None else 0
    order = replace(order, unseen=unseen)
    over = row.over if row is not None else unseen >= GONE_LOOKS
    if over:
        return _evaluate_ended(order, row, now_s, gone, python, head_url)
    if row is not None and row.holds and order.phase is Phase.QUEUED:
        order = replace(order, phase=Phase.BEGUN)
    if order.ended_s is not None:
        asked = order.attempt.ending in _CANCELLED_TOO
        left = order.phase is Phase.QUEUED or asked or bereft(order.attempt) or now_s - order.ended_s >= LINGER_S
        if left and not order.cancelled:
            order = replace(order, cancelled=True, unheard=True)
        return Verdict(order=order, cancel=_must_cancel(order, row))
    if clearing:
        order = replace(order, clearing_s=now_s)
    waited_s = now_s - max(order.since_s, order.clearing_s)
    if order.phase is Phase.QUEUED and (waited_s >= BEGIN_S or now_s - order.since_s >= CLEARED_S):
        return _withdraw_contended(order, row, now_s, holders)
    if order.phase is Phase.QUEUED and now_s - max(order.since_s, order.nudged_s) >= NUDGE_S:
        return Verdict(order=replace(order, nudged_s=now_s), nudge=True)
    return Verdict(order=order, cancel=_must_cancel(order, row))


def bereft(attempt: Attempt) -> bool:
    """Whether the attempt ended with lost members: its Slurm job would hold the other nodes until Slurm notices the lost one."""
    return not attempt.live and any(member.state is MemberState.LOST for member in attempt.members)


def after_silence(order: Order, now_s: float) -> Order:
    """Return the order after an outage of Slurm, which hid start and end of its job: both time-outs start again.

    A cancel is repeated, because a restarted controller may have lost it; cancelling is idempotent.
    """
    return replace(
        order,
        since_s=now_s if order.phase is Phase.QUEUED else order.since_s,
        ended_s=None if order.ended_s is None else now_s,
        unheard=order.cancelled,
    )


def _must_cancel(order: Order, row: SlurmJob | None) -> bool:
    """Whether the job must be cancelled in Slurm; one that is already ending need not be."""
    return order.unheard and (row is None or row.state != "COMPLETING")


def _withdraw_contended(order: Order, row: SlurmJob | None, now_s: float, holders: Sequence[str]) -> Verdict:
    names = ", ".join(order.nodes)
    why = "" if row is None or row.reason in {"", "None"} else f" (Slurm's reason: {row.reason})"
    what = f"{', '.join(holders)} took {names}" if holders else f"Slurm did not allocate {names}"
    text = f"{what} before our Slurm job {order.slurm_id} started, within {now_s - order.since_s:.0f} s{why}"
    back = Withdrawn(
        job_id=order.attempt.job_id, epoch=order.attempt.epoch, why=text, nodes=order.nodes, cause=Cause.CONTENDED
    )
    return Verdict(
        order=replace(order, phase=Phase.SETTLED, cancelled=True, unheard=True),
        reports=(back,),
        cancel=True,
        contended=order.nodes,
    )


def _evaluate_ended(
    order: Order, row: SlurmJob | None, now_s: float, gone: Sequence[str], python: str, head_url: str
) -> Verdict:
    """Handle the end of a Slurm job: report it unless the attempt has ended, after its supervisors had time to report."""
    ours = order.cancelled or order.attempt.ending in _CANCELLED_TOO
    by_hand = row is not None and row.state == "CANCELLED" and not ours and not order.told_cancel
    reports: list[Event] = []
    if (
        by_hand
    ):  # a user's scancel cancels the job, not only this attempt, even if the supervisors reported their exit first
        why = f"Slurm job {order.slurm_id} was cancelled in Slurm"
        reports.append(Cancel(job_id=order.attempt.job_id, by=UserId("slurm"), why=why))
        order = replace(order, told_cancel=True)
    if order.ended_s is not None:
        return Verdict(order=None, reports=tuple(reports))
    if order.phase is Phase.SETTLED:  # stored until the attempt's end arrives through `follow`
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
        why = f"Slurm job {order.slurm_id} {state} before its supervisors connected to the head{hint}"
        reports.append(
            Withdrawn(job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=order.nodes, cause=Cause.START_FAIL)
        )
    else:
        there = tuple(node for node in order.nodes if node not in gone)
        why = f"Slurm job {order.slurm_id} {state}"
        reports.append(SeatLost(job_id=attempt.job_id, epoch=attempt.epoch, node_ids=there, why=why))
    return Verdict(order=replace(order, phase=Phase.SETTLED), reports=tuple(reports))


def _hint(code: int, nodes: str, python: str, head_url: str) -> str:
    """Explain the exit code of a job whose supervisors did not connect."""
    if code in _NOT_FOUND:
        return f"; check that {python} exists on {nodes}"
    if code == SEAT_CUT_OFF:
        return f"; {nodes} cannot reach the head at {head_url}: check that --listen names an address visible to the nodes, and that its port is open"
    if code == SEAT_DISTRUSTS:
        return f"; {nodes} rejects the certificate of the head at {head_url}: compare the clocks with date -u there and here"
    return ""
