"""The simulated processes of a node: they work, save, freeze and exit in virtual time, and report to their supervisor."""

from __future__ import annotations

from phalanx.core.state.commands import Prepare, StartTasks
from phalanx.core.state.events import CheckpointFailed, Progressed
from phalanx.core.work.job import Resume
from phalanx.node.logic.happenings import CheckpointReported, Emptied, Killed, MemberKey, Spawned, TaskEnded
from phalanx.simulator.drill.behaviour import Task
from phalanx.simulator.drill.stage import StagedNode

KILL_S = 0.02
SPAWN_S = 0.02


class Tasks:
    """All processes of a node."""

    def __init__(self, node: StagedNode) -> None:
        self._node, self._cluster = node, node.cluster
        self.all: dict[tuple[MemberKey, int], Task] = {}
        self.killed: set[MemberKey] = set()
        self.unkillable = False
        self._left_behind: dict[MemberKey, float] = {}  # CLOCK_BOOTTIME until which child processes live on

    def of(self, key: MemberKey) -> list[Task]:
        """Return the tasks of one member."""
        return [task for task in self.all.values() if task.key == key]

    def empty(self, key: MemberKey) -> bool:
        """Return whether the member has no process left."""
        return not self.of(key) and self._left_behind.get(key, 0.0) <= self._cluster.clock.boot_s

    def probe(self, key: MemberKey) -> None:
        """Notify the supervisor if the member has no process left."""
        if self.empty(key):
            self._node.later(0.0, Emptied(key=key))

    # ---- actions of the supervisor -------------------------------------------------------------------------------------

    def spawn(self, key: MemberKey, prepare: Prepare, start: StartTasks) -> None:
        """Start every task of the member."""
        if key in self.killed or not self._node.alive:
            return
        if self._node.paused:
            self._cluster.after(0.5, lambda: self.spawn(key, prepare, start))
            return
        grant = prepare.allocation.on(self._node.id)
        assert grant is not None
        behaviour = self._node.behaviour(prepare)
        if grant.node_rank == 0 and behaviour.unspawnable > key.generation:
            self._node.cannot_spawn(key)
            return
        begun = 0 if start.resume is None else start.resume.step
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks):
            odd = behaviour.ends(key, rank)
            if rank == 0 and behaviour.port_taken > key.generation:
                odd = (0.1, 1, None)
            if rank == 0 and key.job_id in self._cluster.cursed:
                odd = (0.6, None, 11)
            left_s, code, signal = odd or (max(0.1, behaviour.run_s - begun), 0, None)
            task = Task(
                key=key,
                rank=rank,
                devices=grant.devices,
                left_s=left_s,
                code=code,
                signal=signal,
                done_s=float(begun),
                save_every_s=behaviour.save_every_s if rank == 0 else None,
                checkpoint_dir=prepare.checkpoint_dir,
            )
            self.all[key, rank] = task
            self.go(task)
        self._cluster.touched = True
        self._node.hear(Spawned(key=key))

    def terminate(self, key: MemberKey) -> None:
        """Send SIGTERM."""
        behaviour = self._node.behaviour_of(key)
        if behaviour.stubborn:
            return
        for task in self.of(key):
            self.halt(task)
            if behaviour.saves and task.rank == 0:
                self._save(task)
            task.left_s, task.code, task.signal, task.save_every_s = 0.1, None, 15, None
            self.go(task)

    def freeze(self, key: MemberKey) -> None:
        """Freeze the tasks of the member."""
        for task in self.of(key):
            self.halt(task)
            task.frozen = True
        self._cluster.touched = True

    def thaw(self, key: MemberKey) -> None:
        """Thaw the tasks of the member."""
        for task in self.of(key):
            task.frozen = False
            self.go(task)
        self._cluster.touched = True

    def kill(self, key: MemberKey) -> None:
        """Send SIGKILL and notify the supervisor."""
        if not self._node.alive:
            return
        if self._node.paused:
            self._cluster.after(0.2, lambda: self.kill(key))
            return
        if self.unkillable and self.of(key):
            self.freeze(key)  # a process that survives SIGKILL hangs in the kernel and executes no code of its own
            self._node.hear(Killed(key=key, leftover=(4711,)))
            return
        self._left_behind.pop(key, None)
        for task in self.of(key):
            self._end(task, None, 9)
        self._node.hear(Killed(key=key))

    def break_keeper(self, key: MemberKey) -> None:
        """Kill the keeper with its tasks; their exit codes are lost."""
        for task in self.of(key):
            self._end(task, None, None, lost=True)
        self._node.later(0.01, Emptied(key=key))

    def stop_all(self) -> None:
        """Stop all tasks with the node."""
        for task in self.all.values():
            self.halt(task)
        self._cluster.touched = True

    def go_all(self) -> None:
        """Resume all tasks with the node."""
        for task in list(self.all.values()):
            self.go(task)
        self._cluster.touched = True

    def clear(self) -> None:
        """Remove all tasks without any report."""
        for task in self.all.values():
            task.ended = True
            task.token += 1
        self.all.clear()
        self._cluster.touched = True

    # ---- execution -----------------------------------------------------------------------------------------------------

    def go(self, task: Task) -> None:
        """Run until the next save or the end."""
        node = self._node
        if task.ended or task.frozen or node.paused or not node.alive or task.since_s is not None:
            return
        task.since_s = self._cluster.clock.boot_s
        task.token += 1
        number = task.token
        next_s = task.left_s if task.save_every_s is None else min(task.left_s, task.save_every_s)
        self._cluster.after(next_s, lambda: self._due(task) if task.token == number else None)

    def halt(self, task: Task) -> None:
        """Stop running; completed work counts."""
        if task.since_s is not None:
            worked_s = self._cluster.clock.boot_s - task.since_s
            task.left_s = max(0.0, task.left_s - worked_s)
            task.done_s += worked_s
            task.since_s = None
            task.token += 1

    def _due(self, task: Task) -> None:
        if not self._node.alive:
            return
        self.halt(task)
        if task.left_s > 1e-6:
            self._save(task)
            self.go(task)
            return
        self._end(task, task.code, task.signal)
        if not self.of(task.key):
            leaves_s = self._node.behaviour_of(task.key).leaves_s
            self._left_behind[task.key] = self._cluster.clock.boot_s + leaves_s
            self._cluster.after(leaves_s + 0.01, lambda: self._emptied(task.key))

    def _emptied(self, key: MemberKey) -> None:
        if self.empty(key):
            self._node.hear(Emptied(key=key))

    def _save(self, task: Task) -> None:
        step, key = round(task.done_s), task.key
        task.saved += 1
        if task.saved == self._node.behaviour_of(key).bad_save:
            self._node.put_steps(
                CheckpointFailed(
                    job_id=key.job_id, epoch=key.epoch, generation=key.generation, step=step, error="no space"
                )
            )
            return
        path = f"{task.checkpoint_dir}/step-{step:08d}"
        self._cluster.deleted.discard(path)
        self._node.put_steps(Progressed(job_id=key.job_id, epoch=key.epoch, generation=key.generation, step=step))
        self._node.hear(
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

    def _end(self, task: Task, code: int | None, signal: int | None, *, lost: bool = False) -> None:
        task.ended = True
        task.token += 1
        self.all.pop((task.key, task.rank), None)
        self._cluster.touched = True
        self._node.hear(
            TaskEnded(
                key=task.key,
                rank=task.rank,
                code=code,
                signal=signal,
                ended_ns=self._cluster.clock.ns,
                at_s=self._node.wall_s,
                lost=lost,
                evidence=None if code == 0 else self._node.behaviour_of(task.key).evidence(task.key, task.rank),
            )
        )


def newest_whole(checkpoints: tuple[Resume, ...], corrupt: set[str]) -> Resume | None:
    """Return the newest valid checkpoint, from which a job must resume."""
    return next((one for one in reversed(checkpoints) if one.digest not in corrupt), None)
