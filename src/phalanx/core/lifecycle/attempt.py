"""The attempt machine: (case, happening) -> outcome, as a table.

Whoever calls it (the controller, live or simulated) commits the outcome's records with its story lines before any of its commands
leaves. A happening that is not in the table for the present state changes nothing: reports come late, twice, and out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from phalanx.core.fleet.fitness import Fault, judge_links
from phalanx.core.ids import NodeId
from phalanx.core.lifecycle import orders
from phalanx.core.lifecycle.facts import Case, Facts, Outcome, line
from phalanx.core.lifecycle.happenings import Happening, MemberLost, Remind, StartOverdue, StopWanted
from phalanx.core.lifecycle.settle import settle
from phalanx.core.state.events import (
    CheckpointFailed,
    CheckpointSaved,
    MemberFroze,
    MemberHung,
    MemberReady,
    MemberRefused,
    MemberStarted,
    MemberStopped,
    Progressed,
    TaskExited,
    Withdrawn,
)
from phalanx.core.state.revise import replace
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import Attempt, AttemptState, Cause, Member, MemberState, TaskExit
from phalanx.core.work.failure import Evidence
from phalanx.core.work.job import Job

CHECKPOINTS_KEPT: Final = 2
CLOCK_OFF_S: Final = 5.0
"""Wall clocks further apart are named, for deadlines travel as Unix time: above what the round trip of a renewal leaves open (1 s),
below the shortest grace that anybody counts with."""
_S = AttemptState
_ACCOUNTED: Final = (MemberState.STOPPED, MemberState.LOST)
_FROM_A_NODE: Final = (MemberReady, MemberRefused, MemberStarted, TaskExited, MemberStopped, MemberFroze, MemberHung)


def transition(case: Case, happening: Happening, facts: Facts) -> Outcome:
    """The case after `happening`. Unknown pairs, and reports of another epoch or generation, change nothing."""
    attempt = case.attempt
    if attempt is None or not _current(attempt, happening):
        return _same(case)
    handler = TABLE.get((attempt.state, type(happening)))
    return _same(case) if handler is None else handler(case, attempt, happening, facts)


def _current(attempt: Attempt, happening: Happening) -> bool:
    if isinstance(happening, CheckpointSaved):
        return happening.resume.epoch == attempt.epoch
    if isinstance(happening, (Progressed, CheckpointFailed, Withdrawn)):
        return happening.epoch == attempt.epoch
    if isinstance(happening, _FROM_A_NODE):
        return happening.epoch == attempt.epoch and happening.generation == attempt.generation
    return True


def _same(case: Case) -> Outcome:
    return Outcome(job=case.job, attempt=case.attempt)


def _ready(case: Case, attempt: Attempt, happening: MemberReady, facts: Facts) -> Outcome:
    rank_zero = attempt.allocation.grants[0].node_id == happening.node_id
    members = tuple(
        replace(member, bad_links=happening.bad_links) if member.node_id == happening.node_id else member
        for member in _members_with(
            attempt, happening.node_id, MemberState.READY, port=happening.port if rank_zero else None
        )
    )
    late = _clock_lines(case, happening, facts)
    whole = all(member.state is MemberState.READY for member in members)
    faults = _bad_ends(case, members) if whole else ()  # not before: the first to speak knows one side alone
    if faults:
        return _unlinked(case, replace(attempt, members=members), faults, late, facts)
    attempt = replace(
        attempt,
        members=members,
        state=_S.STARTING if whole else attempt.state,
        resume=happening.resume if rank_zero else attempt.resume,
    )
    if not whole:
        return Outcome(job=case.job, attempt=attempt, lines=late)
    source = f", from step {attempt.resume.step}" if attempt.resume is not None else ""
    told = line(
        case, facts, "starting", f"{len(attempt.members)} of {len(attempt.members)} nodes ready; ranks start{source}"
    )
    return Outcome(job=case.job, attempt=attempt, commands=orders.start(attempt), lines=(*late, told))


def _clock_lines(case: Case, happening: MemberReady, facts: Facts) -> tuple[StoryLine, ...]:
    """A wall clock that is off is named and no more: were it the head's that somebody set, every node would be refused for it."""
    off_s = happening.clock_off_s
    if abs(off_s) < CLOCK_OFF_S:
        return ()
    word = "ahead of" if off_s > 0 else "behind"
    text = (
        f"{happening.node_id}: its clock is {abs(off_s):.0f} s {word} the head's; time limits there are off by as much"
    )
    return (line(case, facts, "clock_off", text, node_id=happening.node_id),)


