"""Restart of a killed head with 10,000 jobs of all kinds: the time from its exec to the first answer about jobs, and its parts.

python -m benchmarks.restart [--json] [--runs N]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks.cluster import BenchmarkCluster, cluster, wait_until
from benchmarks.figures import (
    Figure,
    argument_parser,
    at_most,
    plain_figure,
    print_progress,
    print_report,
)
from phalanx.store.sql.sqlite.store import SqliteStore

JOBS = 10_000
RUNNING = 8
ENDED = 4_000  # cancelled; the rest waits
ARRAY = 1_000  # elements of one submit
TARGET_S = 2.0


def main() -> None:
    """Measure and print."""
    given = argument_parser(__doc__ or "").parse_args()
    print_report("Restart", measure_restarts(given.runs or 5), as_json=given.json)


def measure_restarts(runs: int) -> list[Figure]:
    """Return the median of some restarts, and its parts."""
    serving, busy, imports, opening, loading = [], [], [], [], []
    with cluster("1x8", lease_s=120.0) as head:
        submit_jobs(head)
        for run in range(runs):
            head.kill_head()
            opened_s, loaded_s = store_parts(head.home)
            opening.append(opened_s)
            loading.append(loaded_s)
            imports.append(import_s())
            began = time.monotonic()
            head.start(wait_nodes=False)
            newest = head.call("GET", "/v1/jobs?limit=1")["jobs"]
            serving.append(time.monotonic() - began)
            busy.append(cpu_s(head))
            assert newest, "the jobs are there"
            print_progress(f"run {run + 1}: serving after {serving[-1]:.2f} s")
        counts = head.call("GET", "/v1/overview")["counts"]
        assert sum(counts.values()) >= JOBS, counts
        assert counts["running"] == RUNNING, counts
    mixed = f"{RUNNING} running, {ENDED} ended, the others pending"
    return [
        at_most(
            f"head killed, started with {JOBS} jobs of all kinds: exec to the first answer about jobs",
            serving,
            "s",
            TARGET_S,
            note=mixed,
        ),
        plain_figure("CPU time that the head had used by then", busy, "s"),
        plain_figure("of it: Python and its imports", imports, "s"),
        plain_figure("of it: the database opened, and checked whole", opening, "s"),
        plain_figure("of it: the world loaded", loading, "s"),
    ]


def submit_jobs(head: BenchmarkCluster) -> None:
    """Submit jobs: some run, some have ended, some wait."""
    for _ in range(RUNNING):
        head.submit(run=["sleep", "100000"], gpus=1)
    wait_until(lambda: head.call("GET", "/v1/overview")["counts"]["running"] == RUNNING, "they run")
    arrays = [
        head.call(
            "POST", "/v1/jobs", {"run": ["sleep", "1"], "gpus": 8, "workdir": head.home, "array": f"0-{ARRAY - 1}"}
        )["array_id"]
        for _ in range((JOBS - RUNNING + ARRAY - 1) // ARRAY)
    ]
    for array in arrays[: ENDED // ARRAY]:
        head.call("POST", f"/v1/jobs/{array}/cancel", {"why": "the benchmark"})
    wait_until(lambda: head.call("GET", "/v1/overview")["counts"]["cancelled"] >= ENDED, "they have ended")


def cpu_s(head: BenchmarkCluster) -> float:
    """Return the CPU seconds that the head has used, which do not depend on other load."""
    assert head.head is not None
    with open(f"/proc/{head.head.pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc(5)


def store_parts(home: str) -> tuple[float, float]:
    """Return the seconds to open a copy of the database of the head, and to load it."""
    folder = tempfile.mkdtemp(prefix="phalanx-restart-")
    try:
        for name in ("phalanx.db", "phalanx.db-wal"):
            shutil.copy(os.path.join(home, name), folder)
        began = time.monotonic()
        store = SqliteStore(os.path.join(folder, "phalanx.db"))
        opened = time.monotonic()
        store.load()
        loaded = time.monotonic()
        store.close()
    finally:
        shutil.rmtree(folder)
    return opened - began, loaded - opened


def import_s() -> float:
    """Return the seconds of a process that imports the modules of a head and ends."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import phalanx.app.head"], check=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
