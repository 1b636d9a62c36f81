"""The simulated processes of a node: they work, save, freeze and exit in virtual time, and report to their supervisor."""

from __future__ import annotations

from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.state.reports import CheckpointFailed, ProgressReported
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.job import PublishedCheckpoint
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.node.logic.actions import CallSleepHook
from phalanx.node.logic.events import (
    CheckpointReported,
    MemberEmptied,
    MemberKey,
    MemberKilled,
    ReadinessProbed,
    SleepHookAnswered,
    TaskEnded,
    TasksSpawned,
)
from phalanx.simulator.drill.behaviour import JobBehaviour, SimulatedTask
from phalanx.simulator.drill.protocols import NodeInterface

KILL_S = 0.02
SPAWN_S = 0.02
HOOK_LIMIT_S = 20.0
HOOK_RETRY_S = 0.5


class NodeProcesses:
    """All processes of a node."""

    def __init__(self, node: NodeInterface) -> None:
        self._node, self._cluster = node, node.cluster
        self.tasks: dict[tuple[MemberKey, int], SimulatedTask] = {}
        self.killed: set[MemberKey] = set()
        self.unkillable = False
        self._left_behind: dict[MemberKey, float] = {}  # CLOCK_BOOTTIME until which child processes live on

    def tasks_of(self, key: MemberKey) -> list[SimulatedTask]:
        """Return the tasks of one member."""
        return [task for task in self.tasks.values() if task.key == key]

    def is_empty(self, key: MemberKey) -> bool:
        """Return whether the member has no process left."""
        return not self.tasks_of(key) and self._left_behind.get(key, 0.0) <= self._cluster.clock.boot_s

    def probe(self, key: MemberKey) -> None:
        """Notify the supervisor if the member has no process left."""
        if self.is_empty(key):
            self._node.deliver_later(0.0, MemberEmptied(key=key))

    # ---- actions of the supervisor -------------------------------------------------------------------------------------

    def spawn(self, key: MemberKey, prepare: PrepareTasks, start: StartTasks) -> None:
        """Start every task of the member."""
        if key in self.killed or not self._node.alive:
            return
        if self._node.paused:
            self._cluster.call_after(0.5, lambda: self.spawn(key, prepare, start))
            return
        grant = prepare.allocation.grant_on(self._node.id)
        assert grant is not None
        behaviour = self._node.behaviour(prepare)
        if grant.node_rank == 0 and behaviour.unspawnable_generations > key.generation:
            self._node.report_spawn_failure(key)
            return
        begun = 0 if start.resume is None else start.resume.step
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks):
            odd = behaviour.ends(key, rank)
            if rank == 0 and behaviour.port_taken_generations > key.generation:
                odd = (0.1, 1, None)
            if rank == 0 and key.job_id in self._cluster.crash_looping:
                odd = (0.6, None, 11)
            left_s, code, signal = odd or (max(0.1, behaviour.run_s - begun), 0, None)
            task = SimulatedTask(
                key=key,
                rank=rank,
                device_milli=_device_milli(grant),
                work_left_s=left_s,
                code=code,
                signal=signal,
                work_done_s=float(begun),
                save_every_s=behaviour.save_every_s if rank == 0 else None,
                checkpoint_dir=prepare.checkpoint_dir,
            )
            self.tasks[key, rank] = task
            self.resume(task)
        self._cluster.processes_changed = True
        self._node.deliver(TasksSpawned(key=key))
        if start.service_port and grant.node_rank == 0 and behaviour.ready_s is not None:
            self._cluster.call_after(behaviour.ready_s, lambda: self._answers(key))

    def _answers(self, key: MemberKey) -> None:
        """The port of a replica answers, if its tasks still run."""
        if self.tasks_of(key) and self._node.alive:
            self._node.deliver(ReadinessProbed(key=key, ready=True))

    def call_sleep_hook(self, call: CallSleepHook) -> None:
        """Let the program free the devices of all its ranks, or use them again; it waits for ranks that do not execute."""
        behaviour = self._node.behaviour_of(call.key)
        world_size = next(
            one.prepare.allocation.world_size for one in self._node.logic.members() if one.key == call.key
        )
        self._hook_due(call, behaviour, world_size, behaviour.hook_s, HOOK_LIMIT_S)

    def _hook_due(
        self, call: CallSleepHook, behaviour: JobBehaviour, world_size: int, after_s: float, left_s: float
    ) -> None:
        self._cluster.call_after(after_s, lambda: self._hook_called(call, behaviour, world_size, left_s - after_s))

    def _hook_called(self, call: CallSleepHook, behaviour: JobBehaviour, world_size: int, left_s: float) -> None:
        if not self._node.alive or not self.tasks_of(call.key):
            return
        tasks = self._cluster.gang_tasks(call.key)
        if len(tasks) < world_size and left_s > 0.0:
            self._hook_due(call, behaviour, world_size, HOOK_RETRY_S, left_s)
            return
        fails = call.turn in behaviour.failing_hooks or len(tasks) < world_size
        for task in tasks:
            if call.sleep and not fails:
                task.device_milli, task.freed_milli = {}, task.freed_milli or task.device_milli
            elif not call.sleep:
                task.device_milli, task.freed_milli = task.freed_milli or task.device_milli, {}
        self._cluster.processes_changed = True
        why = "POST /hook answered 500" if fails else ""
        self._node.deliver(SleepHookAnswered(key=call.key, turn=call.turn, sleep=call.sleep, why=why))

    def terminate(self, key: MemberKey) -> None:
        """Send SIGTERM."""
        behaviour = self._node.behaviour_of(key)
        if behaviour.ignores_sigterm:
            return
        for task in self.tasks_of(key):
            self.suspend(task)
            if behaviour.saves_on_stop and task.rank == 0:
                self._save(task)
            task.work_left_s, task.code, task.signal, task.save_every_s = 0.1, None, 15, None
            self.resume(task)

    def freeze(self, key: MemberKey) -> None:
        """Freeze the tasks of the member."""
        for task in self.tasks_of(key):
            self.suspend(task)
            task.frozen = True
        self._cluster.processes_changed = True

    def thaw(self, key: MemberKey) -> None:
        """Thaw the tasks of the member."""
        for task in self.tasks_of(key):
            task.frozen = False
            self.resume(task)
        self._cluster.processes_changed = True

    def kill(self, key: MemberKey) -> None:
        """Send SIGKILL and notify the supervisor."""
        if not self._node.alive:
            return
        if self._node.paused:
            self._cluster.call_after(0.2, lambda: self.kill(key))
            return
        if self.unkillable and self.tasks_of(key):
            self.freeze(key)  # a process that survives SIGKILL hangs in the kernel and executes no code of its own
            self._node.deliver(MemberKilled(key=key, leftover=(4711,)))
            return
        self._left_behind.pop(key, None)
        for task in self.tasks_of(key):
            self._end(task, None, 9)
        self._node.deliver(MemberKilled(key=key))

    def break_keeper(self, key: MemberKey) -> None:
        """Kill the keeper with its tasks; their exit codes are lost."""
        for task in self.tasks_of(key):
            self._end(task, None, None, lost=True)
        self._node.deliver_later(0.01, MemberEmptied(key=key))

    def suspend_all(self) -> None:
        """Stop all tasks with the node."""
        for task in self.tasks.values():
            self.suspend(task)
        self._cluster.processes_changed = True

    def resume_all(self) -> None:
        """Resume all tasks with the node."""
        for task in list(self.tasks.values()):
            self.resume(task)
        self._cluster.processes_changed = True

    def clear(self) -> None:
        """Remove all tasks without any report."""
        for task in self.tasks.values():
            task.ended = True
            task.timer_number += 1
        self.tasks.clear()
        self._cluster.processes_changed = True

    # ---- execution -----------------------------------------------------------------------------------------------------

    def resume(self, task: SimulatedTask) -> None:
        """Run until the next save or the end."""
        node = self._node
        if task.ended or task.frozen or node.paused or not node.alive or task.started_s is not None:
            return
        task.started_s = self._cluster.clock.boot_s
        task.timer_number += 1
        number = task.timer_number
        next_s = task.work_left_s if task.save_every_s is None else min(task.work_left_s, task.save_every_s)
        self._cluster.call_after(next_s, lambda: self._due(task) if task.timer_number == number else None)

    def suspend(self, task: SimulatedTask) -> None:
        """Stop running; completed work counts."""
        if task.started_s is not None:
            worked_s = self._cluster.clock.boot_s - task.started_s
            task.work_left_s = max(0.0, task.work_left_s - worked_s)
            task.work_done_s += worked_s
            task.started_s = None
            task.timer_number += 1

    def _due(self, task: SimulatedTask) -> None:
        if not self._node.alive:
            return
        self.suspend(task)
        if task.work_left_s > 1e-6:
            self._save(task)
            self.resume(task)
            return
        self._end(task, task.code, task.signal)
        if not self.tasks_of(task.key):
            leaves_s = self._node.behaviour_of(task.key).children_live_s
            self._left_behind[task.key] = self._cluster.clock.boot_s + leaves_s
            self._cluster.call_after(leaves_s + 0.01, lambda: self._emptied(task.key))

    def _emptied(self, key: MemberKey) -> None:
        if self.is_empty(key):
            self._node.deliver(MemberEmptied(key=key))

    def _save(self, task: SimulatedTask) -> None:
        step, key = round(task.work_done_s), task.key
        task.saved += 1
        if task.saved == self._node.behaviour_of(key).failing_save:
            self._node.send_step_report(
                CheckpointFailed(
                    job_id=key.job_id, epoch=key.epoch, generation=key.generation, step=step, error="no space"
                )
            )
            return
        path = f"{task.checkpoint_dir}/step-{step:08d}"
        self._cluster.deleted_checkpoints.discard(path)
        self._node.send_step_report(
            ProgressReported(job_id=key.job_id, epoch=key.epoch, generation=key.generation, step=step)
        )
        self._node.deliver(
            CheckpointReported(
                key=key,
                step=step,
                path=path,
                digest=f"{path}@{key.generation}",
                size_bytes=1,
                stall_s=0.0,
                write_s=0.0,
                at_s=self._node.wall_s,
            )
        )

    def _end(self, task: SimulatedTask, code: int | None, signal: int | None, *, lost: bool = False) -> None:
        task.ended = True
        task.timer_number += 1
        self.tasks.pop((task.key, task.rank), None)
        self._cluster.processes_changed = True
        self._node.deliver(
            TaskEnded(
                key=task.key,
                rank=task.rank,
                code=code,
                signal=signal,
                ended_ns=self._cluster.clock.ns,
                at_s=self._node.wall_s,
                status_unknown=lost,
                evidence=None if code == 0 else self._node.behaviour_of(task.key).evidence(task.key, task.rank),
            )
        )


def newest_valid(checkpoints: tuple[PublishedCheckpoint, ...], corrupt: set[str]) -> PublishedCheckpoint | None:
    """Return the newest valid checkpoint, from which a job must resume."""
    return next((one for one in reversed(checkpoints) if one.digest not in corrupt), None)


def _device_milli(grant: NodeGrant) -> dict[int, int]:
    """Return the thousandths that a job holds of each device of the node."""
    share = grant.share
    return {index: MILLI_PER_DEVICE if share is None else share.milli_on(index) for index in grant.devices}
