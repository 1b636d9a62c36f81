"""Starts the tasks of a prepared member, and closes it when none of its processes is left."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Final

from phalanx.node.diagnosis import failure_evidence
from phalanx.node.files.job_accounts import acting_as
from phalanx.node.files.preparation_error import PreparationFailed
from phalanx.node.head_link.head_connection import RequestRejected
from phalanx.node.logic.actions import SpawnTasks
from phalanx.node.logic.events import MemberStartFailed, TasksSpawned
from phalanx.node.logic.hang_detector import HangDetector
from phalanx.node.logic.local_copies import has_local_checkpoints
from phalanx.node.logic.step_containers import runs_images
from phalanx.node.logic.variables import environment, rendezvous
from phalanx.node.logic.variables.mpi_variables import needs_agent
from phalanx.node.logic.warm_start import parse_warm_command
from phalanx.node.member.member_runtime import MemberRuntime, rank_task_id
from phalanx.node.mpi.mpi_rank import mpi_command
from phalanx.node.prepare import container_images, path_probe
from phalanx.node.prepare.node_services import NodeServices
from phalanx.node.prepare.software_environment import dressed
from phalanx.node.processes.attempt_processes import TaskNotStarted, TaskSpec
from phalanx.node.terminal.terminal_rank import on_terminal
from phalanx.node.transfer.checkpoint_download import download_checkpoint
from phalanx.wire.manifest import CheckpointInvalid
from phalanx.wire.rank import boottime_ns

_DRAIN_S: Final = 5.0  # for output left in a pipe whose writers are dead: milliseconds, unless the disk hangs
_THAW_S: Final = 10.0  # the thaw is in progress on another thread


def start_member_tasks(
    member: MemberRuntime, order: SpawnTasks, services: NodeServices
) -> TasksSpawned | MemberStartFailed:
    """Create the lease page and start every rank; stops at the first that does not start."""
    role, start, grant = member.prepare.spec.role, order.start, member.grant
    assert member.processes is not None
    member.start = start
    if start.addresses:
        known = zip(start.addresses, member.prepare.addresses, strict=True)
        member.prepare = replace(member.prepare, addresses=tuple(own or listed for own, listed in known))
    member.not_frozen.wait(_THAW_S)
    member.spawned_ns = boottime_ns()
    member.oom_kills_before, member.machine_oom_kills_before = (
        member.processes.oom_kills(),
        failure_evidence.oom_kills(),
    )
    member.pace = HangDetector(member.prepare.spec.collective_timeout_s, restarts=member.prepare.hangs)
    command: tuple[str, ...] | str = role.script or role.argv
    warm = parse_warm_command(command) if member.prepare.spec.warm and not member.prepare.spec.terminal else None
    try:
        _fetch_chosen_checkpoint(member, services)
        with acting_as(member.account):
            why = path_probe.find_missing_markers(member)
        if why:
            member.may_publish = False
            services.note(member, why)
        member.make_page(deadline_ns=order.deadline_ns, job_deadline_ns=order.job_deadline_ns)
        view = services.node_view(member)
        extra: dict[str, str] = {}
        if member.prepare.spec.slurm:
            from phalanx.node.slurm_compat.batch_rank import batch_command  # for these jobs alone

            containers = container_images.offer_step_containers(
                member,
                base=environment.inheritable_environment(services.base_environment(member)),
                gpus=services.image_gpus(member),
            )
            with acting_as(member.account):
                command, extra = batch_command(member, start.port, containers)
        elif needs_agent(member.prepare):
            with acting_as(member.account):
                command, extra = mpi_command(member, start.port)
        for local_rank in range(grant.tasks):
            rank = grant.first_rank + local_rank
            variables, notes = environment.rank_environment(member.prepare, start, grant, local_rank, view)
            variables = dressed(member, variables)
            if local_rank == 0:
                member.environment = variables
                for text in notes:
                    services.note(member, text)
            task = TaskSpec(
                task_id=rank_task_id(rank),
                command=command,
                cwd=member.workdir,
                env={**variables, **extra},
                warm=warm,
                account=member.account,
                no_new_privileges=not runs_images(member.prepare.spec),
            )
            if member.container is not None:
                task = member.container.wrap_task(member.processes.key, task)
                if local_rank == 0:
                    member.environment = dict(task.env)
            if member.prepare.spec.terminal and rank == 0:
                task = on_terminal(task, member.scratch.path)
            member.pids[rank] = _spawn_one(member, rank, task, services)
    except TaskNotStarted as error:
        return MemberStartFailed(key=member.key, why=str(error), charge=error.user_error, exit_code=error.exit_code)
    except PreparationFailed as refusal:
        return MemberStartFailed(key=member.key, why=str(refusal), charge=refusal.charge, exit_code=refusal.exit_code)
    except (OSError, KeyError, CheckpointInvalid, RequestRejected) as error:
        return MemberStartFailed(key=member.key, why=f"starting failed on this node: {error}", charge=False)
    return TasksSpawned(key=member.key)


def _fetch_chosen_checkpoint(member: MemberRuntime, services: NodeServices) -> None:
    """If each node stores its own checkpoints: download the one that node rank 0 chose, if this node found another."""
    start = member.start
    if (
        start is not None
        and start.resume not in (None, member.local_checkpoint)
        and has_local_checkpoints(member.prepare)
    ):
        assert start.resume is not None
        download_checkpoint(member, start.resume, services.access, member.checkpoints)
        member.local_checkpoint = start.resume


def _spawn_one(member: MemberRuntime, rank: int, task: TaskSpec, services: NodeServices) -> int:
    assert member.processes is not None
    stream = services.stream_key(member, task.task_id)
    member.stream_starts[rank] = services.spool.length(stream)
    output = services.open_pipe(member, stream)
    try:
        return member.processes.spawn(task, output)
    finally:
        os.close(output)


def close_member(member: MemberRuntime, tail_of: int | None, services: NodeServices) -> bytes:
    """Close the member's processes, drain their output and reports, and return the requested tail of output."""
    with member.containment_lock:
        if member.processes is not None:
            member.processes.close()
    services.hooks.after_job(member)
    member.cleanup.close()
    until_s = time.monotonic() + _DRAIN_S
    for rank in member.stream_starts:
        stream = services.stream_key(member, rank_task_id(rank))
        if not services.spool.closed(stream):
            services.spool.drain(stream, max(0.0, until_s - time.monotonic()))
    if member.reports is not None:
        member.reports.drain(max(0.0, until_s - time.monotonic()))
        member.reports.close()
    member.close_page()
    with acting_as(member.account):
        path_probe.remove_marker(member)
    member.pids.clear()
    if tail_of is None or tail_of not in member.stream_starts:
        return b""
    stream = services.stream_key(member, rank_task_id(tail_of))
    return services.spool.tail(stream, rendezvous.TAIL_BYTES, member.stream_starts[tail_of])
