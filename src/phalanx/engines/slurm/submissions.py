"""Follow each of our Slurm jobs through Slurm's queue: (order, its row, now) -> events to report, jobs to cancel. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.ids import NodeId, UserId
from phalanx.core.state.events import CancelJob, Event
from phalanx.core.state.reports import AttemptWithdrawn, SeatLost
from phalanx.core.work.attempt import Attempt, EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.slurm.limits import SlurmLimit, limit_of
from phalanx.engines.slurm.parse import SlurmJob
from phalanx.wire.seat import SEAT_CERTIFICATE_REJECTED, SEAT_HEAD_UNREACHABLE

START_LIMIT_S: Final = 15.0  # a job that Slurm has not started by then is withdrawn; others took its nodes
# A limit that other jobs share may be over as soon as Slurm has cleaned up the last of them, and Slurm may name a limit more exactly: such
# a reason gets two more looks of the scheduler.
LIMIT_MAY_CHANGE_S: Final = 4.0
NUDGE_S: Final = 1.5  # Slurm first tries a batch job within 3 s (batch_sched_delay), and again after 30 s (bf_interval)
# As BEGIN_S, while Slurm still cleans up an earlier job of ours there: KillWait (30 s by default) and its own calls.
START_LIMIT_MAX_S: Final = 60.0
SUPERVISOR_REPORT_S: Final = 3.0  # after the end of a Slurm job, time for the supervisors' own report, which says more
LINGER_S: Final = 20.0  # after an attempt's end, time for its supervisors to exit before the Slurm job is cancelled
MISSED_POLLS_MAX: Final = (
    3  # polls in a row without its row after which a job is over; the first may come before the row
)
_BEFORE_START: Final = (AttemptState.PLACED, AttemptState.STOPPING)
_NOT_FOUND: Final = (126, 127)
_CANCELLED_TOO: Final = (
    EndCause.CANCELLED,
    EndCause.PREEMPTED,
    EndCause.MOVED,
    EndCause.DRAINED,
    EndCause.REQUEUED,
    EndCause.IDLE,
    EndCause.PARKED,
)
"""Ends requested by users or the scheduler: Slurm's accounting shows CANCELLED. Other jobs end with their own exit code, and at their time
limit as TIMEOUT (`render.EXIT_COMMANDS`)."""


class SubmissionPhase(enum.Enum):
    """QUEUED: submitted. BEGUN: its nodes are allocated. SETTLED: all events are reported."""

    QUEUED = "queued"
    STARTED = "begun"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSubmission:
    """One attempt's Slurm job. Times are seconds of a monotonic clock.

    Attributes:
        attempt_ended_s: when the attempt ended on our side; None while it is live.
        slurm_ended_s: when Slurm's job was first seen ended; None before.
        missed_polls: polls in a row in which squeue did not show it.
        cancelled: we have cancelled it in Slurm, or tried to, so that its state CANCELLED is our doing.
        cancel_unconfirmed: Slurm has not confirmed the cancel, or was unreachable since: cancel again.
        external_cancel_reported: another user cancelled it, and this is reported.
        nudged_s: when Slurm was last asked to schedule it.
        cleaning_up_s: when its nodes were last seen cleaning up another job of ours.
    """

    attempt: Attempt
    slurm_id: str
    since_s: float
    phase: SubmissionPhase = SubmissionPhase.QUEUED
    attempt_ended_s: float | None = None
    slurm_ended_s: float | None = None
    missed_polls: int = 0
    cancelled: bool = False
    cancel_unconfirmed: bool = False
    external_cancel_reported: bool = False
    nudged_s: float = 0.0
    cleaning_up_s: float = 0.0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Nodes of the attempt."""
        return tuple(grant.node_id for grant in self.attempt.allocation.grants)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionUpdate:
    """The result of one poll for one order.

    Attributes:
        submission: its new state; None if it is finished.
        events: events for the controller, in order.
        cancel: cancel the Slurm job.
        contended: nodes that Slurm gave to others; they count as taken for a while.
        limit: the limit of Slurm that kept the job from starting, if any.
        nudge: ask Slurm to schedule the job now: its nodes may have become free without a scheduling pass, as after the loss of a node.
    """

    submission: SlurmSubmission | None
    events: tuple[Event, ...] = ()
    cancel: bool = False
    contended: tuple[NodeId, ...] = field(default=())
    limit: SlurmLimit | None = None
    nudge: bool = False