def _bad_ends(case: Case, members: tuple[Member, ...]) -> tuple[Fault, ...]:
    """Who is at fault for bad links within the gang."""
    found = {member.node_id: member.bad_links for member in members}
    return judge_links(list(found), found, spare_later=len(case.job.avoid) % 2 == 1)


def _unlinked(
    case: Case, attempt: Attempt, faults: tuple[Fault, ...], late: tuple[StoryLine, ...], facts: Facts
) -> Outcome:
    """Links within the gang are bad: nothing starts on it, and whoever is at fault is swapped."""
    for fault in faults:
        attempt = _with_member(attempt, fault.node_id, MemberState.READY, why=fault.why)
    why = "; ".join(fault.why for fault in faults)
    told = line(case, facts, "unfit", why, node_id=faults[0].node_id)
    outcome = _stopping(case, attempt, Cause.UNFIT, why, facts, told)
    return replace(outcome, lines=(*late, *outcome.lines), faults=faults)


def _refused(case: Case, attempt: Attempt, happening: MemberRefused, facts: Facts) -> Outcome:
    attempt = _with_member(attempt, happening.node_id, MemberState.STOPPED, why=happening.why)
    cause = Cause.FAILED if happening.charge else Cause.UNFIT if happening.flaw else Cause.START_FAIL
    if happening.charge and attempt.exit_code is None:
        attempt = replace(attempt, exit_code=happening.exit_code or 1)
    told = line(case, facts, "refused", f"{happening.node_id}: {happening.why}", node_id=happening.node_id)
    outcome = _stopping(case, attempt, cause, f"{happening.node_id}: {happening.why}", facts, told)
    if cause is not Cause.UNFIT:
        return outcome
    return replace(outcome, faults=(Fault(node_id=happening.node_id, why=happening.why, kept_out=True),))


def _started(case: Case, attempt: Attempt, happening: MemberStarted, facts: Facts) -> Outcome:
    members = _members_with(attempt, happening.node_id, MemberState.STARTED, unless=_ACCOUNTED)
    if any(member.state in (MemberState.ASKED, MemberState.READY) for member in members):
        return Outcome(job=case.job, attempt=replace(attempt, members=members))
    attempt = replace(
        attempt,
        members=members,
        state=_S.RUNNING,
        running_s=facts.now_s,
        first_running_s=attempt.first_running_s or facts.now_s,
    )
    job = case.job if case.job.started_s is not None else replace(case.job, started_s=facts.now_s)
    told = line(case, facts, "running", f"all {attempt.allocation.world_size} ranks run")
    return Outcome(job=job, attempt=attempt, lines=(told,))


def _exited(case: Case, attempt: Attempt, happening: TaskExited, facts: Facts) -> Outcome:
    if any(known.rank == happening.exit.rank for known in attempt.exits):
        return _same(case)
    exit = _judged(happening.exit, facts)
    attempt = replace(attempt, exits=(*attempt.exits, exit))
    if attempt.state is _S.STOPPING or (exit.shell_code == 0 and not exit.by_us):
        return Outcome(job=case.job, attempt=attempt)
    if exit.by_us:
        # We have asked nothing of it: its supervisor is going away and takes the tasks along. Peers must not wait in a collective.
        why = f"{exit.node_id}: its supervisor ended the tasks{f' ({exit.note})' if exit.note else ''}"
        attempt = _with_member(attempt, exit.node_id, _member(attempt, exit.node_id).state, why=why)
        return _stopping(
            case, attempt, Cause.NODE_FAIL, why, facts, line(case, facts, "node_left", why, node_id=exit.node_id)
        )
    how = f"signal {exit.signal}" if exit.code is None else f"exit code {exit.code}"
    if exit.note:
        how = f"{how} ({exit.note})"
    told = line(case, facts, "task_failed", f"rank {exit.rank} on {exit.node_id} ended: {how}", node_id=exit.node_id)
    return _stopping(case, attempt, None, f"rank {exit.rank} on {exit.node_id}: {how}", facts, told)


