"""The state machine of attempts: (case, event) -> outcome, as a table.

The caller (the controller, live or simulated) commits the outcome's records and history lines before it sends any of its commands. An event
that the table does not list for the current state changes nothing: reports arrive late, twice, and out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from phalanx.core.fleet.fitness import FULL_DISK, PREFLIGHT, NodeFault, find_faulty_nodes
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle import gang_commands, sleep
from phalanx.core.lifecycle.endpoints import endpoint_line
from phalanx.core.lifecycle.events import (
    AttemptEvent,
    DevicesRegained,
    MemberLost,
    ReminderDue,
    SleepRequested,
    StartOverdue,
    StopRequested,
    WakeDelayed,
    WakeRequested,
)
from phalanx.core.lifecycle.members import (
    ACCOUNTED_STATES,
    change_member,
    member_on,
    with_member,
    with_unsent,
)
from phalanx.core.lifecycle.progress import note_failed_checkpoint, record_progress, save_checkpoint
from phalanx.core.lifecycle.settle import settle
from phalanx.core.lifecycle.stop_causes import cause_of_end
from phalanx.core.lifecycle.transitions import (
    AttemptCase,
    TransitionContext,
    TransitionResult,
    history_line,
    unchanged,
)
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.reports import (
    AttemptQueued,
    AttemptReclaimed,
    AttemptWithdrawn,
    CheckpointFailed,
    CheckpointSaved,
    MemberFrozen,
    MemberHung,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    ProgressReported,
    ReadinessChanged,
    SleepHookEnded,
    TaskExited,
)
from phalanx.core.units import format_duration
from phalanx.core.work.attempt import Attempt, EndCause, Member, MemberState, TaskExit
from phalanx.core.work.failure import FailureEvidence
from phalanx.core.work.states import AttemptState

CLOCK_OFF_S: Final = 5.0
"""Wall clocks further apart are reported, since deadlines are sent as Unix time: above the uncertainty of a renewal's round trip (1 s),
below the shortest usual grace period."""
_S = AttemptState
_FROM_A_NODE: Final = (
    MemberReady,
    MemberRefused,
    MemberStarted,
    TaskExited,
    MemberStopped,
    MemberFrozen,
    MemberHung,
    ReadinessChanged,
    SleepHookEnded,
)


def transition(case: AttemptCase, event: AttemptEvent, facts: TransitionContext) -> TransitionResult:
    """Apply an event. Unknown pairs of state and event, and events of another epoch or generation, change nothing."""
    attempt = case.attempt
    if attempt is None or not _current(attempt, event):
        return unchanged(case)
    handler = TRANSITIONS.get((attempt.state, type(event)))
    return unchanged(case) if handler is None else handler(case, attempt, event, facts)


def _current(attempt: Attempt, happening: AttemptEvent) -> bool:
    if isinstance(happening, CheckpointSaved):
        return happening.resume.epoch == attempt.epoch
    if isinstance(happening, (ProgressReported, CheckpointFailed, AttemptWithdrawn, AttemptQueued, AttemptReclaimed)):
        return happening.epoch == attempt.epoch
    if isinstance(happening, _FROM_A_NODE):
        return happening.epoch == attempt.epoch and happening.generation == attempt.generation
    return True


def _ready(case: AttemptCase, attempt: Attempt, happening: MemberReady, facts: TransitionContext) -> TransitionResult:
    rank_zero = attempt.allocation.grants[0].node_id == happening.node_id
    attempt = with_member(attempt, happening.node_id, MemberState.READY, port=happening.port if rank_zero else None)
    attempt = change_member(attempt, happening.node_id, lambda member: replace(member, bad_links=happening.bad_links))
    late = _clock_lines(case, happening, facts)
    whole = all(member.state is MemberState.READY for member in attempt.members)
    # Not earlier: the first report shows only one side of a link.
    faults = _link_faults(case, attempt.members) if whole else ()
    if faults:
        return _stop_for_links(case, attempt, faults, late, facts)
    attempt = replace(
        attempt,
        state=_S.STARTING if whole else attempt.state,
        resume_from=happening.resume if rank_zero else attempt.resume_from,
        service_port=happening.service_port if rank_zero else attempt.service_port,
    )
    if not whole:
        return TransitionResult(job=case.job, attempt=attempt, history=late)
    source = f", from step {attempt.resume_from.step}" if attempt.resume_from is not None else ""
    entry = history_line(
        case, facts, "starting", f"{len(attempt.members)} of {len(attempt.members)} nodes ready; ranks start{source}"
    )
    rejected = _rejected_checkpoints(case, attempt, facts)
    return TransitionResult(
        job=case.job, attempt=attempt, commands=gang_commands.start(attempt), history=(*late, *rejected, entry)
    )


def _rejected_checkpoints(case: AttemptCase, attempt: Attempt, facts: TransitionContext) -> tuple[HistoryLine, ...]:
    """Report published checkpoints that node rank 0 could not use: the job repeats the steps since the one that it resumes from."""
    used, steps = attempt.resume_from, [one.step for one in reversed(case.job.checkpoints)]
    if used is not None:
        steps = steps[: steps.index(used.step)] if used.step in steps else []
    if not steps:
        return ()
    several = ", ".join(map(str, steps))
    names = f"checkpoint of step {several} is" if len(steps) == 1 else f"checkpoints of steps {several} are"
    then = "starts again from the beginning" if used is None else f"resumes from step {used.step}"
    first = attempt.allocation.grants[0].node_id
    text = f"the {names} damaged or incomplete: the job {then}"
    return (history_line(case, facts, "checkpoint_rejected", text, node_id=first),)


def _clock_lines(case: AttemptCase, happening: MemberReady, facts: TransitionContext) -> tuple[HistoryLine, ...]:
    """Report a wall clock that is off, without refusing the node: if the head's own clock is wrong, all nodes would be refused."""
    off_s = happening.clock_off_s
    if abs(off_s) < CLOCK_OFF_S:
        return ()
    word = "ahead of" if off_s > 0 else "behind"
    text = (
        f"{happening.node_id}: its clock is {abs(off_s):.0f} s {word} the head's; time limits there are off by as much"
    )
    return (history_line(case, facts, "clock_off", text, node_id=happening.node_id),)