def evaluate(
    order: SlurmSubmission,
    row: SlurmJob | None,
    now_s: float,
    *,
    down_nodes: Sequence[str],
    holders: Sequence[str],
    python: str,
    head_url: str = "",
    partition: str = "",
    cleaning_up: bool = False,
) -> SubmissionUpdate:
    """Evaluate one order after a poll.

    Args:
        order: its state before.
        row: the job's row in squeue; None if it has none.
        now_s: now.
        down_nodes: nodes that Slurm reports as down; their leases decide about what runs there.
        holders: other users' jobs on the order's nodes, for the message.
        python: the program that Slurm was to start, for the message.
        head_url: the head's URL for the supervisors, for the message.
        partition: the name of the head's partition, for the message.
        cleaning_up: an ended job of ours is still being cleaned up on one of the order's nodes.
    """
    unseen = order.missed_polls + 1 if row is None else 0
    order = replace(order, missed_polls=unseen)
    over = row.has_ended if row is not None else unseen >= MISSED_POLLS_MAX
    if over:
        return _evaluate_ended(order, row, now_s, down_nodes, python, head_url)
    if row is not None and row.has_nodes and order.phase is SubmissionPhase.QUEUED:
        order = replace(order, phase=SubmissionPhase.STARTED)
    if order.attempt_ended_s is not None:
        asked = order.attempt.stop_cause in _CANCELLED_TOO
        left = (
            order.phase is SubmissionPhase.QUEUED
            or asked
            or has_lost_members(order.attempt)
            or now_s - order.attempt_ended_s >= LINGER_S
        )
        if left and not order.cancelled:
            order = replace(order, cancelled=True, cancel_unconfirmed=True)
        return SubmissionUpdate(submission=order, cancel=_must_cancel(order, row))
    lost = _lost_before_start(order, down_nodes)
    if lost:
        return _withdraw_lost(order, lost)
    if cleaning_up:
        order = replace(order, cleaning_up_s=now_s)
    waited_s = now_s - max(order.since_s, order.cleaning_up_s)
    limit = limit_of(row.reason, partition) if row is not None and order.phase is SubmissionPhase.QUEUED else None
    if limit is not None and (not limit.may_change or waited_s >= LIMIT_MAY_CHANGE_S):
        return _withdraw_limited(order, limit)
    if order.phase is SubmissionPhase.QUEUED and (
        waited_s >= START_LIMIT_S or now_s - order.since_s >= START_LIMIT_MAX_S
    ):
        return _withdraw_contended(order, row, now_s, holders)
    if order.phase is SubmissionPhase.QUEUED and now_s - max(order.since_s, order.nudged_s) >= NUDGE_S:
        return SubmissionUpdate(submission=replace(order, nudged_s=now_s), nudge=True)
    return SubmissionUpdate(submission=order, cancel=_must_cancel(order, row))


def has_lost_members(attempt: Attempt) -> bool:
    """Whether the attempt ended with lost members: its Slurm job would hold the other nodes until Slurm notices the lost one."""
    return not attempt.holds_allocation and any(member.state is MemberState.LOST for member in attempt.members)


def after_outage(order: SlurmSubmission, now_s: float) -> SlurmSubmission:
    """Return the order after an outage of Slurm, which hid start and end of its job: both time-outs start again.

    A cancel is repeated, because a restarted controller may have lost it; cancelling is idempotent.
    """
    return replace(
        order,
        since_s=now_s if order.phase is SubmissionPhase.QUEUED else order.since_s,
        attempt_ended_s=None if order.attempt_ended_s is None else now_s,
        cancel_unconfirmed=order.cancelled,
    )


def _must_cancel(order: SlurmSubmission, row: SlurmJob | None) -> bool:
    """Whether the job must be cancelled in Slurm; one that is already ending need not be."""
    return order.cancel_unconfirmed and (row is None or row.state != "COMPLETING")


def _lost_before_start(order: SlurmSubmission, down_nodes: Sequence[str]) -> tuple[NodeId, ...]:
    """The nodes that Slurm marked down after it had allocated them, and before our supervisor there registered."""
    if order.phase is not SubmissionPhase.STARTED or order.attempt.state not in _BEFORE_START:
        return ()
    waiting = [member.node_id for member in order.attempt.members if member.state is MemberState.REQUESTED]
    return tuple(node for node in waiting if node in down_nodes)


def _withdraw_lost(order: SlurmSubmission, lost: tuple[NodeId, ...]) -> SubmissionUpdate:
    """Withdraw at once: without this, the gang would wait for the supervisor until its start is overdue."""
    verb = "is" if len(lost) == 1 else "are"
    why = f"{', '.join(lost)} {verb} down in Slurm, before our Slurm job {order.slurm_id} started its ranks"
    return _withdraw(order, why, lost, EndCause.UNFIT)


