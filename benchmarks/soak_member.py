"""Supervisors of the soak test, many in one process: the real logic and protocol, with tasks that are only timers.

`python -m benchmarks.soak_member`, controlled by lines of JSON on standard input. The first has the address of the head and the names of the
nodes; each further one is an order: die, silence, spans. The command of a job defines its tasks: `soak SECONDS EXIT_CODE`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from benchmarks.soak_channels import SoakChannels
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.node.logic import actions
from phalanx.node.logic.events import (
    FreezeFinished,
    MemberEmptied,
    MemberKey,
    MemberKilled,
    MemberPrepared,
    OutputDrained,
    SupervisorEvent,
    TaskEnded,
    TasksSpawned,
)
from phalanx.node.logic.supervisor import Supervisor
from phalanx.wire import supervisor as wire
from phalanx.wire.rank import boottime_ns

Span = tuple[str, int, str, int, int, int, int]
"""(node, device or rank, job, epoch, generation, begin_ns, end_ns)."""
STEP_S: Final = 10.0  # of rank 0; with one step per second, reports of 500 jobs would dominate the load


@dataclass(slots=True)
class TimerTask:
    """A task that only takes time. `left_s` is its remaining time, which does not pass while it is frozen."""

    key: MemberKey
    rank: int
    devices: tuple[int, ...]
    left_s: float
    code: int | None
    begun_ns: int
    signal: int | None = None
    timer: asyncio.TimerHandle | None = None
    since_s: float = 0.0
    ran_ns: int = 0


@dataclass
class SoakNode(SoakChannels):
    """One node and its successive supervisors.

    Attributes:
        held: (node, device, job, epoch, generation, begin_ns, end_ns) of its tasks from start to end.
        ran: the same for the times in which they were not frozen, with the rank instead of the device.
        life: number of the supervisor process.
    """

    held: list[Span] = field(default_factory=list)
    ran: list[Span] = field(default_factory=list)
    life: int = 0

    def begin(self) -> None:
        """Start a new supervisor."""
        self.life += 1
        self.logic = Supervisor(self.name)
        self.tasks: dict[tuple[MemberKey, int], TimerTask] = {}
        self.killed: set[MemberKey] = set()
        self.ends: dict[tuple[str, int, str], int] = {}
        self.seq = 0
        self.wake: asyncio.TimerHandle | None = None
        self.open(SupervisorId(f"{self.name}-life{self.life}"))

    def die(self) -> None:
        """Power off: end all tasks without any message."""
        self.excluded()
        self.life += 1  # disables all timers of this supervisor
        for each in list(self.tasks.values()):
            self._over(each)
        if self.wake is not None:
            self.wake.cancel()

    # ---- the step and its actions -------------------------------------------------------------------------------------

    def handle(self, *happenings: SupervisorEvent) -> None:
        """Pass events to the logic, and perform its actions."""
        out = self.logic.step(boottime_ns(), happenings, unix_s=time.time())
        for action in out.actions:
            self._perform(action)
        if self.wake is not None:
            self.wake.cancel()
            self.wake = None
        if out.wake_ns is not None:
            self.wake = self._after(max(0.0, (out.wake_ns - boottime_ns()) / 1e9), self.handle)

    def _after(self, delay_s: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        life = self.life
        return asyncio.get_running_loop().call_later(
            delay_s, lambda: callback(*arguments) if self.life == life else None
        )

    def _perform(self, action: actions.SupervisorAction) -> None:
        match action:
            case actions.PrepareMember(key=key, prepare=prepare):
                self.killed.discard(key)
                self._after(0.05, self._prepared, key, prepare)
            case actions.SpawnTasks(key=key, prepare=prepare, start=start):
                self._after(0.02, self._spawn, key, prepare, start)
            case actions.SendSigterm(key=key):
                for task in self._of(key):
                    self._halt(task)
                    task.left_s, task.code, task.signal = 0.1, None, 15
                    self._go(task)
            case actions.FreezeMember(key=key):
                for task in self._of(key):
                    self._halt(task)
                self._after(0.0, self.handle, FreezeFinished(key=key, frozen=True))
            case actions.ThawMember(key=key):
                for task in self._of(key):
                    self._go(task)
            case actions.KillMember(key=key):
                self.killed.add(key)
                self._after(0.02, self._kill, key)
            case actions.CheckEmpty(key=key):
                if not self._of(key):
                    self._after(0.0, self.handle, MemberEmptied(key=key))
            case actions.DrainOutput(key=key):
                self._after(0.01, self.handle, OutputDrained(key=key))
            case actions.SendEvent(event=event):
                self.seq += 1
                self.unsent.append((self.seq, event))
                self.some.set()
            case actions.PublishMembers(members=members):
                self.carried = members
            case actions.RenewLease():
                self.renew_now.set()
            case (
                actions.ExitSupervisor()
                | actions.CallSleepHook()
                | actions.SetPowerLimits()
                | actions.DumpStacks()
                | actions.UpdateLeasePage()
                | actions.RemoveScratch()
                | actions.AppendNote()
                | actions.RemoveCheckpoints()
            ):
                pass

    def _of(self, key: MemberKey) -> list[TimerTask]:
        return [task for task in self.tasks.values() if task.key == key]

    def _prepared(self, key: MemberKey, prepare: PrepareTasks) -> None:
        grant = prepare.allocation.grant_on(self.name)
        if key in self.killed or grant is None:
            return
        port = 20_000 + key.generation if grant.node_rank == 0 else None
        self.handle(MemberPrepared(key=key, port=port, resume=next(iter(prepare.candidates), None)))

    def _spawn(self, key: MemberKey, prepare: PrepareTasks, _start: StartTasks) -> None:
        grant = prepare.allocation.grant_on(self.name)
        if key in self.killed or grant is None:
            return
        words = prepare.spec.role.argv
        for rank in range(grant.first_rank, grant.first_rank + grant.tasks):
            each = len(grant.devices) // grant.tasks
            devices = grant.devices[(rank - grant.first_rank) * each :][:each]
            task = TimerTask(
                key=key, rank=rank, devices=devices, left_s=float(words[1]), code=int(words[2]), begun_ns=boottime_ns()
            )
            self.tasks[key, rank] = task
            self._ship(key, f"rank-{rank}", f"begin {key.job_id} {key.epoch} {key.generation} {rank}\n")
            self._go(task)
        self.handle(TasksSpawned(key=key))
        if grant.node_rank == 0:
            self._step(key, 1)

    def _step(self, key: MemberKey, step: int) -> None:
        """Report a step of rank 0, and schedule the next one."""
        if not self._of(key):
            return
        now_ns = boottime_ns()
        report = {
            "k": "step",
            "rank": 0,
            "epoch": key.epoch,
            "generation": key.generation,
            "step": step,
            "begin_ns": now_ns - 10**9,
            "end_ns": now_ns,
            "at_s": time.time(),
            "loss": 1.0 / step,
        }
        self._ship(key, "steps-0", json.dumps(report) + "\n")
        self._after(STEP_S, self._step, key, step + 1)

    def _go(self, task: TimerTask) -> None:
        if task.timer is None and (task.key, task.rank) in self.tasks:
            task.since_s, task.ran_ns = time.monotonic(), boottime_ns()
            task.timer = self._after(max(0.0, task.left_s), self._end, task)

    def _halt(self, task: TimerTask) -> None:
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
            task.left_s -= time.monotonic() - task.since_s
            self.ran.append((self.name, task.rank, *task.key, task.ran_ns, boottime_ns()))

    def _over(self, task: TimerTask) -> None:
        self._halt(task)
        del self.tasks[task.key, task.rank]
        now_ns = boottime_ns()
        for device in task.devices:
            self.held.append((self.name, device, *task.key, task.begun_ns, now_ns))

    def _end(self, task: TimerTask, *, killed: bool = False) -> None:
        if (task.key, task.rank) not in self.tasks:
            return
        self._over(task)
        if killed:
            task.code, task.signal = None, 9
        self._ship(
            task.key, f"rank-{task.rank}", f"end {task.key.job_id} {task.key.epoch} {task.key.generation} {task.rank}\n"
        )
        self.handle(
            TaskEnded(
                key=task.key,
                rank=task.rank,
                code=task.code,
                signal=task.signal,
                ended_ns=boottime_ns(),
                at_s=time.time(),
            )
        )
        if not killed and not self._of(task.key):
            self._after(0.01, self.handle, MemberEmptied(key=task.key))

    def _kill(self, key: MemberKey) -> None:
        for task in self._of(key):
            self._end(task, killed=True)
        self.handle(MemberKilled(key=key))

    def _ship(self, key: MemberKey, stream: str, text: str) -> None:
        place = (key.job_id, key.epoch, stream)
        offset = self.ends.get(place, 0)
        self.chunks.append(
            wire.StreamChunk(job_id=key.job_id, epoch=key.epoch, stream=stream, offset=offset, data=text.encode())
        )
        self.ends[place] = offset + len(text)
        self.some.set()


async def serve(order: dict[str, Any]) -> None:
    """Start all supervisors, then follow orders until standard input ends."""
    held: list[Any] = []
    ran: list[Any] = []
    refused: list[str] = []
    members = {
        name: SoakNode(name=NodeId(name), port=order["port"], token=token, held=held, ran=ran, refused=refused)
        for name, token in order["tokens"].items()
    }
    for member in members.values():
        member.begin()
        await asyncio.sleep(0.01)
    while not all(member.hello_count for member in members.values()):  # noqa: ASYNC110  # once, at the start
        await asyncio.sleep(0.1)
    _reply({"up": len(members)})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        match request["do"]:
            case "die":
                member = members[request["node"]]
                member.die()
                loop.call_later(request["seconds"], member.begin)
                _reply({"died": member.name})
            case "silence":
                member = members[request["node"]]
                member.link.clear()
                loop.call_later(request["seconds"], member.link.set)
                _reply({"silent": member.name})
            case "spans":
                live = [(task.key.job_id, member.name) for member in members.values() for task in member.tasks.values()]
                for member in members.values():
                    for task in list(member.tasks.values()):
                        member._over(task)  # noqa: SLF001  # the test has ended
                _reply({"held": held, "ran": ran, "refused": refused, "live": live})
            case unknown:
                raise ValueError(f"unknown order: {unknown}")


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve(json.loads(sys.stdin.readline())))
