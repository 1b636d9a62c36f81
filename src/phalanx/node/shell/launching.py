"""Starts the tasks of a prepared member, and closes it when none of its processes is left."""

from __future__ import annotations

import os
import time
from typing import Final

from phalanx.node.logic import environment, rendezvous
from phalanx.node.logic.actions import SpawnTasks
from phalanx.node.logic.happenings import Spawned, Unfit
from phalanx.node.logic.kept import keeps_checkpoints
from phalanx.node.logic.pace import Pace
from phalanx.node.logic.warm import warm_argv
from phalanx.node.shell import evidence, reach
from phalanx.node.shell.accounts import acting_as
from phalanx.node.shell.batch import batch_command
from phalanx.node.shell.fetching import bring
from phalanx.node.shell.link import Rejected
from phalanx.node.shell.preparation import Workshop
from phalanx.node.shell.present import Present, task_id
from phalanx.node.shell.processes import TaskNotStarted, TaskSpec
from phalanx.node.shell.refusal import Refusal
from phalanx.node.shell.requirements import dressed
from phalanx.node.shell.shipping import StreamName
from phalanx.wire.manifest import CheckpointInvalid
from phalanx.wire.rank import boottime_ns

_DRAIN_S: Final = 5.0  # for output left in a pipe whose writers are dead: milliseconds, unless the disk hangs
_THAW_S: Final = 10.0  # the thaw is in progress on another thread


def spawn(member: Present, order: SpawnTasks, services: Workshop) -> Spawned | Unfit:
    """Create the lease page and start every rank; stops at the first that does not start."""
    role, start, grant = member.prepare.spec.role, order.start, member.grant
    assert member.processes is not None
    member.start = start
    member.running.wait(_THAW_S)
    member.spawned_ns = boottime_ns()
    member.oom_before, member.oom_before_here = evidence.oom_events(member.cgroup), evidence.oom_kills()
    member.pace = Pace(member.prepare.spec.collective_timeout_s, restarts=member.prepare.hangs)
    command: tuple[str, ...] | str = role.script or role.argv
    warm = warm_argv(command) if member.prepare.spec.warm else None
    try:
        _fetch_chosen_checkpoint(member, services)
        with acting_as(member.account):
            why = reach.unseen(member)
        if why:
            member.publishes = False
            services.note(member, why)
        member.make_page(deadline_ns=order.deadline_ns, job_deadline_ns=order.job_deadline_ns)
        view = services.view(member)
        extra: dict[str, str] = {}
        if member.prepare.spec.slurm:
            with acting_as(member.account):
                command, extra = batch_command(member, start.port)
        for local_rank in range(grant.tasks):
            rank = grant.first_rank + local_rank
            variables, notes = environment.rank_environment(member.prepare, start, grant, local_rank, view)
            variables = dressed(member, variables)
            if local_rank == 0:
                member.environment = variables
                for text in notes:
                    services.note(member, text)
            task = TaskSpec(
                task_id=task_id(rank),
                command=command,
                cwd=member.workdir,
                env={**variables, **extra},
                warm=warm,
                account=member.account,
                bound=member.inside is None,
            )
            if member.inside is not None:
                task = member.inside.task(member.processes.key, task)
                if local_rank == 0:
                    member.environment = dict(task.env)
            member.pids[rank] = _spawn_one(member, rank, task, services)
    except TaskNotStarted as error:
        return Unfit(key=member.key, why=str(error), charge=error.user_error, exit_code=error.exit_code)
    except Refusal as refusal:
        return Unfit(key=member.key, why=str(refusal), charge=refusal.charge, exit_code=refusal.exit_code)
    except (OSError, KeyError, CheckpointInvalid, Rejected) as error:
        return Unfit(key=member.key, why=f"starting failed on this node: {error}", charge=False)
    return Spawned(key=member.key)


def _fetch_chosen_checkpoint(member: Present, services: Workshop) -> None:
    """If each node stores its own checkpoints: download the one that node rank 0 chose, if this node found another."""
    start = member.start
    if start is not None and start.resume not in (None, member.brought) and keeps_checkpoints(member.prepare):
        assert start.resume is not None
        bring(member, start.resume, services.access, member.checkpoints)
        member.brought = start.resume


def _spawn_one(member: Present, rank: int, task: TaskSpec, services: Workshop) -> int:
    assert member.processes is not None
    stream = services.stream(member, task.task_id)
    member.spawned_at[rank] = services.spool.end(stream)
    output = services.pipe(member, stream)
    try:
        return member.processes.spawn(task, output)
    finally:
        os.close(output)


def wind_up(member: Present, tail_of: int | None, services: Workshop) -> bytes:
    """Close the member's processes, drain their output and reports, and return the requested tail of output."""
    with member.containing:
        if member.processes is not None:
            member.processes.close()
    member.closing.close()
    until_s = time.monotonic() + _DRAIN_S
    for rank in member.spawned_at:
        stream = services.stream(member, task_id(rank))
        if not services.spool.closed(stream):
            services.spool.drain(stream, max(0.0, until_s - time.monotonic()))
    if member.reports is not None:
        member.reports.drain(max(0.0, until_s - time.monotonic()))
        member.reports.close()
    member.close_page()
    with acting_as(member.account):
        reach.remove_mark(member)
    member.pids.clear()
    if tail_of is None or tail_of not in member.spawned_at:
        return b""
    stream = services.stream(member, task_id(tail_of))
    begin = max(member.spawned_at[tail_of], services.spool.end(stream) - rendezvous.TAIL_BYTES)
    return services.spool.read(stream, begin, rendezvous.TAIL_BYTES)


def streams_of(member: Present) -> list[str]:
    """The spool's keys of all streams of its attempt on this node."""
    return [StreamName(member.key.job_id, member.key.epoch, stream).key for stream in member.scratch.streams()]
