"""The thread that keeps the ledger of states of a head: takes commits, samples and steps from other threads, and stores hours once a minute.

The controller's thread and the API pay one append each. After a restart the ledger goes on from what was stored: the time in between is replayed
from the records, with every state noted as unobserved, so that no second of the fleet is missing (docs/decisions/0060).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from math import inf
from typing import Any, Final

from phalanx.controller.host_activity import HostActivityTracker
from phalanx.controller.step_result import StepResult
from phalanx.controller.telemetry import Telemetry
from phalanx.controller.usage.attempt_use_tracker import AttemptUseTracker
from phalanx.controller.usage.budget_watch import BudgetWatch
from phalanx.controller.usage.usage_accounting import UsageAccountant
from phalanx.controller.usage.usage_resume import resume_ledger, usage_hour
from phalanx.controller.usage.waste_monitor import WasteMonitor, WasteNow
from phalanx.core.accounting.state_ledger import HOUR_MS, UsageSpan
from phalanx.core.accounting.usage_states import PartState, UsageState
from phalanx.core.errors import PhalanxError
from phalanx.core.ids import Epoch, JobId, NodeId
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.records import ATTEMPT_USES, USAGE_HOURS, USAGE_MARKS
from phalanx.core.state.reports import IdleJob, Report, UsageCounted
from phalanx.core.state.world import World
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.pace import TimedStep
from phalanx.core.work.usage.attempt_use import AttemptUse
from phalanx.core.work.usage.usage_hour import USAGE_MARK, UsageHour, UsageMark
from phalanx.ports.clock import Clock
from phalanx.ports.store import Store
from phalanx.wire.supervisor import SamplesRequest

TICK_S: Final = 1.0
STORE_EVERY_MS: Final = 60_000  # as much as a crash makes unobserved
WAITING_MAX: Final = 200_000  # items from other threads; past that the oldest samples are dropped
STORED_READS_MAX: Final = 9000  # hours that are read one by one, a year; more are read all at once
STOP_TIMEOUT_S: Final = 30.0
_log = logging.getLogger("phalanx.usage")


class UsageRecorder:
    """See the module. Create it before the controller starts; `start` it after.

    Args:
        world: as loaded; read only here.
        submit: sends reports to the controller (`ControllerDriver.report`).
        waits: why jobs wait (`ControllerDriver.wait_reasons`).
    """

    def __init__(
        self,
        world: World,
        store: Store,
        telemetry: Telemetry,
        clock: Clock,
        *,
        waits: Mapping[JobId, WaitReason],
    ) -> None:
        self._store, self._clock, self._telemetry = store, clock, telemetry
        self._inbox: deque[Callable[[], None]] = deque(maxlen=WAITING_MAX)
        self._lock = threading.Lock()  # of the accountant
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._submit: Callable[[Sequence[Report]], Future[Any]] | None = None
        self._accountant = UsageAccountant(partial(_wait_word, waits))
        self._attempt_uses = AttemptUseTracker(
            self._accountant.live_attempt, lambda key: store.record(ATTEMPT_USES, key)
        )
        self._budgets = BudgetWatch(store)
        mark = world.table(USAGE_MARKS).get(USAGE_MARK)
        # Never behind what was counted, if the wall clock was set back.
        wall_ms = max(int(clock.now_s() * 1000), mark.until_ms if mark is not None else 0)
        self._offset_ms = wall_ms - int(clock.boottime_s() * 1000)
        self._stored_ms = self._now_ms()
        resume_ledger(self._accountant, world, store, mark, self._stored_ms)
        self._hosts = HostActivityTracker(self._accountant.live_attempt)
        self._monitor = WasteMonitor(self._accountant, self._hosts)
        self._monitor.apply((*world.queues.values(), *world.jobs.values()), (), self._stored_ms, stored=True)
        self._reported_idle: tuple[tuple[IdleJob, ...], ...] = ((), ())  # as the controller knows them
        telemetry.sample_listeners.append(self._on_samples)
        telemetry.step_listeners.append(self._on_steps)

    def committed(self, result: StepResult) -> None:
        """Take what a step committed. Costs one append."""
        change, now_ms = result.change, self._now_ms()
        if change.records or change.removed:
            records, removed = tuple(change.records), tuple(change.removed)
            self._inbox.append(partial(self._apply, records, removed, now_ms))

    def start(self, submit: Callable[[Sequence[Report]], Future[Any]]) -> None:
        """Start the thread."""
        self._submit = submit
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Store everything up to now and end the thread; the controller must still run."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=STOP_TIMEOUT_S)

    def hours(self, since_s: float, until_s: float = inf) -> Iterator[UsageHour]:
        """All hours from the one that contains `since_s` (Unix seconds) up to now, or to the one that contains `until_s`, oldest first.

        One after the other, since an hour of 1,000 jobs takes a megabyte.
        """
        since_ms = int(since_s * 1000)
        with self._lock:
            now_ms = self._now_ms()
            self._catch_up(now_ms)
            self._accountant.ledger.settle(now_ms)
            newest = [usage_hour(hour, found) for hour, found in sorted(self._accountant.ledger.hours.items())]
        first = since_ms - since_ms % HOUR_MS
        known = {hour.id for hour in newest}
        last_ms = now_ms if until_s == inf else int(until_s * 1000)
        end_ms = min(last_ms + 1, min((int(hour.id) * 1000 for hour in newest), default=now_ms))
        yield from (hour for hour in self._stored_hours(first, end_ms) if hour.id not in known)
        yield from (hour for hour in newest if first <= int(hour.id) * 1000 <= last_ms)

    def part_states(self, node_ids: Iterable[NodeId]) -> dict[NodeId, list[tuple[int, str, PartState]]]:
        """The states of the parts of these nodes' devices now: device, job or "", and the state."""
        with self._lock:
            self._catch_up(self._now_ms())
            return {node_id: list(self._accountant.ledger.part_states(node_id)) for node_id in node_ids}

    def state_totals(self) -> dict[UsageState, int]:
        """The thousandths of devices in each state now."""
        with self._lock:
            self._catch_up(self._now_ms())
            return self._accountant.ledger.state_totals()

    def attempt_use(self, job_id: JobId, epoch: Epoch) -> AttemptUse | None:
        """What an attempt used of its devices and nodes; None if nothing was measured."""
        with self._lock:
            self._catch_up(self._now_ms())
            found = self._attempt_uses.find(job_id, epoch)
        return found or self._store.record(ATTEMPT_USES, (job_id, epoch))

    def waste(self) -> WasteNow:
        """What is wasted now, from the newest look of the thread."""
        return self._monitor.now

    def client_active(self, job_id: JobId) -> None:
        """Note that a client has sent something to a job. Costs one append."""
        self._inbox.append(partial(self._hosts.add_input, job_id, self._now_ms()))

    def spans(self, node_id: NodeId) -> list[tuple[int, UsageSpan]]:
        """The newest states of a node's devices, each with its device; empty if the node does not count."""
        with self._lock:
            now_ms = self._now_ms()
            self._catch_up(now_ms)
            return list(self._accountant.ledger.spans(node_id, now_ms))

    def _stored_hours(self, begin_ms: int, end_ms: int) -> Iterator[UsageHour]:
        """The stored hours of a span. One read of all, or one for each hour, whichever is less."""
        wanted = range(begin_ms, end_ms, HOUR_MS)
        if len(wanted) <= STORED_READS_MAX:
            read = (self._store.record(USAGE_HOURS, str(hour // 1000)) for hour in wanted)
            yield from (one for one in read if one is not None)
            return
        found = self._store.records(USAGE_HOURS)
        yield from sorted(
            (one for one in found if begin_ms <= int(one.id) * 1000 < end_ms), key=lambda one: int(one.id)
        )

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(until_tick_s(TICK_S, time.monotonic())):
            try:
                self._look_for_waste()
                if self._now_ms() - self._stored_ms >= STORE_EVERY_MS:
                    self._store_all()
                    self._warn_of_budgets()
            except Exception:  # noqa: BLE001  # an internal error must not end the accounting; the next tick judges again
                _log.exception("internal error in the ledger of states")
        self._store_all(stopping=True)

    def _catch_up(self, now_ms: int) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._accountant.update(now_ms)

    def _look_for_waste(self) -> None:
        """Catch up, look for waste if it is time, and report the jobs that are idle if they are others than those reported before."""
        assert self._submit is not None
        with self._lock:
            now_ms = self._now_ms()
            self._catch_up(now_ms)
            idle = self._monitor.look(now_ms)
        if idle is not None and (idle.jobs, idle.quiet) != self._reported_idle:
            try:
                self._submit([idle]).result(timeout=STOP_TIMEOUT_S)
                self._reported_idle = idle.jobs, idle.quiet
            except (PhalanxError, FutureTimeoutError) as error:
                _log.warning("idle jobs are reported again at the next look: %s", error)

    def _store_all(self, *, stopping: bool = False) -> None:
        """Store the hours in memory, and the use of attempts; what cannot change any more is then dropped from it."""
        assert self._submit is not None
        ledger = self._accountant.ledger
        with self._lock:
            now_ms = self._now_ms()
            self._catch_up(now_ms)
            ledger.settle(now_ms)
            hours = tuple(usage_hour(hour, found) for hour, found in ledger.hours.items())
            nodes = tuple(map(self._accountant.counted_node, ledger.nodes))
            uses = self._attempt_uses.to_store(now_ms, everything=stopping)
        mark = UsageMark(id=USAGE_MARK, until_ms=now_ms, nodes=nodes)
        self._stored_ms = now_ms
        try:
            self._submit([UsageCounted(hours=hours, mark=mark, attempts=tuple(uses))]).result(timeout=STOP_TIMEOUT_S)
        except (PhalanxError, FutureTimeoutError) as error:
            _log.warning("the usage of the last minute is not stored yet: %s", error)
            return
        with self._lock:
            self._attempt_uses.stored(uses, now_ms)
            ledger.drop_hours(now_ms - now_ms % HOUR_MS - HOUR_MS)

    def _warn_of_budgets(self) -> None:
        assert self._submit is not None
        with self._lock:
            newest = [usage_hour(hour, found) for hour, found in self._accountant.ledger.hours.items()]
        reached = self._budgets.check(newest, self._now_ms() / 1000)
        if reached:
            self._submit(reached).result(timeout=STOP_TIMEOUT_S)

    def _apply(self, records: Sequence[Any], removed: Sequence[Any], at_ms: int) -> None:
        """Account for a commit at its own time, however late the thread comes to it."""
        self._accountant.apply(records, removed, at_ms)
        self._monitor.apply(records, removed, at_ms)
        self._accountant.update(at_ms)

    def _on_samples(self, request: SamplesRequest) -> None:
        now_ms = self._now_ms()
        self._inbox.append(partial(self._add_samples, request, now_ms))

    def _add_samples(self, request: SamplesRequest, now_ms: int) -> None:
        self._accountant.add_samples(request, now_ms)
        self._attempt_uses.add_samples(request, now_ms)
        self._hosts.add_samples(request, now_ms)

    def _on_steps(self, job_id: JobId, _steps: Sequence[TimedStep]) -> None:
        steps = self._telemetry.step_activity(job_id)  # as of now: the thread comes to it later
        if steps is not None:
            self._inbox.append(partial(self._accountant.steps_reported, job_id, steps, self._now_ms()))

    def _now_ms(self) -> int:
        """Unix milliseconds that do not jump when the wall clock is set."""
        return int(self._clock.boottime_s() * 1000) + self._offset_ms


def _wait_word(waits: Mapping[JobId, WaitReason], job_id: JobId) -> str:
    found = waits.get(job_id)
    return "" if found is None else found.reason.value
