"""Builds the commands for a gang in each state of its attempt."""

from __future__ import annotations

from typing import Final

from phalanx.core.ids import NodeId
from phalanx.core.lifecycle.transitions import CRASH_GRACE_S, AttemptCase, TransitionContext
from phalanx.core.state.commands import (
    CleanUpAttempt,
    Command,
    DeleteCheckpoints,
    PrepareTasks,
    RunSleepHook,
    StartTasks,
    StopTasks,
)
from phalanx.core.state.fast_replace import replace
from phalanx.core.work.attempt import (
    Attempt,
    EndCause,
    Member,
    MemberState,
    SleepPhase,
)
from phalanx.core.work.gang_topology import gang_topology
from phalanx.core.work.job import Job

_STOP_REASON: Final = {
    EndCause.CANCELLED: "cancelled",
    EndCause.PREEMPTED: "preempted",
    EndCause.MOVED: "preempted",
    EndCause.REQUEUED: "preempted",
    EndCause.IDLE: "preempted",
    EndCause.PARKED: "preempted",
    EndCause.DRAINED: "drain",
    EndCause.TIMEOUT: "deadline",
    EndCause.HANG: "hang",  # the supervisor records the stacks of its ranks before it ends them
}


def prepare(job: Job, attempt: Attempt, facts: TransitionContext, *, only: NodeId | None = None) -> tuple[Command, ...]:
    """`PrepareTasks` for every node of the gang, or for one."""
    spec = job.spec
    root = spec.checkpoint or facts.checkpoint_root
    addresses = tuple(member.address or facts.addresses.get(member.node_id, "127.0.0.1") for member in attempt.members)
    age_s = facts.ages_s.get(job.id, max(0.0, facts.now_s - attempt.placed_s))
    deadline_s = None if spec.time_limit_s is None else facts.now_s + spec.time_limit_s - age_s
    common = PrepareTasks(
        node_id=only or attempt.members[0].node_id,
        job_id=job.id,
        epoch=attempt.epoch,
        generation=attempt.generation,
        spec=spec,
        allocation=attempt.allocation,
        addresses=addresses,
        candidates=tuple(reversed(job.checkpoints)),
        checkpoint_dir=f"{root}/{attempt.folder}",
        output_dir=f"{job.spec.outputs or facts.output_root}/{job.folder}",
        deadline_s=deadline_s,
        restarts=attempt.epoch - 1 + attempt.generation,
        mtbf_s=facts.gang_mtbf_s(job, len(attempt.allocation.grants)),
        user=job.user,
        array=job.array,
        surroundings=gang_topology(attempt.allocation, facts.nodes) if spec.plan else None,
        kept=attempt.head_stores_copies,
        probe_ports=_probe_ports(attempt, facts),
        hangs=job.hang_restarts,
        replica=job.replica,
    )
    if only is not None:
        return (common,) if any(member.node_id == only for member in attempt.members) else ()
    return (common, *(replace(common, node_id=member.node_id) for member in attempt.members[1:]))


def _probe_ports(attempt: Attempt, facts: TransitionContext) -> tuple[int, ...]:
    """Probe ports by node rank; none for a single node. A seat's port is known once its supervisor registers: the later of two probes."""
    if len(attempt.members) < 2:
        return ()
    nodes = (facts.nodes.get(member.node_id) for member in attempt.members)
    known = (0 if node is None else node.probe_port for node in nodes)
    return tuple(member.probe_port or port for member, port in zip(attempt.members, known, strict=True))


def start(attempt: Attempt, *, only: NodeId | None = None) -> tuple[Command, ...]:
    """`StartTasks` for every node, or for one."""
    port = next((member.port for member in attempt.members if member.port is not None), None) or 0
    addresses = tuple(member.address for member in attempt.members)
    return tuple(
        StartTasks(
            node_id=member.node_id,
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            generation=attempt.generation,
            port=port,
            resume=attempt.resume_from,
            service_port=attempt.service_port,
            addresses=addresses if any(addresses) else (),
        )
        for member in attempt.members
        if only is None or member.node_id == only
    )


def stop(case: AttemptCase, attempt: Attempt, *, only: NodeId | None = None) -> tuple[Command, ...]:
    """`StopTasks` for every member that is not stopped or lost. The grace period is short if a peer is gone: no save can succeed."""
    orderly = (
        attempt.stop_cause in _STOP_REASON
        and attempt.stop_cause is not EndCause.HANG
        and not any(_gone(member, attempt) for member in attempt.members)
    )
    grace_s = case.job.spec.grace_s if orderly else min(CRASH_GRACE_S, case.job.spec.grace_s)
    reason = _STOP_REASON.get(attempt.stop_cause, "restart") if attempt.stop_cause is not None else "restart"
    return tuple(
        StopTasks(
            node_id=member.node_id,
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            generation=attempt.generation,
            reason=reason,
            grace_s=grace_s,
        )
        for member in attempt.members
        if member.state not in (MemberState.STOPPED, MemberState.LOST) and (only is None or member.node_id == only)
    )


def sleep_hook(attempt: Attempt) -> tuple[Command, ...]:
    """`RunSleepHook` for the first node, if a hook was requested and has not answered."""
    if attempt.sleep is None or not attempt.runs_hook:
        return ()
    order = RunSleepHook(
        node_id=attempt.allocation.grants[0].node_id,
        job_id=attempt.job_id,
        epoch=attempt.epoch,
        generation=attempt.generation,
        turn=attempt.sleep_turn,
        sleep=attempt.sleep.phase is SleepPhase.FALLING_ASLEEP,
    )
    return (order,)


def clean_up(attempt: Attempt) -> tuple[Command, ...]:
    """`CleanUpAttempt` for every member that is not lost."""
    return tuple(
        CleanUpAttempt(node_id=member.node_id, job_id=attempt.job_id, epoch=attempt.epoch)
        for member in attempt.members
        if member.state is not MemberState.LOST
    )


def drop_checkpoints(job: Job, attempt: Attempt, paths: tuple[str, ...]) -> tuple[Command, ...]:
    """`DeleteCheckpoints` for node rank 0; none without paths."""
    if not paths:
        return ()
    node_id = attempt.allocation.grants[0].node_id
    return (DeleteCheckpoints(node_id=node_id, job_id=attempt.job_id, paths=paths, user=job.user),)


def _gone(member: Member, attempt: Attempt) -> bool:
    failed = any(exit.failed and exit.node_id == member.node_id for exit in attempt.exits)
    return member.state is MemberState.LOST or failed
