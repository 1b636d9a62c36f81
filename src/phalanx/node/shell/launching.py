"""Start the tasks of a prepared member, and close it when nothing of it runs any more."""

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

_DRAIN_S: Final = 5.0  # for what stands in a pipe whose writers are dead: a moment, unless the disk hangs
_THAW_S: Final = 10.0  # the thaw is under way in another lane


def spawn(present: Present, order: SpawnTasks, shop: Workshop) -> Spawned | Unfit:
    """Make the page and start every rank; the first that does not start ends it."""
    role, start, grant = present.prepare.spec.role, order.start, present.grant
    assert present.processes is not None
    present.start = start
    present.running.wait(_THAW_S)
    present.spawned_ns = boottime_ns()
    present.oom_before, present.oom_before_here = evidence.oom_events(present.cgroup), evidence.oom_kills()
    present.pace = Pace(present.prepare.spec.collective_timeout_s, restarts=present.prepare.hangs)
    command: tuple[str, ...] | str = role.script or role.argv
    warm = warm_argv(command) if present.prepare.spec.warm else None
    try:
        _have_checkpoint(present, shop)
        with acting_as(present.account):
            why = reach.unseen(present)
        if why:
            present.publishes = False
            shop.note(present, why)
        present.make_page(deadline_ns=order.deadline_ns, job_deadline_ns=order.job_deadline_ns)
        view = shop.view(present)
        more: dict[str, str] = {}
        if present.prepare.spec.slurm:
            with acting_as(present.account):
                command, more = batch_command(present, start.port)
        for local_rank in range(grant.tasks):
            rank = grant.first_rank + local_rank
            variables, notes = environment.rank_environment(present.prepare, start, grant, local_rank, view)
            variables = dressed(present, variables)
            if local_rank == 0:
                present.environment = variables
                for text in notes:
                    shop.note(present, text)
            task = TaskSpec(
                task_id=task_id(rank),
                command=command,
                cwd=present.workdir,
                env={**variables, **more},
                warm=warm,
                account=present.account,
                bound=present.inside is None,
            )
            if present.inside is not None:
                task = present.inside.task(present.processes.key, task)
                if local_rank == 0:
                    present.environment = dict(task.env)
            present.pids[rank] = _spawn_one(present, rank, task, shop)
    except TaskNotStarted as error:
        return Unfit(key=present.key, why=str(error), charge=error.user_error, exit_code=error.exit_code)
    except Refusal as refusal:
        return Unfit(key=present.key, why=str(refusal), charge=refusal.charge, exit_code=refusal.exit_code)
    except (OSError, KeyError, CheckpointInvalid, Rejected) as error:
        return Unfit(key=present.key, why=f"starting failed on this node: {error}", charge=False)
    return Spawned(key=present.key)


def _have_checkpoint(present: Present, shop: Workshop) -> None:
    """Where nodes have checkpoints of their own: the one that node rank 0 chose, should this node have found another."""
    start = present.start
    if start is not None and start.resume not in (None, present.brought) and keeps_checkpoints(present.prepare):
        assert start.resume is not None
        bring(present, start.resume, shop.access, present.checkpoints)
        present.brought = start.resume


def _spawn_one(present: Present, rank: int, task: TaskSpec, shop: Workshop) -> int:
    assert present.processes is not None
    stream = shop.stream(present, task.task_id)
    present.spawned_at[rank] = shop.spool.end(stream)
    output = shop.pipe(present, stream)
    try:
        return present.processes.spawn(task, output)
    finally:
        os.close(output)


def wind_up(present: Present, tail_of: int | None, shop: Workshop) -> bytes:
    """Close the member's processes, drain what they printed and reported, and give back the tail asked for."""
    with present.containing:
        if present.processes is not None:
            present.processes.close()
    present.closing.close()
    until_s = time.monotonic() + _DRAIN_S
    for rank in present.spawned_at:
        stream = shop.stream(present, task_id(rank))
        if not shop.spool.closed(stream):
            shop.spool.drain(stream, max(0.0, until_s - time.monotonic()))
    if present.reports is not None:
        present.reports.drain(max(0.0, until_s - time.monotonic()))
        present.reports.close()
    present.close_page()
    with acting_as(present.account):
        reach.remove_mark(present)
    present.pids.clear()
    if tail_of is None or tail_of not in present.spawned_at:
        return b""
    stream = shop.stream(present, task_id(tail_of))
    begin = max(present.spawned_at[tail_of], shop.spool.end(stream) - rendezvous.TAIL_BYTES)
    return shop.spool.read(stream, begin, rendezvous.TAIL_BYTES)


def streams_of(present: Present) -> list[str]:
    """The spool's keys of everything its attempt has written here."""
    return [StreamName(present.key.job_id, present.key.epoch, stream).key for stream in present.scratch.streams()]