def _judged(exit: TaskExit, facts: Facts) -> TaskExit:
    """The exit with its verdict in place of its evidence: of a gang of thousands the record would outgrow its job. Stances are small and stay."""
    if exit.evidence is None and not exit.failed:
        return exit
    stance = None if exit.evidence is None else exit.evidence.stance
    verdict = facts.judge(exit) if exit.failed else None
    return replace(exit, verdict=verdict, evidence=None if stance is None else Evidence(stance=stance))


def _hung(case: Case, attempt: Attempt, happening: MemberHung, facts: Facts) -> Outcome:
    """A node's ranks make no steps: the gang is stopped, and each node keeps the stacks of its ranks first."""
    after = "before its first step" if happening.step is None else f"after step {happening.step}"
    text = f"hung: no step for {happening.silent_s:.0f} s {after}, where at most {happening.limit_s:.0f} s are usual; stacks are taken"
    told = line(case, facts, "hung", text, node_id=happening.node_id)
    why = f"hung: no step for {happening.silent_s:.0f} s {after}"
    return _stopping(case, attempt, Cause.HANG, why, facts, told)


def _stopped(case: Case, attempt: Attempt, happening: MemberStopped, facts: Facts) -> Outcome:
    attempt = _with_member(attempt, happening.node_id, MemberState.STOPPED, unless=(MemberState.LOST,))
    if happening.port_in_use and attempt.ending is None:
        told = line(case, facts, "port_in_use", f"{happening.node_id}: the rendezvous port was taken; again on another")
        return _stopping(case, attempt, Cause.PORT_TAKEN, "rendezvous port taken", facts, told)
    if attempt.state is not _S.STOPPING and not _finished_on(attempt, happening.node_id):
        # Nothing runs there, and its tasks did not end well: whatever it was, the rest of the gang would wait for them forever.
        why = f"{happening.node_id}: nothing of the job runs there any more"
        attempt = _with_member(attempt, happening.node_id, MemberState.STOPPED, why=why)
        return _stopping(
            case, attempt, Cause.START_FAIL, why, facts, line(case, facts, "stopped", why, node_id=happening.node_id)
        )
    return _settle_when_whole(case, attempt, facts)


def _finished_on(attempt: Attempt, node_id: NodeId) -> bool:
    """Whether every task of the node has ended, and well; so too for a node that has none."""
    grant = attempt.allocation.on(node_id)
    ended = sum(exit.node_id == node_id and exit.shell_code == 0 for exit in attempt.exits)
    return grant is None or ended >= grant.tasks


def _froze(case: Case, attempt: Attempt, happening: MemberFroze, facts: Facts) -> Outcome:
    if happening.thawed:
        text = f"{happening.node_id}: ranks were frozen for {happening.frozen_s:.1f} s without a lease and go on"
        return Outcome(
            job=case.job, attempt=attempt, lines=(line(case, facts, "thawed", text, node_id=happening.node_id),)
        )
    text = f"{happening.node_id}: frozen for {happening.frozen_s:.1f} s, longer than its collectives bear; the gang restarts, uncharged"
    told = line(case, facts, "froze", text, node_id=happening.node_id)
    return _stopping(case, attempt, Cause.FREEZE, text, facts, told)


def _saved(case: Case, attempt: Attempt, happening: CheckpointSaved, facts: Facts) -> Outcome:
    fresh = replace(happening.resume, saved_s=facts.now_s)
    if any(kept.digest == fresh.digest and kept.path == fresh.path for kept in case.job.checkpoints):
        return _same(case)
    # By epoch first: what an earlier epoch saved past the step this one resumed from did not verify, and must not push out what does.
    others = (
        kept for kept in case.job.checkpoints if kept.path != fresh.path
    )  # saved anew in the same folder: one of the two is left
    known = sorted((*others, fresh), key=lambda kept: (kept.epoch, kept.step))
    kept, dropped = known[-CHECKPOINTS_KEPT:], known[:-CHECKPOINTS_KEPT]
    job = _progress(replace(case.job, checkpoints=tuple(kept)), fresh.step)
    if attempt.ending in _ASKED and not job.spec.saves_on_stop:
        job = replace(job, spec=replace(job.spec, saves_on_stop=True))  # so it is known from now on, and asked sooner
    text = (
        f"checkpoint of step {fresh.step} published (stall {happening.stall_s:.2f} s, write {happening.write_s:.2f} s)"
    )
    told = line(case, facts, "checkpoint", text)
    # Copies that the head keeps are dropped by the head itself (store.kept), and by each node in its own time.
    own = attempt.kept and not job.spec.checkpoint
    commands = () if own else orders.drop_checkpoints(case.job, attempt, tuple(old.path for old in dropped))
    return Outcome(job=job, attempt=attempt, commands=commands, lines=(told,))