def _link_faults(case: AttemptCase, members: tuple[Member, ...]) -> tuple[NodeFault, ...]:
    """The nodes at fault for bad links within the gang."""
    found = {member.node_id: member.bad_links for member in members}
    return find_faulty_nodes(list(found), found, spare_later=len(case.job.avoided_nodes) % 2 == 1)


def _stop_for_links(
    case: AttemptCase,
    attempt: Attempt,
    faults: tuple[NodeFault, ...],
    late: tuple[HistoryLine, ...],
    facts: TransitionContext,
) -> TransitionResult:
    """Stop a gang with bad links before its start; the nodes at fault are replaced."""
    for fault in faults:
        attempt = with_member(attempt, fault.node_id, MemberState.READY, why=fault.why)
    why = "; ".join(fault.why for fault in faults)
    entry = history_line(case, facts, "unfit", why, node_id=faults[0].node_id)
    outcome = _stopping(case, attempt, EndCause.UNFIT, why, facts, entry)
    return replace(outcome, history=(*late, *outcome.history), faults=faults)


def _refused(
    case: AttemptCase, attempt: Attempt, happening: MemberRefused, facts: TransitionContext
) -> TransitionResult:
    attempt = with_member(
        attempt, happening.node_id, MemberState.STOPPED, why=happening.why, disk_full=happening.disk_full
    )
    cause = (
        EndCause.FAILED
        if happening.job_at_fault
        else EndCause.UNFIT
        if happening.node_at_fault
        else EndCause.START_FAIL
    )
    if happening.job_at_fault and attempt.exit_code is None:
        attempt = replace(attempt, exit_code=happening.exit_code or 1)
    entry = history_line(case, facts, "refused", f"{happening.node_id}: {happening.why}", node_id=happening.node_id)
    outcome = _stopping(case, attempt, cause, f"{happening.node_id}: {happening.why}", facts, entry)
    if cause is not EndCause.UNFIT:
        return outcome
    # Only a supervisor that outlives attempts reports when there is room again.
    node = facts.nodes.get(happening.node_id)
    lasting = happening.disk_full and node is not None and not node.per_attempt
    fault = NodeFault(node_id=happening.node_id, why=happening.why, cordon=True, by=FULL_DISK if lasting else PREFLIGHT)
    return replace(outcome, faults=(fault,))