def _withdraw_limited(order: SlurmSubmission, limit: SlurmLimit) -> SubmissionUpdate:
    why = f"Slurm does not start the job: {limit.reason}; {limit.remedy}"
    return replace(_withdraw(order, why, order.nodes, limit.cause), limit=limit)


def _withdraw(order: SlurmSubmission, why: str, nodes: tuple[NodeId, ...], cause: EndCause) -> SubmissionUpdate:
    """Report that no supervisor will start, and cancel the Slurm job."""
    back = AttemptWithdrawn(job_id=order.attempt.job_id, epoch=order.attempt.epoch, why=why, nodes=nodes, cause=cause)
    return SubmissionUpdate(
        submission=replace(order, phase=SubmissionPhase.SETTLED, cancelled=True, cancel_unconfirmed=True),
        events=(back,),
        cancel=True,
    )


def _withdraw_contended(
    order: SlurmSubmission, row: SlurmJob | None, now_s: float, holders: Sequence[str]
) -> SubmissionUpdate:
    names = ", ".join(order.nodes)
    why = "" if row is None or row.reason in {"", "None"} else f" (Slurm's reason: {row.reason})"
    what = f"{', '.join(holders)} took {names}" if holders else f"Slurm did not allocate {names}"
    text = f"{what} before our Slurm job {order.slurm_id} started, within {now_s - order.since_s:.0f} s{why}"
    return replace(_withdraw(order, text, order.nodes, EndCause.CONTENDED), contended=order.nodes)


def _evaluate_ended(
    order: SlurmSubmission, row: SlurmJob | None, now_s: float, gone: Sequence[str], python: str, head_url: str
) -> SubmissionUpdate:
    """Handle the end of a Slurm job: report it unless the attempt has ended, after its supervisors had time to report."""
    ours = order.cancelled or order.attempt.stop_cause in _CANCELLED_TOO
    by_hand = row is not None and row.state == "CANCELLED" and not ours and not order.external_cancel_reported
    reports: list[Event] = []
    if (
        by_hand
    ):  # a user's scancel cancels the job, not only this attempt, even if the supervisors reported their exit first
        why = f"Slurm job {order.slurm_id} was cancelled in Slurm"
        reports.append(CancelJob(job_id=order.attempt.job_id, by=UserId("slurm"), why=why))
        order = replace(order, external_cancel_reported=True)
    if order.attempt_ended_s is not None:
        return SubmissionUpdate(submission=None, events=tuple(reports))
    if order.phase is SubmissionPhase.SETTLED:  # stored until the attempt's end arrives through `follow`
        return SubmissionUpdate(submission=order)
    if order.slurm_ended_s is None:
        return SubmissionUpdate(submission=replace(order, slurm_ended_s=now_s), events=tuple(reports))
    if now_s - order.slurm_ended_s < SUPERVISOR_REPORT_S:
        return SubmissionUpdate(submission=order)
    attempt = order.attempt
    state = (
        "is gone" if row is None else f"ended as {row.state}" + (f" with code {row.exit_code}" if row.exit_code else "")
    )
    if all(member.state is MemberState.REQUESTED for member in attempt.members):
        hint = _hint(0 if row is None else row.exit_code, ", ".join(order.nodes), python, head_url)
        why = f"Slurm job {order.slurm_id} {state} before its supervisors connected to the head{hint}"
        reports.append(
            AttemptWithdrawn(
                job_id=attempt.job_id, epoch=attempt.epoch, why=why, nodes=order.nodes, cause=EndCause.START_FAIL
            )
        )
    else:
        # On a node that is down, a supervisor that registered may still run: its lease decides. Without one there is nothing to wait for.
        never = {member.node_id for member in attempt.members if member.state is MemberState.REQUESTED}
        there = tuple(node for node in order.nodes if node not in gone or node in never)
        why = f"Slurm job {order.slurm_id} {state}"
        reports.append(SeatLost(job_id=attempt.job_id, epoch=attempt.epoch, node_ids=there, why=why))
    return SubmissionUpdate(submission=replace(order, phase=SubmissionPhase.SETTLED), events=tuple(reports))


def _hint(code: int, nodes: str, python: str, head_url: str) -> str:
    """Explain the exit code of a job whose supervisors did not connect."""
    if code in _NOT_FOUND:
        return f"; check that {python} exists on {nodes}"
    if code == SEAT_HEAD_UNREACHABLE:
        return f"; {nodes} cannot reach the head at {head_url}: check that the head listens on an address visible to the nodes, and that its port is open"
    if code == SEAT_CERTIFICATE_REJECTED:
        return f"; {nodes} rejects the certificate of the head at {head_url}: compare the clocks with date -u there and here"
    return ""