def _save_failed(case: Case, attempt: Attempt, happening: CheckpointFailed, facts: Facts) -> Outcome:
    text = f"checkpoint of step {happening.step} failed and training goes on: {happening.error}"
    return Outcome(job=case.job, attempt=attempt, lines=(line(case, facts, "checkpoint_failed", text),))


def _progressed(case: Case, attempt: Attempt, happening: Progressed, facts: Facts) -> Outcome:
    del facts
    # A step counts as progress for the budget only once a checkpoint holds it, or if the job never saves.
    if case.job.checkpoints:
        return _same(case)
    return Outcome(job=_progress(case.job, happening.step), attempt=attempt)


def _lost(case: Case, attempt: Attempt, happening: MemberLost, facts: Facts) -> Outcome:
    if _member(attempt, happening.node_id).state in _ACCOUNTED:
        return _same(case)
    attempt = _with_member(attempt, happening.node_id, MemberState.LOST, why=happening.why)
    attempt = replace(
        attempt, why=f"{happening.node_id}: {happening.why}"
    )  # a lost node explains what its peers reported before
    told = line(case, facts, "node_lost", f"{happening.node_id} is lost: {happening.why}", node_id=happening.node_id)
    return _stopping(case, attempt, None, f"{happening.node_id}: {happening.why}", facts, told)


def _stop_wanted(case: Case, attempt: Attempt, happening: StopWanted, facts: Facts) -> Outcome:
    if attempt.state is _S.STOPPING and _ending(attempt, happening.cause) is attempt.ending:
        return _same(case)
    told = line(case, facts, "stopping", f"{happening.cause.value}: {happening.why}", by=happening.by)
    return _stopping(case, attempt, happening.cause, happening.why, facts, told)


def _overdue(case: Case, attempt: Attempt, happening: StartOverdue, facts: Facts) -> Outcome:
    names = ", ".join(happening.silent)
    text = f"{names} not ready after {happening.waited_s:.0f} s"
    for node_id in happening.silent:
        attempt = _with_member(attempt, node_id, _member(attempt, node_id).state, why="not ready in time")
    return _stopping(case, attempt, Cause.START_FAIL, text, facts, line(case, facts, "overdue", text))


def _withdrawn(case: Case, attempt: Attempt, happening: Withdrawn, facts: Facts) -> Outcome:
    """The engine never brought a supervisor, and says that none will come: the whole gang is accounted for."""
    members = tuple(
        replace(
            member, state=MemberState.STOPPED, why=happening.why if member.node_id in happening.nodes else member.why
        )
        for member in attempt.members
    )
    attempt = replace(attempt, members=members)
    if happening.cause is Cause.FAILED and attempt.exit_code is None:
        attempt = replace(attempt, exit_code=1)
    told = line(case, facts, "withdrawn", happening.why)
    return _stopping(case, attempt, happening.cause, happening.why, facts, told)


def _remind(case: Case, attempt: Attempt, happening: Remind, facts: Facts) -> Outcome:
    node_id, state = happening.node_id, _member(attempt, happening.node_id).state
    if happening.probe_port:
        attempt = replace(
            attempt,
            members=tuple(
                replace(member, probe_port=happening.probe_port) if member.node_id == node_id else member
                for member in attempt.members
            ),
        )
    if attempt.state is _S.STOPPING:
        commands = orders.stop(case, attempt, only=node_id)
    elif state is MemberState.ASKED:
        commands = orders.prepare(case.job, attempt, facts, only=node_id)
    elif attempt.state is _S.STARTING and state is MemberState.READY:
        commands = orders.start(attempt, only=node_id)
    else:
        commands = ()
    return Outcome(job=case.job, attempt=attempt, commands=commands)


