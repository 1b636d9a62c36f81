"""Run many seeds on several processes and add up their results."""

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
from functools import partial
from types import FrameType

from phalanx.simulator.drill.coverage import Coverage
from phalanx.simulator.drill.seed_run import EVENTS, SeedResult, run_seed


@dataclass(slots=True)
class DrillReport:
    """The sum of many seeds.

    Attributes:
        events: counted events of all seeds.
        on_sqlite: seeds that used the SQLite store.
        failed_seeds: seeds with violations.
        cpu_s: CPU time of all processes.
        wall_s: wall time.
    """

    seeds: int = 0
    events: int = 0
    faults: int = 0
    on_sqlite: int = 0
    failed_seeds: list[SeedResult] = field(default_factory=list)
    coverage: Coverage = field(default_factory=lambda: Coverage().picklable())
    cpu_s: float = 0.0
    wall_s: float = 0.0
    traces: dict[int, str] = field(default_factory=dict)

    def add(self, result: SeedResult) -> None:
        """Add one seed."""
        self.seeds += 1
        self.events += result.events
        self.faults += result.faults
        self.on_sqlite += result.store == "sqlite"
        self.cpu_s += result.cpu_s
        self.coverage.add(result.coverage)
        self.traces[result.seed] = result.trace
        if result.violations:
            self.failed_seeds.append(result)

    @property
    def by_kind(self) -> dict[str, int]:
        """Number of injected faults by kind."""
        return {kind: sum(counts.values()) for kind, counts in sorted(self.coverage.faults.items())}

    @property
    def trace(self) -> str:
        """Hash of all seeds' traces in order."""
        lines = "".join(f"{seed} {self.traces[seed]}\n" for seed in sorted(self.traces))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def as_dict(self) -> dict[str, object]:
        """Return the summary for `--json`."""
        return {
            "seeds": self.seeds,
            "events": self.events,
            "faults": self.faults,
            "by_kind": self.by_kind,
            "violations": sum(len(one.violations) for one in self.failed_seeds),
            "seconds": round(self.wall_s, 3),
        }


def run_campaign(
    first: int,
    seeds: int,
    *,
    events: int = EVENTS,
    services: bool = False,
    mig: bool = False,
    resources: bool = False,
    pools: bool = False,
    processes: int = 1,
    on_result: Callable[[SeedResult], None] = lambda _: None,
) -> DrillReport:
    """Run `seeds` seeds from `first`; call `on_result` after each. On SIGINT it stops its processes and raises KeyboardInterrupt."""
    report, begun_s = DrillReport(), time.monotonic()
    if processes <= 1 or seeds == 1:
        for seed in range(first, first + seeds):
            _add_result(
                report,
                run_seed(seed, events=events, services=services, mig=mig, resources=resources, pools=pools),
                on_result,
            )
    else:
        run = partial(run_seed, events=events, services=services, mig=mig, resources=resources, pools=pools)
        _run_parallel(report, range(first, first + seeds), run, min(processes, seeds), on_result)
    report.failed_seeds.sort(key=lambda one: one.seed)
    report.wall_s = time.monotonic() - begun_s
    return report


def _add_result(report: DrillReport, result: SeedResult, done: Callable[[SeedResult], None]) -> None:
    report.add(result)
    done(result)


def _run_parallel(
    report: DrillReport,
    seeds: range,
    run: Callable[[int], SeedResult],
    processes: int,
    done: Callable[[SeedResult], None],
) -> None:
    spawned = multiprocessing.get_context("spawn")  # fork is unsafe with the caller's threads
    with _interrupt_flag() as interrupted:
        pool = ProcessPoolExecutor(processes, mp_context=spawned)
        try:
            with _sigint_blocked():  # `submit` starts the processes
                futures: list[Future[SeedResult]] = [pool.submit(run, seed) for seed in seeds]
            for future in as_completed(futures):
                if interrupted():
                    raise KeyboardInterrupt
                _add_result(report, future.result(), done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Record SIGINT in a flag instead of raising, since KeyboardInterrupt at any point could leave a lock of the pool taken.

    A signal mask is not enough: another thread (of NumPy) receives the signal, and Python raises it here. A second SIGINT raises at once.
    """
    received = threading.Event()

    def record(number: int, frame: FrameType | None) -> None:
        del number, frame
        if received.is_set():
            raise KeyboardInterrupt
        received.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield received.is_set
        return
    before = signal.signal(signal.SIGINT, record)
    try:
        yield received.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT for processes started within the context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
