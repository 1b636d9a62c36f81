"""What a launched DDP step costs over the same script by hand: pairs of gangs that alternate in slices of a quarter of a second.

A pair is two gangs of two ranks that live at the same time, one started by hand and one launched. Only one of them makes steps; the other waits
at a step boundary. So both sides see the same seconds of the machine. While the gang by hand steps, head, supervisor and keepers are stopped
(SIGSTOP): their cost falls into the slices of the launched gang alone, with what they must make up for. See docs/benchmarks.md for the biases.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.cluster import ROOT, BenchmarkCluster, cluster, command_words, free_port
from benchmarks.figures import Figure, at_most, plain_figure, print_progress

RANKS = 2
SLICE_STEPS = 16  # some 0.25 s: long enough for several wake-ups, far below a lease
SLICES = 12  # of each side in a pair, after the warm-up
WARM_SLICES = 2
HANG_S = 120.0
BOOTSTRAPS = 2000
_SCRIPT = os.path.join(ROOT, "benchmarks", "step_rank.py")


@dataclass(slots=True)
class SlicedGang:
    """Two ranks that step when told to. `folder` has their FIFOs."""

    folder: str
    _done: int = -1
    _go: list[int] = field(default_factory=list)
    _text: str = ""

    def open(self) -> None:
        """Create the FIFOs. They are opened for both directions, so that no side waits for the other."""
        names = ["done", *(f"go-{rank}" for rank in range(RANKS))]
        for name in names:
            os.mkfifo(os.path.join(self.folder, name))
        self._done, *self._go = (os.open(os.path.join(self.folder, name), os.O_RDWR) for name in names)

    def step(self, steps: int) -> float:
        """Make a slice; return its seconds per step on rank 0.

        Raises:
            TimeoutError: a rank did not answer.
        """
        self._order(steps)
        found: dict[int, float] = {}
        while len(found) < RANKS:
            if not select.select([self._done], [], [], HANG_S)[0]:
                raise TimeoutError(f"the ranks in {self.folder} did not finish a slice in {HANG_S:.0f} s")
            *lines, self._text = (self._text + os.read(self._done, 4096).decode()).split("\n")
            found.update({int(rank): float(seconds) for rank, seconds in map(str.split, lines)})
        return found[0] / steps

    def end(self) -> None:
        """Let the ranks end."""
        self._order(0)

    def close(self) -> None:
        """Close the FIFOs."""
        for fd in (self._done, *self._go):
            os.close(fd)

    def _order(self, steps: int) -> None:
        for fd in self._go:
            os.write(fd, f"{steps}\n".encode())


def step_overhead(pairs: int) -> list[Figure]:
    """Measure pairs; the figure of a pair is the median, over its slices, of a launched slice over the slice by hand beside it."""
    order = random.Random(0)
    ratios, by_hand_ms, launched_ms = [], [], []
    load = os.getloadavg()[
        0
    ]  # of other work: with any, the figure is how the kernel shares the cores, not what a launch costs
    with cluster("1x2") as head:
        for pair in range(pairs):
            hand, launched = _pair(head, order)
            ratios.append(statistics.median(b / a for a, b in zip(hand, launched, strict=True)))
            by_hand_ms.append(statistics.median(hand) * 1000)
            launched_ms.append(statistics.median(launched) * 1000)
            print_progress(
                f"DDP step, pair {pair + 1}: by hand {by_hand_ms[-1]:.2f} ms, launched {launched_ms[-1]:.2f} ms, {(ratios[-1] - 1) * 100:+.2f} %"
            )
    percent = [(ratio - 1) * 100 for ratio in ratios]
    low, high = median_bounds(percent)
    return [
        at_most(
            "launched DDP step over the script by hand, median of pairs",
            percent,
            "%",
            1.0,
            note=f"one-sided 95 % bounds of the median {low:.2f} and {high:.2f} % over {pairs} pairs; load average {load:.1f} at the begin",
        ),
        at_most("the same, upper 95 % bound", [high], "%", 1.0),
        plain_figure("DDP step by hand", by_hand_ms, "ms"),
        plain_figure("DDP step launched", launched_ms, "ms"),
    ]


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Return the one-sided 95 % bounds of the median, below and above, by bootstrap."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return medians[int(0.05 * BOOTSTRAPS)], medians[int(0.95 * BOOTSTRAPS)]


def _pair(head: BenchmarkCluster, order: random.Random) -> tuple[list[float], list[float]]:
    """Return the seconds per step of each slice: by hand, and launched, of which those with the same index ran one after the other."""
    with _gang(head) as hand, _gang(head) as launched:
        job = head.submit(run=[sys.executable, _SCRIPT, launched.folder], gpus="1x2", name="ddp")
        with _by_hand(hand.folder):
            for gang in (hand, launched):
                for _ in range(WARM_SLICES):
                    gang.step(SLICE_STEPS)
            ours = _control_processes(head)
            found: tuple[list[float], list[float]] = ([], [])
            for _ in range(SLICES):
                for side in order.sample((0, 1), 2):
                    if side:
                        found[1].append(launched.step(SLICE_STEPS))
                        continue
                    with _stopped(ours):
                        found[0].append(hand.step(SLICE_STEPS))
            hand.end()
            launched.end()
        if head.wait_for_state(job, "succeeded", "failed")["state"] != "succeeded":
            raise RuntimeError(f"the launched script failed: {head.history(job)[-1]}")
    return found


@contextlib.contextmanager
def _gang(head: BenchmarkCluster) -> Iterator[SlicedGang]:
    with tempfile.TemporaryDirectory(dir=head.home) as folder:
        gang = SlicedGang(folder)
        gang.open()
        try:
            yield gang
        finally:
            gang.close()


@contextlib.contextmanager
def _by_hand(folder: str) -> Iterator[None]:
    """Run the script by hand; at the end its ranks must end by themselves, after an error they are killed."""
    port, ranks = free_port(), []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",  # as Phalanx finds out for ranks of one node
            "WORLD_SIZE": str(RANKS),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        # In sessions of their own, as launched ranks: where sessions are scheduled as groups, a session shares a core with others as one.
        ranks.append(subprocess.Popen([sys.executable, _SCRIPT, folder], env=environment, start_new_session=True))
    try:
        yield
        for process in ranks:
            if process.wait(timeout=HANG_S):
                raise RuntimeError("the script by hand failed")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _control_processes(head: BenchmarkCluster) -> list[int]:
    """Return head, supervisor, spawner and keepers: everything of Phalanx but the ranks."""
    assert head.head is not None
    nodes = [pid for name in head.node_records() for pid in head.node_pids(name)]
    return [head.head.pid, *(pid for pid in nodes if _SCRIPT not in command_words(pid))]


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    """Stop the processes meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