def _stopping(case: Case, attempt: Attempt, cause: Cause | None, why: str, facts: Facts, told: StoryLine) -> Outcome:
    """Ask every member to stop; the first cause named stays unless a user's cancel overrides it."""
    attempt = replace(attempt, state=_S.STOPPING, ending=_ending(attempt, cause), why=attempt.why or why)
    outcome = Outcome(
        job=case.job, attempt=attempt, commands=orders.stop(Case(job=case.job, attempt=attempt), attempt), lines=(told,)
    )
    return outcome.then(_settle_when_whole(Case(job=case.job, attempt=attempt), attempt, facts))


def _ending(attempt: Attempt, cause: Cause | None) -> Cause | None:
    """Why it ends, with one more cause: a user's cancel goes before everything, a user's wish before what befell it, else the first."""
    if attempt.ending is None or cause is Cause.CANCELLED or (attempt.ending in _OURS and cause in _USERS):
        return cause
    return attempt.ending


def _settle_when_whole(case: Case, attempt: Attempt, facts: Facts) -> Outcome:
    if any(member.state not in _ACCOUNTED for member in attempt.members):
        return Outcome(job=case.job, attempt=attempt)
    return settle(Case(job=case.job, attempt=attempt), attempt, facts)


def _progress(job: Job, step: int) -> Job:
    return replace(job, progress_step=step, stalls=0, hangs=0, avoid=()) if step > job.progress_step else job


def _member(attempt: Attempt, node_id: NodeId) -> Member:
    return next(
        (m for m in attempt.members if m.node_id == node_id), Member(node_id=node_id, state=MemberState.STOPPED)
    )


def _with_member(
    attempt: Attempt,
    node_id: NodeId,
    state: MemberState,
    *,
    port: int | None = None,
    why: str = "",
    unless: tuple[MemberState, ...] = (),
) -> Attempt:
    return replace(attempt, members=_members_with(attempt, node_id, state, port=port, why=why, unless=unless))


def _members_with(
    attempt: Attempt,
    node_id: NodeId,
    state: MemberState,
    *,
    port: int | None = None,
    why: str = "",
    unless: tuple[MemberState, ...] = (),
) -> tuple[Member, ...]:
    """The gang's members after this one's change; one whose state is in `unless` stays as it is."""
    return tuple(
        replace(member, state=state, port=port if port is not None else member.port, why=why or member.why)
        if member.node_id == node_id and member.state not in unless
        else member
        for member in attempt.members
    )


_USERS: Final = (Cause.CANCELLED, Cause.REQUEUED, Cause.TIMEOUT, Cause.PREEMPTED, Cause.MOVED, Cause.DRAINED)
_ASKED: Final = (Cause.PREEMPTED, Cause.MOVED, Cause.REQUEUED, Cause.DRAINED)  # with time to save
_OURS: Final = (
    Cause.FREEZE,
    Cause.HANG,
    Cause.PORT_TAKEN,
    Cause.CONTENDED,
    Cause.START_FAIL,
    Cause.UNFIT,
    Cause.NODE_FAIL,
)
_ALL: Final = (_S.PLACED, _S.STARTING, _S.RUNNING, _S.STOPPING)
Handler = Callable[[Case, Attempt, Any, Facts], Outcome]
TABLE: Final[dict[tuple[AttemptState, type[Any]], Handler]] = {
    (_S.PLACED, MemberReady): _ready,
    (_S.PLACED, StartOverdue): _overdue,
    **{(state, Withdrawn): _withdrawn for state in (_S.PLACED, _S.STOPPING)},
    (_S.STARTING, MemberStarted): _started,
    **{(state, MemberRefused): _refused for state in (_S.PLACED, _S.STARTING)},
    **{(state, TaskExited): _exited for state in (_S.STARTING, _S.RUNNING, _S.STOPPING)},
    **{(state, MemberFroze): _froze for state in (_S.PLACED, _S.STARTING, _S.RUNNING)},
    (_S.RUNNING, MemberHung): _hung,
    **{(state, MemberStopped): _stopped for state in _ALL},
    **{(state, CheckpointSaved): _saved for state in _ALL},
    **{(state, CheckpointFailed): _save_failed for state in _ALL},
    **{(state, Progressed): _progressed for state in _ALL},
    **{(state, MemberLost): _lost for state in _ALL},
    **{(state, StopWanted): _stop_wanted for state in _ALL},
    **{(state, Remind): _remind for state in _ALL},
}
