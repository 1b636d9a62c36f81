"""The shell around the controller: one thread that collects events, steps, commits, and only then answers and sends commands.

All events that arrive while one commit is fsynced share the next one (group commit). Reports, for which no user waits, also wait for each
other, at most GATHER_S after the begin of the step before: a busy head takes more of them in one step, an idle one each at once.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

from phalanx.controller.audit_trail import AnsweredCalls, AuditTrail
from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.mailboxes import Mailboxes
from phalanx.controller.provider_calls import ProviderCalls
from phalanx.controller.read_snapshot import ReadSnapshot
from phalanx.controller.services.canary_judge import CanaryNow
from phalanx.controller.services.load_history import LoadPoint
from phalanx.controller.services.load_scaler import LoadNow
from phalanx.controller.step_result import Answer, ControllerTime, StepResult
from phalanx.controller.telemetry import Telemetry
from phalanx.core.access.audit import AuditCall, AuditLine, ChainTip
from phalanx.core.errors import PhalanxError, TryLater
from phalanx.core.fleet.capacity import fleet_resources
from phalanx.core.fleet.fitness import DISK_FREE_BYTES, FULL_DISK
from phalanx.core.fleet.hostlist import fold_hostlist
from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ServiceId
from phalanx.core.resources import Resources
from phalanx.core.scheduling.estimates.job_speeds import estimate_texts
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.state.commands import Command, DeleteCheckpoints, LimitPower
from phalanx.core.state.events import Event, Request, SubmitJob
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.reports import DiskFreed, Report
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import seats_of
from phalanx.core.work.job import NO_EPOCH, Job
from phalanx.core.work.seats import supervisor_name_of
from phalanx.ports.clock import Clock
from phalanx.ports.engine import Engine
from phalanx.ports.store import Store, StoreDiverged, StoreRefused

A = TypeVar("A")
INBOX_MAX: Final = 50_000  # items waiting; above that, requests are refused with TryLater
GATHER_S: Final = (
    0.01  # from the begin of one step to that of the next if only reports wait; a step and its commit cost 2 to 5 ms
)
ATTEMPTS_KEPT: Final = 1000  # for the first reports of their supervisors, which come within seconds
STEP_EVENTS_MAX: Final = 4096  # in one step, so that answers do not wait for the whole queue
SNAPSHOTS_MAX: Final = 64  # snapshot requests waiting; each comes from one user's question
RETRY_WAIT_S: Final = 0.5  # before retrying observations after a refused commit
ERROR_WAIT_S: Final = 1.0  # after a step that raised: a persistent error must not fill the log
COLLECT_EVERY: Final = 50_000  # new objects between garbage collections; the largest steps create about as many
IDLE_STEP_S: Final = (
    1.0  # longest time between two steps of a head with engines, which wake it when they observe something
)
DISKS_EVERY_S: Final = 1.0  # between two looks at the samples of nodes with a full disk; as often as samples arrive
AWAITED_EVERY_S: Final = (
    1.0  # between two looks for nodes that engines have begun to bring up; a large engine has thousands
)
_log = logging.getLogger("phalanx.controller")


@dataclass(slots=True)
class _InboxItem:
    """Events and the future for their answers.

    Attributes:
        again: retried after a refused commit, since no sender would repeat these events.
        calls: the audit entry of each event. With calls and no events, the entry is written by itself.

    The future is marked as running at once, so that a caller who disconnects cannot cancel it.
    """

    events: Sequence[Event]
    future: Future[list[Answer | PhalanxError]]
    again: bool = False
    calls: Sequence[AuditCall] = ()

    def parts(self) -> list[_InboxItem]:
        """Split the item into parts that can be applied separately: each event whose answer no caller awaits."""
        if not self.again:
            return [self]
        return [_InboxItem(events=[event], future=Future(), again=True) for event in self.events]


@dataclass(slots=True, kw_only=True)
class ControllerDriver:
    """Runs a controller. Thread-safe: `request` and `report` may be called from anywhere.

    Attributes:
        head_id: identifies this incarnation of the head; supervisors register again when it changes.
        audit: the end of the audit trail.
        providers: carries out the calls of the providers of node pools; None: none are made.
        on_commit: called on the driver's thread with each step that was committed; it must not block.
        on_superseded: called on the driver's thread when the store refuses a commit because another head leads.
    """

    controller: Controller
    store: Store
    mailboxes: Mailboxes
    telemetry: Telemetry
    clock: Clock
    head_id: str
    engines: Sequence[Engine] = ()
    audit: AuditTrail = field(default_factory=AuditTrail)
    on_superseded: Callable[[str], None] = lambda _: None
    providers: ProviderCalls | None = None
    on_commit: Callable[[StepResult], None] = lambda _: None
    _listeners: list[Callable[[frozenset[JobId]], None]] = field(default_factory=list)
    _inbox: deque[_InboxItem] = field(default_factory=deque)
    _retries: list[_InboxItem] = field(default_factory=list)  # items of a refused commit; first in the next step
    _snapshot_requests: deque[tuple[Future[ReadSnapshot], JobId | None, SubmitJob | None]] = field(
        default_factory=deque
    )
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _observed: bool = False  # an engine has something to return
    _urgent: bool = False  # more than reports waits
    _stepped_s: float = float("-inf")  # begin of the newest step
    _awaited_checked_s: float = float("-inf")
    _disks_checked_s: float = float("-inf")
    _full_disks: dict[NodeId, float] = field(default_factory=dict)
    _committed: dict[tuple[JobId, Epoch], Attempt] = field(default_factory=dict)  # the newest, oldest first
    _thread: threading.Thread | None = None

    @property
    def leases(self) -> LeaseBook:
        """The leases. The API's thread renews them."""
        return self.controller.leases

    @property
    def wait_reasons(self) -> Mapping[JobId, WaitReason]:
        """Why each pending job waits, by the newest scheduling cycle."""
        return self.controller.waits

    def speeds_of(self, job: Job) -> list[str]:
        """How fast the job runs on the models of the fleet, and how that is known, for users; empty if it is not."""
        scheduler = self.controller.scheduler
        with self.controller.guard:
            return estimate_texts(scheduler.fleet_index.device_models, scheduler.speeds.estimate(job))

    def load_of(self, service_id: ServiceId) -> LoadNow | None:
        """The load of a service now, as gateways reported it; None if none did for a while."""
        return self.controller.load_scaler.load_of(service_id, self.clock.boottime_s())

    def load_history(self, service_id: ServiceId, span_s: float) -> tuple[int, list[LoadPoint]]:
        """How the load of a service was: the seconds of a point, and the points, the oldest first."""
        return self.controller.load_scaler.history.points(service_id, span_s)

    def canary_of(self, service_id: ServiceId) -> CanaryNow | None:
        """The newest figures of a service's rollout by shares of the sessions; None without one."""
        return self.controller.canaries.canary_of(service_id)

    def pending_jobs(self) -> list[Job]:
        """All pending jobs, in submit order. For statistics only: may include a change that is not committed yet."""
        return list(self.controller.world.pending.values())  # one bytecode, so no other thread can interleave

    def live_attempts(self) -> list[tuple[Job, Attempt]]:
        """All live attempts with their jobs. For statistics only, like `pending_jobs`."""
        world = self.controller.world
        attempts = list(world.attempts.values())
        return [(job, attempt) for attempt in attempts if (job := world.jobs.get(attempt.job_id)) is not None]

    def fleet_nodes(self) -> list[Node]:
        """All known nodes, up or down. Like `pending_jobs`."""
        return list(self.controller.world.nodes.values())

    def held_jobs(self) -> frozenset[JobId]:
        """The jobs in memory: all that have not ended, and those that ended last. Like `pending_jobs`."""
        return frozenset(list(self.controller.world.jobs))

    def fleet_capacity(self) -> Resources:
        """What all known nodes have, up or down, and the seats of licences: the basis of quotas. Like `waiting`."""
        world = self.controller.world
        return fleet_resources(dict(world.nodes), seats_of(dict(world.licences)))

    @property
    def feasibility(self) -> FeasibilityChecker | None:
        """Judges whether jobs can ever start, by the newest state that a submit or a scheduling cycle met; None before the first."""
        return self.controller.feasibility.newest

    @property
    def stats(self) -> dict[str, float]:
        """Counters of the controller."""
        return self.controller.stats

    @property
    def audit_tip(self) -> ChainTip:
        """The newest durable line of the audit trail."""
        return self.audit.tip

    def supervisor_of(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
        """Name of the supervisor that runs a node's part of an attempt: the node's own, or its seat's."""
        return supervisor_name_of(self.controller.world.nodes, node_id, job_id, epoch)

    def committed_attempt(self, job_id: JobId, epoch: Epoch) -> Attempt | None:
        """A live attempt as it was committed last, if it is among the ATTEMPTS_KEPT that were placed last; None: ask the store."""
        return self._committed.get((job_id, epoch))

    def start(self, *, leases_until_s: float = 0.0) -> None:
        """Take over the loaded world and start the loop. `leases_until_s`: as in `Controller.start`."""
        tune_gc()
        self.audit.resume_after(self.store.audit_tip())
        self.controller.start(self._now(), leases_until_s=leases_until_s)
        if self.providers is not None:
            world = self.controller.world
            self.providers.open(world.node_pools, world.pool_nodes, self.report)
        for engine in self.engines:
            engine.listen(self._wake_for_engine)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current step and end the thread; waiting requests fail with TryLater."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def request(self, event: Request[A], call: AuditCall | None = None) -> Future[A]:
        """Submit a request. The future holds the answer once it is durable, or the error. `call` is its entry in the audit trail."""
        answer: Future[A] = Future()
        answer.set_running_or_notify_cancel()

        def forward(done: Future[list[Answer | PhalanxError]]) -> None:
            error = done.exception()
            result = error if error is not None else done.result()[0]
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(cast("A", result))

        self._post([event], [] if call is None else [call]).add_done_callback(forward)
        return answer

    def report(self, reports: Sequence[Report]) -> Future[list[Answer | PhalanxError]]:
        """Submit reports of supervisors; the future completes once all of them are durable."""
        return self._post(reports, urgent=False)

    def request_all(
        self, events: Sequence[Request[Any]], calls: Sequence[AuditCall] = ()
    ) -> Future[list[Answer | PhalanxError]]:
        """Submit several requests for one step, without scheduling between them; errors are among the answers."""
        return self._post(events, calls)

    def record_call(self, call: AuditCall) -> Future[list[Answer | PhalanxError]]:
        """Write an audit entry for a call that needs no controller request; the future completes once it is durable."""
        return self._post([], [call])

    def listen(self, listener: Callable[[frozenset[JobId]], None]) -> None:
        """Call `listener` with the jobs that each commit changed, on the controller's thread; it must not block."""
        self._listeners.append(listener)

    def read_snapshot(
        self, *, job_id: JobId | None = None, submission: SubmitJob | None = None
    ) -> Future[ReadSnapshot]:
        """Take a snapshot between two steps (`Controller.read_snapshot`): every step before it is committed or undone."""
        future: Future[ReadSnapshot] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._stopping or len(self._snapshot_requests) >= SNAPSHOTS_MAX:
                why = (
                    "the head is stopping" if self._stopping else f"{SNAPSHOTS_MAX} such questions are already waiting"
                )
                future.set_exception(TryLater(why, hint="try again in a moment"))
                return future
            self._snapshot_requests.append((future, job_id, submission))
            self._wake.notify()
        return future

    def _post(
        self, events: Sequence[Event], calls: Sequence[AuditCall] = (), *, urgent: bool = True
    ) -> Future[list[Answer | PhalanxError]]:
        future: Future[list[Answer | PhalanxError]] = Future()
        future.set_running_or_notify_cancel()
        with self._wake:
            if self._stopping or len(self._inbox) >= INBOX_MAX:
                why = "the head is stopping" if self._stopping else f"{INBOX_MAX} requests are already waiting"
                future.set_exception(TryLater(why, hint="try again in a moment"))
                return future
            self._inbox.append(_InboxItem(events=events, future=future, calls=calls))
            self._urgent = self._urgent or urgent
            self._wake.notify()
        return future

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wake_in_s = 0.0
        while True:
            items = self._collect(wake_in_s)
            if items is None:
                break
            wake_in_s = self._run_step(items)
            self._answer_snapshot_requests()
        for item in self._inbox:
            item.future.set_exception(TryLater("the head stopped", hint="try again once it is back"))
        for future, _, _ in self._snapshot_requests:
            future.set_exception(TryLater("the head stopped", hint="try again once it is back"))

    def _collect(self, wake_in_s: float) -> list[_InboxItem] | None:
        with self._wake:
            if not (self._inbox or self._snapshot_requests or self._observed or self._stopping):
                self._wake.wait(min(wake_in_s, IDLE_STEP_S) if self.engines else wake_in_s)
            gather_s = self._stepped_s + min(GATHER_S, wake_in_s) - self.clock.boottime_s()
            if gather_s > 0:
                self._wake.wait_for(self._is_urgent, gather_s)
            if self._stopping:
                return None
            self._observed = False
            self._stepped_s = self.clock.boottime_s()
            posted: list[_InboxItem] = []
            events = 0
            while self._inbox and events < STEP_EVENTS_MAX:
                posted.append(self._inbox.popleft())
                events += len(posted[-1].events)
            self._urgent = bool(self._inbox)
        # Without the lock: an engine may hold its own lock while it wakes this thread.
        items, self._retries = self._retries, []
        self._check_awaited_nodes()
        # Engines are asked after the inbox was read, and their observations go first: a supervisor must not register before the end of
        # its predecessor is known.
        observed = [report for engine in self.engines for report in engine.observe()] + self._freed_disks()
        if observed:
            items.append(_InboxItem(events=observed, future=Future(), again=True))
        return items + posted

    def _is_urgent(self) -> bool:
        """Whether more than reports waits for the next step."""
        return self._urgent or self._observed or self._stopping or bool(self._snapshot_requests)

    def _wake_for_engine(self) -> None:
        with self._wake:
            self._observed = True
            self._wake.notify()

    def _check_awaited_nodes(self) -> None:
        """Tell the controller which nodes its engines still bring up. Call it before `observe`: see `Engine.expected_nodes`."""
        boot_s, world = self.clock.boottime_s(), self.controller.world
        if not world.awaited_nodes and boot_s < self._awaited_checked_s + AWAITED_EVERY_S:
            return
        self._awaited_checked_s = boot_s
        world.set_awaited_nodes(next(filter(None, (_awaited_of(engine, world.nodes) for engine in self.engines)), ""))

    def _freed_disks(self) -> list[Report]:
        """The nodes cordoned for a full disk that have room by now. A sample from before the cordon does not count."""
        boot_s = self.clock.boottime_s()
        if boot_s < self._disks_checked_s + DISKS_EVERY_S:
            return []
        self._disks_checked_s = boot_s
        nodes = self.controller.world.nodes.values()
        full = [node.id for node in nodes if node.cordon is not None and node.cordon.by == FULL_DISK]
        samples = {node_id: self.telemetry.node_samples(node_id) for node_id in full}
        first, self._full_disks = self._full_disks, {}
        freed: list[Report] = []
        for node_id, sample in samples.items():
            sampled_s = 0.0 if sample is None else sample.at_s
            self._full_disks[node_id] = first.get(node_id, sampled_s)
            if (
                sample is not None
                and sampled_s != self._full_disks[node_id]
                and sample.disk_free_bytes >= DISK_FREE_BYTES
            ):
                freed.append(DiskFreed(node_id=node_id, free_bytes=sample.disk_free_bytes))
        return freed

    def _run_step(self, items: list[_InboxItem]) -> float:
        now = self._now()
        try:
            outbox = self.controller.step(now, [event for item in items for event in item.events])
        except Exception as error:  # noqa: BLE001  # an internal error, undone by the step; without this thread the head is dead
            return self._one_by_one(items, error)
        audit = self._audit_lines(items, outbox, now)
        try:
            if audit or not outbox.change.empty:
                self.store.commit(outbox.batch(audit))
        except StoreRefused as error:
            return self._refused(items, outbox, error)
        except Exception:  # noqa: BLE001  # as above
            _log.exception("unexpected error in the store")
            unexpected = StoreRefused("unexpected error in the store", hint="see the head's log")
            return self._refused(items, outbox, unexpected)
        if audit:
            self.audit.resume_after(audit[-1])
        self._publish(outbox, now)
        answers = iter(outbox.answers)
        for item in items:
            item.future.set_result([next(answers) for _ in item.events])
        return outbox.wake_in_s

    def _audit_lines(self, items: list[_InboxItem], outbox: StepResult, now: ControllerTime) -> list[AuditLine]:
        answers = iter(outbox.answers)
        answered: list[AnsweredCalls] = [
            (item.calls, item.events, [next(answers) for _ in item.events]) for item in items
        ]
        answered.append((outbox.audit_calls, (), ()))
        return self.audit.next_lines(answered, now.wall_s)

    def _current_epoch(self, job_id: JobId) -> Epoch:
        attempt = self.controller.world.attempts.get(job_id)
        return NO_EPOCH if attempt is None else attempt.epoch

    def _publish(self, outbox: StepResult, now: ControllerTime) -> None:
        """Perform what follows from the commit. An internal error in one part stops neither the other parts nor the thread."""
        parts: tuple[Callable[[], None], ...] = (
            partial(self.controller.committed, outbox, now),
            partial(self.on_commit, outbox),
            partial(self._keep_attempts, outbox),
            partial(self._send_commands, outbox),
            partial(self._notify_engines, outbox),
            partial(self._send_provider_calls, outbox),
            partial(self._notify_listeners, outbox),
        )
        for part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001  # as above
                _log.exception("internal error after a commit")

    def _send_commands(self, outbox: StepResult) -> None:
        """Post the commands, all of a supervisor at once, so that its next answer has all of them."""
        found: dict[NodeId, list[Command]] = {}
        for command in outbox.commands:
            match command:
                case LimitPower():
                    name = command.node_id
                case DeleteCheckpoints():
                    epoch = self._current_epoch(command.job_id)
                    name = self.supervisor_of(command.node_id, command.job_id, epoch)
                case _:
                    name = self.supervisor_of(command.node_id, command.job_id, command.epoch)
            found.setdefault(name, []).append(command)
        for name, commands in found.items():
            self.mailboxes.post(name, *commands)
        for name in outbox.lost:
            self.mailboxes.remove(name)

    def _keep_attempts(self, outbox: StepResult) -> None:
        """Keep what was committed, before a supervisor can report on it."""
        for record in outbox.change.records:
            if isinstance(record, Attempt):
                if record.holds_allocation:
                    self._committed[record.job_id, record.epoch] = record
                else:
                    self._committed.pop((record.job_id, record.epoch), None)
        while len(self._committed) > ATTEMPTS_KEPT:
            del self._committed[next(iter(self._committed))]

    def _send_provider_calls(self, outbox: StepResult) -> None:
        if self.providers is not None and outbox.provider_calls:
            self.providers.send(outbox.provider_calls)

    def _notify_engines(self, outbox: StepResult) -> None:
        """Pass changed attempts to the engines."""
        records = outbox.change.records
        newest = {(one.job_id, one.epoch): one for one in records if isinstance(one, Attempt)}
        # An ended job may have left the world by now.
        changed = {one.id: one for one in records if isinstance(one, Job)}
        for attempt in newest.values():
            job = changed.get(attempt.job_id) or self.controller.world.jobs[attempt.job_id]
            for engine in self.engines:
                engine.follow(job, attempt)

    def _notify_listeners(self, outbox: StepResult) -> None:
        if self._listeners and not outbox.change.empty:
            changed = frozenset(line.job_id for line in outbox.change.history if line.job_id is not None)
            for listener in self._listeners:
                listener(changed)

    def _answer_snapshot_requests(self) -> None:
        """Answer snapshot requests between two steps."""
        while self._snapshot_requests:
            future, job_id, submission = self._snapshot_requests.popleft()
            try:
                future.set_result(self.controller.read_snapshot(self._now(), job_id=job_id, submission=submission))
            except Exception as error:  # noqa: BLE001  # refused, or an internal error: it goes to the caller, the loop continues
                future.set_exception(error)

    def _refused(self, items: list[_InboxItem], outbox: StepResult, error: StoreRefused) -> float:
        """Undo the step. Observations are retried, since no sender repeats them; callers repeat their requests themselves."""
        self.controller.refused(outbox)
        _log.error("the store refused a commit: %s", error)
        if isinstance(error, StoreDiverged):
            self.on_superseded(error.message)
        for item in items:
            if item.again:
                self._retries.append(item)
            else:
                item.future.set_exception(error)
        return RETRY_WAIT_S

    def _one_by_one(self, items: list[_InboxItem], error: Exception) -> float:
        """Apply each item separately after a step raised, so that only the item at fault fails.

        Observations of engines share one item and are split as well: only the event at fault is lost.
        """
        _log.error("internal error in a step with %d inbox items", len(items), exc_info=error)
        alone = [part for item in items for part in item.parts()]
        if len(alone) > 1:
            return min([self._run_step([part]) for part in alone])
        for item in items:
            item.future.set_exception(PhalanxError("internal error of the head", hint="see the head's log"))
        return ERROR_WAIT_S

    def _now(self) -> ControllerTime:
        return ControllerTime(wall_s=self.clock.now_s(), boot_s=self.clock.boottime_s())


def _awaited_of(engine: Engine, known: Container[NodeId]) -> str:
    """The nodes of an engine that the head does not know yet, in words; empty if it knows all."""
    expected = engine.expected_nodes()
    if expected is None:
        return f"engine {engine.name} has not listed its nodes yet"
    missing = [node_id for node_id in expected if node_id not in known]
    if not missing:
        return ""
    return f"{fold_hostlist(sorted(missing))} {'has' if len(missing) == 1 else 'have'} not registered yet"


def tune_gc() -> None:
    """Exclude loaded objects from garbage collection, and raise its thresholds.

    Records form no cycles, so collections find almost nothing. With Python's default thresholds, a scheduling pass over 50,000 jobs took
    up to twice as long.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 50)