def _started(
    case: AttemptCase, attempt: Attempt, happening: MemberStarted, facts: TransitionContext
) -> TransitionResult:
    attempt = with_member(attempt, happening.node_id, MemberState.STARTED, unless=ACCOUNTED_STATES)
    if any(member.state in (MemberState.REQUESTED, MemberState.READY) for member in attempt.members):
        return TransitionResult(job=case.job, attempt=attempt)
    attempt = replace(
        attempt,
        state=_S.RUNNING,
        running_s=facts.now_s,
        first_running_s=attempt.first_running_s or facts.now_s,
    )
    job = case.job if case.job.started_s is not None else replace(case.job, started_s=facts.now_s)
    entry = history_line(case, facts, "running", f"all {attempt.allocation.world_size} ranks run")
    ready = (endpoint_line(case, attempt, facts, ""),) if attempt.serving else ()
    return TransitionResult(job=job, attempt=attempt, history=(entry, *ready))


def _readiness(
    case: AttemptCase, attempt: Attempt, happening: ReadinessChanged, facts: TransitionContext
) -> TransitionResult:
    serves = case.job.replica is not None and attempt.service_port
    if not serves or happening.ready == attempt.ready or happening.node_id != attempt.allocation.grants[0].node_id:
        return unchanged(case)
    attempt = replace(attempt, ready=happening.ready, ready_s=facts.now_s)
    # Before, other nodes of its gang are still starting. Asleep, its port may answer, but it serves no requests.
    running = attempt.state is _S.RUNNING and attempt.sleep is None
    return TransitionResult(
        job=case.job,
        attempt=attempt,
        history=(endpoint_line(case, attempt, facts, happening.why),) if running else (),
    )


def _exited(case: AttemptCase, attempt: Attempt, happening: TaskExited, facts: TransitionContext) -> TransitionResult:
    if any(known.rank == happening.exit.rank for known in attempt.exits):
        return unchanged(case)
    exit = _diagnosed(happening.exit, facts)
    attempt = replace(attempt, exits=(*attempt.exits, exit))
    if attempt.state is _S.STOPPING or (exit.shell_code == 0 and not exit.requested_by_phalanx):
        return TransitionResult(job=case.job, attempt=attempt)
    if exit.requested_by_phalanx:
        # Not requested by the head: the supervisor is stopping and ends its tasks. Peers must not wait in a collective.
        why = f"{exit.node_id}: its supervisor ended the tasks{f' ({exit.note})' if exit.note else ''}"
        attempt = with_member(attempt, exit.node_id, member_on(attempt, exit.node_id).state, why=why)
        return _stopping(
            case,
            attempt,
            EndCause.NODE_FAIL,
            why,
            facts,
            history_line(case, facts, "node_left", why, node_id=exit.node_id),
        )
    how = f"signal {exit.signal}" if exit.code is None else f"exit code {exit.code}"
    if exit.note:
        how = f"{how} ({exit.note})"
    entry = history_line(
        case, facts, "task_failed", f"rank {exit.rank} on {exit.node_id} ended: {how}", node_id=exit.node_id
    )
    return _stopping(case, attempt, None, f"rank {exit.rank} on {exit.node_id}: {how}", facts, entry)


