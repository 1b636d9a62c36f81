"""Many seeds on several processes, and what they came to together."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from phalanx.simulator.drill.coverage import Coverage
from phalanx.simulator.drill.seed import EVENTS, Result, run_seed


@dataclass(slots=True)
class Report:
    """Seeds added up.

    Attributes:
        events: counted, over all seeds.
        on_sqlite: seeds that lay on the real store.
        broken: seeds that broke something.
        cpu_s: of all processes.
        seconds: on the wall.
    """

    seeds: int = 0
    events: int = 0
    faults: int = 0
    on_sqlite: int = 0
    broken: list[Result] = field(default_factory=list)
    coverage: Coverage = field(default_factory=lambda: Coverage().sealed())
    cpu_s: float = 0.0
    seconds: float = 0.0
    traces: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """One more seed."""
        self.seeds += 1
        self.events += result.events
        self.faults += result.faults
        self.on_sqlite += result.store == "sqlite"
        self.cpu_s += result.seconds
        self.coverage.add(result.coverage)
        self.traces[result.seed] = result.trace
        if result.violations:
            self.broken.append(result)

    @property
    def by_kind(self) -> dict[str, int]:
        """How often each kind of fault was done."""
        return {kind: sum(counts.values()) for kind, counts in sorted(self.coverage.faults.items())}

    @property
    def trace(self) -> str:
        """One hash of all seeds' traces, in their order."""
        lines = "".join(f"{seed} {self.traces[seed]}\n" for seed in sorted(self.traces))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def as_dict(self) -> dict[str, object]:
        """For programs."""
        return {
            "seeds": self.seeds,
            "events": self.events,
            "faults": self.faults,
            "by_kind": self.by_kind,
            "violations": sum(len(one.violations) for one in self.broken),
            "seconds": round(self.seconds, 3),
        }


def run_campaign(
    first: int, seeds: int, *, events: int = EVENTS, processes: int = 1, done: Callable[[Result], None] = lambda _: None
) -> Report:
    """Drill so many seeds from `first` on; `done` is called as each ends. Interrupted, it ends its processes and raises KeyboardInterrupt."""
    report, begun_s = Report(), time.monotonic()
    if processes <= 1 or seeds == 1:
        for seed in range(first, first + seeds):
            _heard(report, run_seed(seed, events=events), done)
    else:
        _spread(report, range(first, first + seeds), events, min(processes, seeds), done)
    report.broken.sort(key=lambda one: one.seed)
    report.seconds = time.monotonic() - begun_s
    return report


def _heard(report: Report, result: Result, done: Callable[[Result], None]) -> None:
    report.add(result)
    done(result)


def _spread(report: Report, seeds: range, events: int, processes: int, done: Callable[[Result], None]) -> None:
    spawned = multiprocessing.get_context("spawn")  # a fork would take along whatever threads the caller has
    with _interrupts_told() as interrupted:
        pool = ProcessPoolExecutor(processes, mp_context=spawned)
        try:
            with _begun_deaf():  # processes are begun as work is handed in
                futures: list[Future[Result]] = [pool.submit(run_seed, seed, events=events) for seed in seeds]
            for future in as_completed(futures):
                if interrupted():
                    raise KeyboardInterrupt
                _heard(report, future.result(), done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_told() -> Iterator[Callable[[], bool]]:
    """Within it an interrupt is told by what this gives, and raised by whoever asks: raised anywhere, it would leave a lock of the pool taken.

    A mask alone does not keep it off: another thread (numpy's) takes the signal, and Python raises it here. The second is raised at once.
    """
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        del number, frame
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
        yield told.is_set
        return
    before = signal.signal(signal.SIGINT, tell)
    try:
        yield told.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _begun_deaf() -> Iterator[None]:
    """Processes begun within it never see an interrupt."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
