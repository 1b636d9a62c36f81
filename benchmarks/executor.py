"""How fast `phalanx.Executor` is: first results, tasks per second, and what dies on the way. Prints a table, or JSON with --json.

Four workers on two virtual nodes of a real head on this machine; a Ray of the same size in the same run with --ray, if Ray is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.cluster import BenchmarkCluster, cluster, wait_until
from phalanx.executor.executor import Executor

_COLD = """
import time, phalanx
began = time.perf_counter()
with phalanx.Executor(gpus=1, max_workers=4) as pool:
    pool.submit(lambda: 1).result()
    print(1000 * (time.perf_counter() - began))
"""
_RAY = """
import sys, time, ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
@ray.remote
def task(value):
    return value
ray.get([task.remote(index) for index in range(100)])
began, count = time.perf_counter(), int(sys.argv[1])
assert ray.get([task.remote(index) for index in range(count)]) == list(range(count))
print(count / (time.perf_counter() - began))
"""


def measure(tasks: int, runs: int, kills: int) -> dict[str, Any]:
    """Run all measurements on one head; return the figures."""
    with cluster("2x2", revive_s=0.5) as head:
        environment = os.environ | {"PHALANX_HOME": head.home}
        os.environ["PHALANX_HOME"] = head.home
        cold = []
        for _ in range(runs):
            wait_until(lambda: not any(node["jobs"] for node in head.nodes()), "the devices are free")
            cold.append(float(_program(_COLD, environment)))
        with Executor(gpus=1, max_workers=4) as pool:
            pool.submit(int).result()
            pool.wait_connected()
            warm = [_one(pool) for _ in range(50)]
            rate, lost, doubled = _many(pool, tasks)
            killed = [_killed(head, pool) for _ in range(kills)]
        memory_mib = _head_mib(head)
    return {
        "tasks": tasks,
        "tasks_per_s": round(rate),
        "first_cold_ms": round(statistics.median(cold), 1),
        "first_warm_ms": round(statistics.median(warm), 2),
        "lost": lost + sum(one[0] for one in killed),
        "doubled": doubled + sum(one[1] for one in killed),
        "killed_nodes": kills,
        "head_mib": round(memory_mib, 1),
    }


def measure_ray(tasks: int) -> float:
    """Return the tasks per second of a Ray of four workers."""
    return float(_program(_RAY, dict(os.environ), str(tasks)))


def _program(text: str, environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *words], env=environment, capture_output=True, check=True, text=True
    )
    return done.stdout.split()[-1]


def _one(pool: Executor) -> float:
    began = time.perf_counter()
    pool.submit(int).result()
    return 1000 * (time.perf_counter() - began)


def _many(pool: Executor, tasks: int) -> tuple[float, int, int]:
    """Return tasks per second, lost results, and results that came twice."""
    seen: dict[int, int] = {}
    began = time.perf_counter()
    futures = [pool.submit(_same, index) for index in range(tasks)]
    for future in futures:
        value = future.result()
        seen[value] = seen.get(value, 0) + 1
    took = time.perf_counter() - began
    return tasks / took, tasks - len(seen), sum(count - 1 for count in seen.values())


def _killed(head: BenchmarkCluster, pool: Executor) -> tuple[int, int]:
    """Kill a node in the middle of 10,000 tasks; return lost and doubled results."""
    futures = [pool.submit(_same, index) for index in range(10_000)]
    futures[2_000].result()
    head.kill_node("n1")
    values = [future.result() for future in futures]
    return len(set(range(10_000)) - set(values)), len(values) - len(set(values))


def _same(value: int) -> int:
    return value


def _head_mib(head: BenchmarkCluster) -> float:
    assert head.head is not None
    with open(f"/proc/{head.head.pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.executor", description=__doc__)
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=7, help="cold starts; their median counts")
    parser.add_argument("--kills", type=int, default=1, help="nodes killed, each in 10,000 tasks")
    parser.add_argument("--ray", action="store_true", help="the same tasks on Ray, in the same run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = measure(given.tasks, given.runs, given.kills)
    if given.ray:
        figures["ray_tasks_per_s"] = round(measure_ray(min(given.tasks, 20_000)))
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