def _diagnosed(exit: TaskExit, facts: TransitionContext) -> TaskExit:
    """The exit with its diagnosis instead of its evidence, which would be too large for a gang of thousands. Stuck positions are small and stay."""
    if exit.evidence is None and not exit.failed:
        return exit
    position = None if exit.evidence is None else exit.evidence.stuck_position
    diagnosis = facts.diagnose(exit) if exit.failed else None
    return replace(
        exit, diagnosis=diagnosis, evidence=None if position is None else FailureEvidence(stuck_position=position)
    )


def _hung(case: AttemptCase, attempt: Attempt, happening: MemberHung, facts: TransitionContext) -> TransitionResult:
    """Stop a gang whose ranks make no steps; each node records the stacks of its ranks first."""
    after = "before its first step" if happening.step is None else f"after step {happening.step}"
    text = f"hung: no step for {happening.silent_s:.0f} s {after}; at most {happening.limit_s:.0f} s are usual; taking stacks"
    entry = history_line(case, facts, "hung", text, node_id=happening.node_id)
    why = f"hung: no step for {happening.silent_s:.0f} s {after}"
    return _stopping(case, attempt, EndCause.HANG, why, facts, entry)


def _stopped(
    case: AttemptCase, attempt: Attempt, happening: MemberStopped, facts: TransitionContext
) -> TransitionResult:
    attempt = with_member(attempt, happening.node_id, MemberState.STOPPED, unless=(MemberState.LOST,))
    attempt = with_unsent(attempt, happening.node_id, happening.unsent)
    if happening.port_in_use and attempt.stop_cause is None:
        entry = history_line(
            case, facts, "port_in_use", f"{happening.node_id}: the rendezvous port was taken; restarting on another"
        )
        return _stopping(case, attempt, EndCause.PORT_TAKEN, "rendezvous port taken", facts, entry)
    if attempt.state is not _S.STOPPING and not _finished_on(attempt, happening.node_id):
        # Its tasks did not succeed, whatever the cause: the rest of the gang would wait for them forever.
        why = f"{happening.node_id}: no process of the job runs there any longer"
        attempt = with_member(attempt, happening.node_id, MemberState.STOPPED, why=why)
        return _stopping(
            case,
            attempt,
            EndCause.START_FAIL,
            why,
            facts,
            history_line(case, facts, "stopped", why, node_id=happening.node_id),
        )
    return _settle_when_whole(case, attempt, facts)


def _finished_on(attempt: Attempt, node_id: NodeId) -> bool:
    """Whether every task of the node succeeded; also true for a node without tasks."""
    grant = attempt.allocation.grant_on(node_id)
    ended = sum(exit.node_id == node_id and exit.shell_code == 0 for exit in attempt.exits)
    return grant is None or ended >= grant.tasks


def _froze(case: AttemptCase, attempt: Attempt, happening: MemberFrozen, facts: TransitionContext) -> TransitionResult:
    if happening.thawed:
        text = f"{happening.node_id}: ranks were frozen for {happening.frozen_s:.1f} s without a lease and continue"
        return TransitionResult(
            job=case.job,
            attempt=attempt,
            history=(history_line(case, facts, "thawed", text, node_id=happening.node_id),),
        )
    text = f"{happening.node_id}: frozen for {happening.frozen_s:.1f} s, longer than its collectives tolerate; the gang restarts, uncharged"
    entry = history_line(case, facts, "froze", text, node_id=happening.node_id)
    return _stopping(case, attempt, EndCause.FREEZE, text, facts, entry)


def _lost(case: AttemptCase, attempt: Attempt, happening: MemberLost, facts: TransitionContext) -> TransitionResult:
    if member_on(attempt, happening.node_id).state in ACCOUNTED_STATES:
        return unchanged(case)
    attempt = with_member(attempt, happening.node_id, MemberState.LOST, why=happening.why)
    # A lost node explains the failures that its peers reported before.
    attempt = replace(attempt, why=f"{happening.node_id}: {happening.why}")
    entry = history_line(
        case, facts, "node_lost", f"{happening.node_id} is lost: {happening.why}", node_id=happening.node_id
    )
    return _stopping(case, attempt, None, f"{happening.node_id}: {happening.why}", facts, entry)


