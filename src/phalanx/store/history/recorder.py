"""The thread that records history. The API's threads and the controller pay one append each; a failure is logged, counted, and never stops the head.

A crash loses what was not stored yet: a minute, and with more than 200 nodes 0.3 s for each, at most five minutes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from phalanx.core.ids import JobId, NodeId
from phalanx.core.ticks import until_tick_s
from phalanx.core.work.pace import TimedStep
from phalanx.ports.clock import Clock
from phalanx.ports.history import ChunkKind, HistoryStore, HistoryUnavailable, StoredChunk
from phalanx.store.history.job_curves import JobCurve
from phalanx.store.history.levels import LEVELS, STEP_S
from phalanx.store.history.maintenance import drop_old, readable, roll_up
from phalanx.store.history.open_hours import FLEET, OpenHour, OpenHours
from phalanx.store.history.packing import DamagedChunk, pack_values
from phalanx.store.history.reading import choose_step, points_max, read_rollups
from phalanx.store.history.rollups import Rollups
from phalanx.wire.supervisor import SamplesRequest

TICK_S: Final = 2.0
ROLL_LOOK_S: Final = 60.0  # between two looks for complete chunks, of which the finest has an hour
STORE_EVERY_S: Final = 60.0
_STORE_PER_NODE_S: Final = 0.3  # so that a fleet of any size costs about 3 ms of CPU a second
STORE_EVERY_MAX_S: Final = 300.0
CHUNKS_PER_TICK: Final = 50  # written in one transaction, about 15 ms
ROLLED_PER_TICK: Final = 10  # 1,000 nodes take less than two minutes after each hour
DROP_EVERY_S: Final = 600.0
SEALED_HOURS_MAX: Final = (
    4  # of all nodes, kept in memory while the store cannot be written; then the oldest are dropped
)
WAITING_MAX: Final = 100_000
JOBS_MAX: Final = (
    2000  # with a curve in memory, at most 115 KB each; the least recently reporting are stored and dropped
)
STOP_TIMEOUT_S: Final = 30.0
_log = logging.getLogger("phalanx.history")


@dataclass(slots=True, eq=False)
class _OpenCurve:
    """The curve of a job that reports steps; `begin_s`: the time of its chunk."""

    curve: JobCurve
    begin_s: int
    stored_s: float
    changed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryHealth:
    """Whether history is written. `problem`: why not, empty if it is; `lost`: hours of nodes and samples dropped because of it."""

    problem: str
    size_bytes: int
    stored_s: float
    lost: int


class HistoryRecorder:
    """See the module."""

    def __init__(self, store: HistoryStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._offset_s = clock.now_s() - clock.boottime_s()
        self._inbox: deque[Callable[[], None]] = deque(maxlen=WAITING_MAX)
        self._lock = threading.Lock()  # of all below
        self._hours = OpenHours(self._load_hour, self._now_s())
        self._curves: OrderedDict[JobId, _OpenCurve] = OrderedDict()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._stored_s = self._now_s()
        self._dropped_s = self._roll_s = -math.inf
        self._lost = 0

    # ---- what is recorded ---------------------------------------------------------------------------------------------

    def add_samples(self, request: SamplesRequest) -> None:
        """Record the samples of a node, which arrived now."""
        self._inbox.append(partial(self._hours.add, request, self._now_s()))

    def add_steps(self, job_id: JobId, steps: Sequence[TimedStep]) -> None:
        """Record steps of a job."""
        if steps:
            self._inbox.append(partial(self._add_steps, job_id, steps))

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Store everything, and end the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=STOP_TIMEOUT_S)
        self._store.close()

    # ---- what is asked ------------------------------------------------------------------------------------------------

    def rollups(
        self, node: NodeId | None, since_s: float, until_s: float, step_s: float | None, *, devices: int
    ) -> Rollups:
        """Rollups of a node, or of the fleet, over a span. `devices`: as many as the caller expects, for the size of the answer.

        Raises:
            HistoryUnavailable: the store cannot be read now.
        """
        now_s = self._now_s()
        with self._lock:
            self._drain()
            self._hours.advance(now_s)
        series = FLEET if node is None else node
        step = choose_step(since_s, until_s, now_s, step_s, points_max(devices))
        return read_rollups(self._store, self._held, series, since_s=since_s, until_s=until_s, now_s=now_s, step_s=step)

    def job_curve(self, job_id: JobId) -> JobCurve | None:
        """The curve of a job; None if it reported no step, or too long ago.

        Raises:
            HistoryUnavailable: the store cannot be read now.
        """
        with self._lock:
            self._drain()
            found = self._curves.get(job_id)
            if found is not None:
                return JobCurve.unpack(found.curve.pack())
        stored = self._stored_curve(job_id)
        return None if stored is None else stored.curve

    def health(self) -> HistoryHealth:
        """Whether history is written."""
        try:
            size_bytes = self._store.size_bytes()
        except HistoryUnavailable:
            size_bytes = 0
        return HistoryHealth(problem=self._problem, size_bytes=size_bytes, stored_s=self._stored_s, lost=self._lost)

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(until_tick_s(TICK_S, time.monotonic())):
            self.turn()
        self.turn(everything=True)

    def turn(self, *, everything: bool = False) -> None:
        """Record what arrived, store what is due, roll up what is complete. `everything`: all that is not stored is due."""
        try:
            with self._lock:
                self._drain()
                self._hours.advance(self._now_s())
            self._store_due(everything=everything)
            if not self._hours.has_sealed and self._now_s() >= self._roll_s:
                rolled = roll_up(self._store, self._now_s(), ROLLED_PER_TICK)
                self._roll_s = self._now_s() + (0.0 if rolled else ROLL_LOOK_S)
            if self._now_s() - self._dropped_s >= DROP_EVERY_S:
                self._dropped_s = self._now_s()
                drop_old(self._store, self._now_s())
            self._problem = ""
            return
        except HistoryUnavailable as error:
            self._note(error.message)
        except Exception as error:  # noqa: BLE001  # an internal error must not end the recording
            _log.exception("internal error in the history")
            self._note(f"internal error: {error}")
        with self._lock:
            self._lost += self._hours.drop_sealed(SEALED_HOURS_MAX * (self._hours.nodes + 1))

    def _drain(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _store_due(self, *, everything: bool) -> None:
        period_s = min(max(STORE_EVERY_S, _STORE_PER_NODE_S * self._hours.nodes), STORE_EVERY_MAX_S)
        while True:
            now_s = self._now_s()
            with self._lock:
                hours = self._hours.due(now_s, -math.inf if everything else period_s, CHUNKS_PER_TICK)
                curves = self._due_curves(now_s, everything=everything)
                chunks = [*map(_chunk_of, hours), *(_curve_chunk(job_id, one) for job_id, one in curves)]
                for _, curve in curves:
                    curve.changed = False
            if not chunks:
                return
            try:
                self._store.put(chunks)
            except BaseException:
                with self._lock:
                    for hour in hours:
                        hour.changed = True
                    for _, curve in curves:
                        curve.changed = True
                raise
            self._stored_s = now_s
            with self._lock:
                self._hours.stored(hours, now_s)
                for _, curve in curves:
                    curve.stored_s = now_s
                while len(self._curves) > JOBS_MAX and not next(iter(self._curves.values())).changed:
                    self._curves.popitem(last=False)
            if not everything:
                return

    def _due_curves(self, now_s: float, *, everything: bool) -> list[tuple[JobId, _OpenCurve]]:
        crowded = len(self._curves) - JOBS_MAX
        found = []
        for number, (job_id, one) in enumerate(self._curves.items()):
            if one.changed and (everything or number < crowded or now_s - one.stored_s >= STORE_EVERY_S):
                found.append((job_id, one))
                if len(found) >= CHUNKS_PER_TICK:
                    break
        return found

    def _add_steps(self, job_id: JobId, steps: Sequence[TimedStep]) -> None:
        found = self._curves.get(job_id)
        if found is None:
            try:
                found = self._stored_curve(job_id)
            except HistoryUnavailable as error:
                self._note(error.message)
            if found is None:
                found = _OpenCurve(JobCurve(), int(self._now_s()), self._now_s())
            self._curves[job_id] = found
        self._curves.move_to_end(job_id)
        found.changed = True
        for one in steps:
            found.curve.add(one)

    def _stored_curve(self, job_id: JobId) -> _OpenCurve | None:
        for chunk in reversed(self._store.read(ChunkKind.JOB_CURVE, job_id, 0, 1 << 40)):
            try:
                return _OpenCurve(JobCurve.unpack(chunk.data), chunk.begin_s, self._now_s(), changed=False)
            except DamagedChunk as error:
                _log.warning("the curve of job %s is damaged: %s", job_id, error)
        return None

    def _load_hour(self, series: str, begin_s: int) -> Rollups | None:
        try:
            found = readable(self._store.read(LEVELS[0].kind, series, begin_s, begin_s + 1))
        except HistoryUnavailable as error:
            self._note(error.message)
            return None
        return found[0] if found else None

    def _held(self, series: str) -> list[Rollups]:
        with self._lock:
            return self._hours.held(series)

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("history is not stored: %s", problem)
        self._problem = problem

    def _now_s(self) -> float:
        """Unix seconds that do not jump when the wall clock is set."""
        return self._clock.boottime_s() + self._offset_s


def _chunk_of(hour: OpenHour) -> StoredChunk:
    data = pack_values(hour.begin_s, STEP_S, hour.devices, hour.codes_RT)
    return StoredChunk(series=hour.series, kind=LEVELS[0].kind, begin_s=hour.begin_s, data=data, pending=True)


def _curve_chunk(job_id: JobId, one: _OpenCurve) -> StoredChunk:
    return StoredChunk(series=job_id, kind=ChunkKind.JOB_CURVE, begin_s=one.begin_s, data=one.curve.pack())
