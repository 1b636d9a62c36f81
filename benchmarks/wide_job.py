"""One wide job on a small machine: 128 ranks on 16 virtual nodes, an all-reduce over gloo, warm parents.

    python -m benchmarks.wide_job [--virtual 16x8] [--runs 2] [--json]

The ranks are real processes, and gloo connects all pairs: 8,128 connections. A real cluster distributes this load over 16 servers, so the
times show the cost of Phalanx and torch, not the duration there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Self

from benchmarks.cluster import ROOT, BenchmarkCluster, cluster
from benchmarks.figures import (
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)

SCRIPT = os.path.join(ROOT, "examples", "bare_allreduce", "train.py")
STEPS = 3
"""Steps of the example; each has five all-reduces."""

HANG_S = 600.0
LOOK_S = 0.25
MIB = 2**20


@dataclass(slots=True)
class PeakMemory:
    """Context that measures the peak memory use of the machine, of all processes, without the page cache."""

    most_bytes: int = 0
    _begun_bytes: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._begun_bytes = available_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most_bytes = max(self.most_bytes, self._begun_bytes - available_bytes())


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--virtual", default="16x8", help="nodes x devices")
    given = parser.parse_args()
    running, over, memory = [], [], []
    for run in range(given.runs or 2):
        with PeakMemory() as taken, cluster(given.virtual) as head:
            began_s = time.time()
            job = submit_wide(head, given.virtual)
            view = head.wait_for_state(job, "succeeded", "failed")
            over.append(time.time() - began_s)
            if view["state"] != "succeeded":
                raise RuntimeError(f"the wide job failed: {head.history(job)[-1]}")
            running.append(next(line["at_s"] for line in head.history(job) if line["kind"] == "running") - began_s)
        memory.append(taken.most_bytes / MIB)
        print_progress(
            f"{given.virtual}, run {run + 1}: all run after {running[-1]:.1f} s, over after {over[-1]:.1f} s, {memory[-1]:.0f} MiB"
        )
    figures = [
        plain_figure(f"{given.virtual}: submit to all ranks running, warm parents made on the way", running, "s"),
        plain_figure(f"{given.virtual}: submit to over, with {STEPS} steps of all-reduces", over, "s"),
        plain_figure(f"{given.virtual}: most memory taken, supervisors and head included", memory, "MiB"),
    ]
    print_report("One wide job", figures, as_json=given.json)


def submit_wide(head: BenchmarkCluster, virtual: str) -> str:
    """Submit the all-reduce to all devices of the cluster; return the id of the job."""
    return head.submit(run=[sys.executable, SCRIPT, str(STEPS)], gpus=virtual, name="wide", warm=True)


def available_bytes() -> int:
    """Return the memory that is available without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


if __name__ == "__main__":
    main()