def _stop_wanted(
    case: AttemptCase, attempt: Attempt, happening: StopRequested, facts: TransitionContext
) -> TransitionResult:
    if attempt.state is _S.STOPPING and cause_of_end(attempt, happening.cause) is attempt.stop_cause:
        return unchanged(case)
    entry = history_line(case, facts, "stopping", f"{happening.cause.value}: {happening.why}", by=happening.by)
    return _stopping(case, attempt, happening.cause, happening.why, facts, entry)


def _overdue(
    case: AttemptCase, attempt: Attempt, happening: StartOverdue, facts: TransitionContext
) -> TransitionResult:
    names = ", ".join(happening.silent)
    text = f"{names} not ready after {happening.waited_s:.0f} s"
    for node_id in happening.silent:
        attempt = with_member(attempt, node_id, member_on(attempt, node_id).state, why="not ready in time")
    return _stopping(case, attempt, EndCause.START_FAIL, text, facts, history_line(case, facts, "overdue", text))


def _withdrawn(
    case: AttemptCase, attempt: Attempt, happening: AttemptWithdrawn, facts: TransitionContext
) -> TransitionResult:
    """The engine started no supervisor and will not start one: every member counts as stopped."""
    members = tuple(
        replace(
            member, state=MemberState.STOPPED, why=happening.why if member.node_id in happening.nodes else member.why
        )
        for member in attempt.members
    )
    attempt = replace(attempt, members=members)
    if happening.cause is EndCause.FAILED and attempt.exit_code is None:
        attempt = replace(attempt, exit_code=1)
    entry = history_line(case, facts, "withdrawn", happening.why)
    return _stopping(case, attempt, happening.cause, happening.why, facts, entry)


def _queued(
    case: AttemptCase, attempt: Attempt, happening: AttemptQueued, facts: TransitionContext
) -> TransitionResult:
    """Note that the engine's cluster keeps the attempt waiting. Billing and all time limits begin when it is admitted."""
    if happening.why == attempt.queued_why:
        return unchanged(case)
    if happening.why:
        first = () if attempt.queued_why else (history_line(case, facts, "queued", happening.why),)
        return TransitionResult(job=case.job, attempt=replace(attempt, queued_why=happening.why), history=first)
    waited = format_duration(max(0.0, facts.now_s - attempt.placed_s))
    entry = history_line(case, facts, "admitted", f"admitted by the cluster's own queue after {waited}")
    admitted = replace(attempt, queued_why="", placed_s=facts.now_s, generation_s=facts.now_s)
    return TransitionResult(job=case.job, attempt=admitted, history=(entry,))


def _reclaimed(
    case: AttemptCase, attempt: Attempt, happening: AttemptReclaimed, facts: TransitionContext
) -> TransitionResult:
    return _stop_wanted(case, attempt, StopRequested(cause=EndCause.PREEMPTED, why=happening.why), facts)


def _remind(case: AttemptCase, attempt: Attempt, happening: ReminderDue, facts: TransitionContext) -> TransitionResult:
    node_id, state = happening.node_id, member_on(attempt, happening.node_id).state
    if happening.probe_port or happening.address:
        attempt = change_member(
            attempt,
            node_id,
            lambda member: replace(member, probe_port=happening.probe_port, address=happening.address),
        )
    if attempt.state is _S.STOPPING:
        commands = gang_commands.stop(case, attempt, only=node_id)
    elif state is MemberState.REQUESTED:
        commands = gang_commands.prepare(case.job, attempt, facts, only=node_id)
    elif attempt.state is _S.STARTING and state is MemberState.READY:
        commands = gang_commands.start(attempt, only=node_id)
    elif attempt.state is _S.RUNNING and node_id == attempt.allocation.grants[0].node_id:
        commands = gang_commands.sleep_hook(attempt)
    else:
        commands = ()
    return TransitionResult(job=case.job, attempt=attempt, commands=commands)


