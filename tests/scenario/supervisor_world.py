"""A node in virtual time around the real `Supervisor`: processes are sets of ranks, hands are two queues a test lets go step by step."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.state import commands, reports
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.spec import JobSpec, Role
from phalanx.node.logic import actions as act
from phalanx.node.logic import events as hap
from phalanx.node.logic.events import MemberKey
from phalanx.node.logic.lease import NS_PER_S
from phalanx.node.logic.supervisor import Supervisor

NODE = NodeId("n0")
LEASE_S = 6.0
TASKS = 2


def key_of(job="1", epoch=1, generation=0) -> MemberKey:
    return MemberKey(JobId(job), Epoch(epoch), Generation(generation))


def prepare(job="1", epoch=1, generation=0, *, tasks=TASKS, grace_s=5.0, collective_timeout_s=10.0, **given):
    spec = JobSpec(
        name="j", role=Role(argv=("train",)), workdir="/w", grace_s=grace_s, collective_timeout_s=collective_timeout_s
    )
    grant = NodeGrant(
        node_id=NODE, node_rank=0, devices=tuple(range(tasks)), cpus=1, memory_bytes=0, tasks=tasks, first_rank=0
    )
    return commands.PrepareTasks(
        **{
            "node_id": NODE,
            "job_id": JobId(job),
            "epoch": Epoch(epoch),
            "generation": Generation(generation),
            "spec": spec,
            "allocation": Allocation(grants=(grant,)),
            "addresses": ("10.0.0.1",),
            "candidates": (),
            "checkpoint_dir": "/c",
            "output_dir": "/o",
            "deadline_s": None,
            "restarts": 0,
            "mtbf_s": 1e6,
            **given,
        }
    )


def start(job="1", epoch=1, generation=0, port=29500):
    return commands.StartTasks(
        node_id=NODE, job_id=JobId(job), epoch=Epoch(epoch), generation=Generation(generation), port=port, resume=None
    )


def stop(job="1", epoch=1, generation=0, *, reason="cancelled", grace_s=5.0):
    return commands.StopTasks(
        node_id=NODE,
        job_id=JobId(job),
        epoch=Epoch(epoch),
        generation=Generation(generation),
        reason=reason,
        grace_s=grace_s,
    )


def sleep_hook(job="1", epoch=1, generation=0, *, turn=1, sleep=True):
    return commands.RunSleepHook(
        node_id=NODE, job_id=JobId(job), epoch=Epoch(epoch), generation=Generation(generation), turn=turn, sleep=sleep
    )


def forget(job="1", epoch=1):
    return commands.CleanUpAttempt(node_id=NODE, job_id=JobId(job), epoch=Epoch(epoch))


class World:
    """See the module. `auto` performs work at once; otherwise `work` waits for `do_work`. Fence actions are performed at once.

    Attributes:
        alive: ranks that run, by member (99 is a daemon that a task left).
        frozen: members that stand still.
        opened: members whose tasks were ever started, in order.
        deaf: whether ranks ignore SIGTERM.
    """

    def __init__(self, *, auto=True, leased=True, deaf=True, leaves_as=None) -> None:
        self.supervisor = Supervisor(NODE, leaves_as)
        self.now_ns = 1000 * NS_PER_S
        self.auto, self.deaf = auto, deaf
        self.alive: dict[MemberKey, set[int]] = defaultdict(set)
        self.frozen: set[MemberKey] = set()
        self.cancelled: set[MemberKey] = set()
        self.opened: list[MemberKey] = []
        self.started_after_stopped: list[MemberKey] = []
        self.sent: list[commands.Command] = []
        self.work: deque[act.SupervisorAction] = deque()
        self.inbox: deque[hap.SupervisorEvent] = deque()
        self.reports: list[reports.Report] = []
        self.actions: list[act.SupervisorAction] = []
        self.pages: dict[MemberKey, dict] = defaultdict(dict)
        self.carried: tuple[MemberKey, ...] = ()
        self.clean: list[tuple[JobId, Epoch]] = []
        self.tail = b""
        self.unkillable: set[int] = set()
        self.unfreezable = False
        self.exited = False
        self.wake_ns: int | None = None
        if leased:
            self.renew()

    # ---- what a test does

    def tell(self, *told) -> World:
        for command in told:
            self.sent.append(command)
            self.hear(hap.CommandReceived(command=command))
        return self

    def hear(self, *happenings) -> World:
        self.inbox.extend(happenings)
        self._settle()
        return self

    def renew(self, *, lease_s=LEASE_S, sent_ago_s=0.0, superseded=(), asked=None) -> World:
        asked = {(key.job_id, key.epoch) for key in self.carried} if asked is None else asked
        return self.hear(
            hap.LeaseRenewed(
                sent_ns=self.now_ns - int(sent_ago_s * NS_PER_S),
                lease_s=lease_s,
                requested=frozenset(asked),
                superseded=frozenset(superseded),
            )
        )

    def wait(self, seconds: float, *, renewing=False) -> World:
        """Let time pass, stepping whenever the supervisor wants to; `renewing` every second."""
        until_ns = self.now_ns + int(seconds * NS_PER_S)
        while self.now_ns < until_ns:
            limit_ns = min(until_ns, self.now_ns + NS_PER_S) if renewing else until_ns
            self.now_ns = limit_ns if self.wake_ns is None else max(self.now_ns + 1, min(limit_ns, self.wake_ns))
            if renewing:
                self.renew()
            self._settle()
        return self

    def end(
        self, rank: int, *, code: int | None = 0, signal: int | None = None, key: MemberKey | None = None, leaving=()
    ) -> World:
        """A task ends by itself, perhaps leaving daemons."""
        self._end(key or key_of(), rank, code=code, signal=signal, leaving=leaving)
        self._settle()
        return self

    def do_work(self) -> World:
        """The next piece of work is done."""
        if self.work:
            self._perform_work(self.work.popleft())
            self._settle()
        return self

    def running(self, job="1", epoch=1, generation=0, **given) -> World:
        """Bring a member to RUNNING."""
        return self.tell(prepare(job, epoch, generation, **given), start(job, epoch, generation))

    # ---- what a test asks

    def said(self, kind, job="1", generation=None):
        return [
            r for r in self.reports if isinstance(r, kind) and r.job_id == job and generation in (None, r.generation)
        ]

    def kinds(self) -> list[str]:
        return [type(report).__name__ for report in self.reports]

    def did(self, kind) -> list:
        return [action for action in self.actions if isinstance(action, kind)]

    def living(self, job="1") -> list[MemberKey]:
        return [key for key, ranks in self.alive.items() if ranks and key.job_id == job]

    # ---- the machinery

    def _settle(self) -> None:
        while True:
            inbox, self.inbox = list(self.inbox), deque()
            outbox = self.supervisor.step(self.now_ns, inbox, unix_s=self.now_ns / NS_PER_S)
            self.wake_ns = outbox.wake_ns
            for action in outbox.actions:
                self.actions.append(action)
                self._perform(action)
            if self.auto:
                while self.work:
                    self._perform_work(self.work.popleft())
            if not self.inbox:
                return

    def _perform(self, action: act.SupervisorAction) -> None:
        match action:
            case act.PrepareMember() | act.SpawnTasks() | act.DrainOutput() | act.CallSleepHook():
                self.work.append(action)
            case act.UpdateLeasePage(key=key):
                page = self.pages[key]
                page |= {
                    name: getattr(action, name)
                    for name in ("deadline_ns", "stop", "stop_by_ns")
                    if getattr(action, name) is not None
                }
                page["saves"] = page.get("saves", 0) + action.save_now
            case act.SendSigterm(key=key):
                if not self.deaf and key not in self.frozen:
                    self._signal(key)
            case act.FreezeMember(key=key):
                if not self.unfreezable:
                    self.frozen.add(key)
                self.inbox.append(hap.FreezeFinished(key=key, frozen=not self.unfreezable))
            case act.ThawMember(key=key):
                self.frozen.discard(key)
            case act.KillMember(key=key):
                self.cancelled.add(key)
                for rank in sorted(self.alive[key] - self.unkillable):
                    self._end(key, rank, code=None, signal=9)
                self.work.append(action)
            case act.CheckEmpty(key=key):
                if not self.alive[key]:
                    self.inbox.append(hap.MemberEmptied(key=key))
            case act.RemoveScratch(job_id=job_id, epoch=epoch):
                assert not [k for k in self.living(job_id) if k.epoch == epoch], "cleaned up under living processes"
                self.clean.append((job_id, epoch))
            case act.SendEvent(event=event):
                self.reports.append(event)
            case act.PublishMembers(members=members):
                self.carried = members
            case act.ExitSupervisor():
                self.exited = True
            case _:
                pass

    def _perform_work(self, action: act.SupervisorAction) -> None:
        match action:
            case act.PrepareMember(key=key):
                if key in self.cancelled:
                    self.inbox.append(hap.MemberStartFailed(key=key, why="stopped", charge=False))
                else:
                    self.inbox.append(hap.MemberPrepared(key=key, port=29500))
            case act.SpawnTasks(key=key, prepare=order):
                if key in self.cancelled:
                    self.inbox.append(hap.MemberStartFailed(key=key, why="closed", charge=False))
                    return
                self.opened.append(key)
                if any(
                    r.epoch == key.epoch and r.generation == key.generation
                    for r in self.said(reports.MemberStopped, key.job_id)
                ):
                    self.started_after_stopped.append(key)
                self.pages[key].setdefault("deadline_ns", action.deadline_ns)
                self.alive[key] |= set(range(order.allocation.grants[0].tasks))
                self.inbox.append(hap.TasksSpawned(key=key))
            case act.KillMember(key=key):
                for rank in sorted(self.alive[key] - self.unkillable):
                    self._end(key, rank, code=None, signal=9)
                self.inbox.append(hap.MemberKilled(key=key, leftover=tuple(sorted(self.alive[key]))))
            case act.DrainOutput(key=key):
                assert not self.alive[key], "wound up under living processes"
                self.inbox.append(hap.OutputDrained(key=key, tail=self.tail))
            case act.CallSleepHook(key=key, turn=turn, sleep=sleep):
                self.inbox.append(hap.SleepHookAnswered(key=key, turn=turn, sleep=sleep))
            case _:
                raise AssertionError(f"{action} is no work")

    def _end(self, key: MemberKey, rank: int, *, code, signal, leaving=()) -> None:
        if rank not in self.alive[key]:
            return
        self.alive[key] = self.alive[key] - {rank} | set(leaving)
        if rank < 90:
            self.inbox.append(
                hap.TaskEnded(
                    key=key, rank=rank, code=code, signal=signal, ended_ns=self.now_ns, at_s=self.now_ns / NS_PER_S
                )
            )
        if not self.alive[key]:
            self.frozen.discard(key)
            self.inbox.append(hap.MemberEmptied(key=key))

    def _signal(self, key: MemberKey) -> None:
        for rank in sorted(self.alive[key]):
            self._end(key, rank, code=None, signal=15)


def with_deadline(order: commands.PrepareTasks, world: World, seconds: float) -> commands.PrepareTasks:
    """The same with a time limit that ends so many seconds from now."""
    return replace(order, deadline_s=world.now_ns / NS_PER_S + seconds)
