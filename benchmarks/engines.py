"""Compare the engines with each other, and with the native way of each engine to start a job, interleaved in the same minutes.

    python -m benchmarks.engines [--only local,joined,ray,slurm] [--figures line,jobs,join,death,cut,memory] [--runs 7] [--json]

`local` is three virtual nodes of this machine. The others are three hosts of the lab (docs/lab.md), which needs root: servers that joined, a
Ray cluster started by Phalanx with a plain one for comparison, and Slurm with its default timers except `SlurmdTimeout`. An engine that cannot
run here is skipped with the reason. A pause of random length precedes each run, because Slurm checks its queue periodically.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from benchmarks import engine_clusters, engine_peers
from benchmarks.cluster import BenchmarkCluster, cluster, wait_until
from benchmarks.control import submit_load, succeeded_jobs
from benchmarks.engine_clusters import PHALANX, LabCluster
from benchmarks.figures import (
    Figure,
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)
from tests.lab.lab import Lab
from tests.lab.needs import why_not
from tests.lab.slurm import why_no_slurm

ENGINES: Final = ("local", "joined", "ray", "slurm")
FIGURES: Final = ("line", "jobs", "join", "death", "cut", "memory")
RUNS: Final = 7
LOSSES: Final = 3  # power cuts and cable cuts: each takes almost a minute, with the recovery
TRUE_JOBS: Final = {"local": 300, "joined": 300, "ray": 300, "slurm": 40}
SUBMITTERS: Final = 8  # connections of the client
BEAT_S: Final = 3.0  # interval of the batch scheduler of Slurm (SchedulerParameters, batch_sched_delay); runs start after one interval
READY: Final = ["sh", "-c", "echo ready"]


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--figures", default="", help=f"comma-separated, of {','.join(FIGURES)}; all without")
    given = parser.parse_args()
    names = [name for name in ENGINES if not given.only or name in given.only.split(",")]
    wanted = set(filter(None, given.figures.split(","))) or set(FIGURES)
    figures: list[Figure] = []
    for name in names:
        why = _why_not(name)
        if why:
            print_progress(f"skipped {name}: {why}")
            continue
        figures += _measure(name, wanted, given.runs or RUNS)
    print_report("Engines", figures, as_json=given.json)


def _why_not(name: str) -> str:
    if name == "local":
        return ""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return why_not() or (why_no_slurm() if name == "slurm" else "")


def _beside_peers(name: str, wanted: set[str], runs: int) -> list[Figure]:
    with _in_the_lab(name) as head:
        theirs = head.memory_mib()[1]  # before the daemons for comparison start
        with engine_peers.native_ways(name, head.lab) as peers:
            figures = _lines(name, head, runs, peers.lines) if "line" in wanted else []
            figures += _jobs(name, head, peers.jobs) if "jobs" in wanted else []
            figures += _joins(name, head, runs, peers.joins) if "join" in wanted and head.join_arguments else []
        if "memory" in wanted:
            ours = head.memory_mib()[0]
            figures.append(plain_figure(f"{name}: head, and what drives the engine, after all jobs", [ours], "MiB"))
            figures += [plain_figure(f"{name}: the engine's own daemons beside it", [theirs], "MiB")] if theirs else []
        return figures


def _measure(name: str, wanted: set[str], runs: int) -> list[Figure]:
    """Measure one engine; with a new cluster for each loss, because Slurm takes minutes to recover a lost node."""
    if name == "local":
        with cluster("3x2") as head:
            figures = _lines(name, head, runs, {}) if "line" in wanted else []
            return figures + (_jobs(name, head, {}) if "jobs" in wanted else []) + _local_losses(wanted)
    figures = _beside_peers(name, wanted, runs) if wanted - {"death", "cut"} else []
    return figures + [_losses(name, kind, min(runs, LOSSES)) for kind in ("death", "cut") if kind in wanted]


@contextlib.contextmanager
def _in_the_lab(name: str) -> Iterator[LabCluster]:
    with Lab(size=3, gpus=2 if name == "slurm" else 0) as lab, getattr(engine_clusters, name)(lab) as head:
        yield head


def _lines(name: str, head: BenchmarkCluster, runs: int, peers: dict[str, Callable[[], float]]) -> list[Figure]:
    """Measure from the exec of the command to the first line of output; the ways alternate in a random order for each run."""
    ways: dict[str, Callable[[], float]] = {"phalanx run": lambda: _first_line(head), **peers}
    order = random.Random(0)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(runs + 1):
        for way in order.sample(list(ways), len(ways)):
            time.sleep(order.uniform(0.0, 1.0) + (BEAT_S if name == "slurm" else 0.0))
            took_s = ways[way]()
            if run:  # the first of each warms the page cache
                seconds[way].append(took_s)
                print_progress(f"{name}, {way} to its first line, run {run}: {took_s:.2f} s")
    return [plain_figure(f"{name}: {way}, exec to first line", took, "s") for way, took in seconds.items()]


def _first_line(head: BenchmarkCluster) -> float:
    command = head.on_head_host([*PHALANX, "run", "--gpus", "1", "--", *READY])
    return engine_peers.seconds_to_line(command, environment=head.environment, folder=head.home)


def _have_succeeded(head: BenchmarkCluster, count: int) -> bool:
    return succeeded_jobs(head) >= count


def _jobs(name: str, head: BenchmarkCluster, peers: dict[str, Callable[[], float]]) -> list[Figure]:
    """Measure jobs of one `true` on all nodes, from the first submit to the last end."""
    rates = []
    for _ in range(2):
        before, began = succeeded_jobs(head), time.monotonic()
        submit_load(head, TRUE_JOBS[name], SUBMITTERS, run_line="true", gpus=1)
        target = before + TRUE_JOBS[name]
        wait_until(partial(_have_succeeded, head, target), "all jobs have ended", limit_s=300.0)
        rates.append(TRUE_JOBS[name] / (time.monotonic() - began))
        print_progress(f"{name}: {rates[-1]:.1f} jobs a second")
    figures = [plain_figure(f"{name}: jobs of one `true`", rates, "/s", note=f"{TRUE_JOBS[name]} jobs")]
    return figures + [plain_figure(f"{name}: {way}, jobs of one `true`", [rate()], "/s") for way, rate in peers.items()]


def _joins(name: str, head: LabCluster, runs: int, peers: dict[str, Callable[[], float]]) -> list[Figure]:
    """Measure from the exec of `phalanx join` on a server until its node is up."""
    host = head.worker_hosts[0]
    seconds: dict[str, list[float]] = {way: [] for way in ("phalanx join", *peers)}
    for _ in range(min(runs, 5)):
        head.leave(host)
        seconds["phalanx join"].append(head.join(host))
        for way, measure in peers.items():
            seconds[way].append(measure())
        print_progress(f"{name}: " + ", ".join(f"{way} {took[-1]:.2f} s" for way, took in seconds.items()))
    wait_until(lambda: host in head.nodes_up(), f"{host} is up", every_s=0.1)
    return [plain_figure(f"{name}: {way}, exec to ready", took, "s") for way, took in seconds.items()]


def _losses(name: str, kind: str, rounds: int) -> Figure:
    """Measure from the loss of one of two nodes of a gang until the gang runs elsewhere."""
    seconds = []
    for run in range(rounds):
        with _in_the_lab(name) as head:
            job = head.submit(run=["sleep", "600"], gpus="2x2", name="gang", workdir=engine_clusters.WORKDIR)
            wait_until(lambda head=head, job=job: running(head, job, 0.0), "the gang runs")  # type: ignore[misc]  # as above
            victim = next(node for node in head.job(job)["nodes"] if node in head.worker_hosts)
            at_s = time.time()
            head.lab.kill(victim) if kind == "death" else head.lab.cut(victim)
            line = wait_until(lambda head=head, job=job, at_s=at_s: running(head, job, at_s), "it runs elsewhere")  # type: ignore[misc]  # as above
            seconds.append(line["at_s"] - at_s)
            print_progress(f"{name}: {kind} of {victim}, run {run + 1}: running elsewhere after {seconds[-1]:.1f} s")
            head.lab.mend(victim)
    what = "power cut" if kind == "death" else "cable cut"
    return plain_figure(f"{name}: {what} to running elsewhere", seconds, "s", note="lease 6 s")


def _local_losses(wanted: set[str]) -> list[Figure]:
    """Measure the same for virtual nodes, which are killed or stopped with SIGSTOP."""
    figures = []
    for kind, number in (("death", signal.SIGKILL), ("cut", signal.SIGSTOP)):
        seconds = []
        for _ in range(LOSSES if kind in wanted else 0):
            with cluster("3x2") as head:
                job = head.submit(run=["sleep", "600"], gpus="2x2", name="gang")
                wait_until(lambda head=head, job=job: running(head, job, 0.0), "the gang runs")  # type: ignore[misc]  # as above
                pids = head.node_pids(head.job(job)["nodes"][1])
                at_s = head.kill_node(head.job(job)["nodes"][1], number)
                line = wait_until(lambda head=head, job=job, at_s=at_s: running(head, job, at_s), "it runs elsewhere")  # type: ignore[misc]  # as above
                seconds.append(line["at_s"] - at_s)
                subprocess.run(["kill", "-CONT", *map(str, pids)], stderr=subprocess.DEVNULL, check=False)
        if seconds:
            what = "node killed" if kind == "death" else "node silent"
            figures.append(plain_figure(f"local: {what} to running elsewhere", seconds, "s", note="lease 6 s"))
    return figures


def running(head: BenchmarkCluster, job: str, after_s: float) -> dict[str, Any] | None:
    """Return the line of the job history with all ranks running, if there is one after that time."""
    return next((line for line in head.history(job) if line["kind"] == "running" and line["at_s"] > after_s), None)


if __name__ == "__main__":
    main()