def _hook_ended(
    case: AttemptCase, attempt: Attempt, happening: SleepHookEnded, facts: TransitionContext
) -> TransitionResult:
    if not sleep.answers(attempt, happening):
        return unchanged(case)
    if happening.sleep or not happening.why:
        return sleep.finish_hook(case, attempt, happening, facts)
    why = f"{happening.node_id}: it did not wake: {happening.why}"
    entry = history_line(case, facts, "wake_failed", why, node_id=happening.node_id)
    return _stopping(case, attempt, EndCause.CRASH, why, facts, entry)


def _stopping(
    case: AttemptCase, attempt: Attempt, cause: EndCause | None, why: str, facts: TransitionContext, entry: HistoryLine
) -> TransitionResult:
    """Stop every member; the first cause stays unless a later one takes precedence (`cause_of_end`)."""
    before = attempt
    attempt = replace(attempt, state=_S.STOPPING, stop_cause=cause_of_end(attempt, cause), why=attempt.why or why)
    job = case.job
    if attempt.stop_cause is EndCause.PARKED:  # what it replaces counts: parking must not win a further preemption
        stops, moves = before.stop_cause is EndCause.PREEMPTED, before.stop_cause is EndCause.MOVED
        job = replace(job, preemptions=job.preemptions + stops, moves=job.moves + moves)
    outcome = TransitionResult(
        job=job,
        attempt=attempt,
        commands=gang_commands.stop(AttemptCase(job=job, attempt=attempt), attempt),
        history=(entry, endpoint_line(case, attempt, facts, attempt.why)) if before.serving else (entry,),
    )
    return outcome.then(_settle_when_whole(AttemptCase(job=job, attempt=attempt), attempt, facts))


def _settle_when_whole(case: AttemptCase, attempt: Attempt, facts: TransitionContext) -> TransitionResult:
    if any(member.state not in ACCOUNTED_STATES for member in attempt.members):
        return TransitionResult(job=case.job, attempt=attempt)
    return settle(AttemptCase(job=case.job, attempt=attempt), attempt, facts)


_ALL: Final = (_S.PLACED, _S.STARTING, _S.RUNNING, _S.STOPPING)
Handler = Callable[[AttemptCase, Attempt, Any, TransitionContext], TransitionResult]
TRANSITIONS: Final[dict[tuple[AttemptState, type[Any]], Handler]] = {
    (_S.PLACED, MemberReady): _ready,
    (_S.PLACED, StartOverdue): _overdue,
    **{(state, AttemptWithdrawn): _withdrawn for state in (_S.PLACED, _S.STOPPING)},
    (_S.PLACED, AttemptQueued): _queued,
    **{(state, AttemptReclaimed): _reclaimed for state in (_S.STARTING, _S.RUNNING, _S.STOPPING)},
    (_S.STARTING, MemberStarted): _started,
    **{(state, MemberRefused): _refused for state in (_S.PLACED, _S.STARTING)},
    **{(state, TaskExited): _exited for state in (_S.STARTING, _S.RUNNING, _S.STOPPING)},
    **{(state, MemberFrozen): _froze for state in (_S.PLACED, _S.STARTING, _S.RUNNING)},
    **{(state, ReadinessChanged): _readiness for state in (_S.STARTING, _S.RUNNING)},
    (_S.RUNNING, MemberHung): _hung,
    (_S.RUNNING, SleepRequested): sleep.fall_asleep,
    (_S.RUNNING, WakeRequested): sleep.wish_to_wake,
    (_S.RUNNING, WakeDelayed): sleep.delay_wake,
    (_S.RUNNING, DevicesRegained): sleep.wake,
    (_S.RUNNING, SleepHookEnded): _hook_ended,
    **{(state, MemberStopped): _stopped for state in _ALL},
    **{(state, CheckpointSaved): save_checkpoint for state in _ALL},
    **{(state, CheckpointFailed): note_failed_checkpoint for state in _ALL},
    **{(state, ProgressReported): record_progress for state in _ALL},
    **{(state, MemberLost): _lost for state in _ALL},
    **{(state, StopRequested): _stop_wanted for state in _ALL},
    **{(state, ReminderDue): _remind for state in _ALL},
}
