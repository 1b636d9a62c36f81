"""Benchmark of launch and recovery: the time until a job runs, and until it runs again.

    python -m benchmarks.launch [--json] [--runs N] [--only first_line,step,crash,node,silent] [--pairs 30]

Figures of peers that cannot run here (Slurm, Kubernetes, restart of torchrun) are quoted. The bare fork runs interleaved, in the same minutes; a DDP
step by hand in the same seconds (`benchmarks.step_pairs`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.cluster import (
    BenchmarkCluster,
    cluster,
    wait_until,
)
from benchmarks.figures import (
    Figure,
    argument_parser,
    at_most,
    plain_figure,
    print_progress,
    print_report,
)
from benchmarks.step_pairs import step_overhead

WORKER = "import time; print('up', flush=True); time.sleep(600)"


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--pairs", type=int, default=30, help="interleaved pairs of the step overhead")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    parts: dict[str, Callable[[], list[Figure]]] = {
        "first_line": lambda: _first_line(given.runs or 15),
        "step": lambda: step_overhead(given.pairs),
        "crash": lambda: _crash(given.runs or 7),
        "node": lambda: _node_death(given.runs or 5, silent=False),
        "silent": lambda: _node_death(given.runs or 3, silent=True),
    }
    figures = [figure for name, measure in parts.items() if not only or name in only for figure in measure()]
    print_report("Launch and recovery", figures, as_json=given.json)


def _first_line(runs: int) -> list[Figure]:
    bare, launched, pairs = [], [], []
    phalanx = [
        os.path.join(os.path.dirname(sys.executable), "phalanx"),
        "run",
        "--gpus",
        "1",
        "--",
        "sh",
        "-c",
        "echo ready",
    ]
    with cluster("1x4") as head:
        for run in range(runs + 1):
            fork_s = _until_first_line(["sh", "-c", "echo ready"], head)
            phalanx_s = _until_first_line(phalanx, head)
            if run:  # the first pair warms the page cache
                bare.append(fork_s * 1000)
                launched.append(phalanx_s * 1000)
                pairs.append(phalanx_s - fork_s)
                print_progress(f"first line, run {run}: {launched[-1]:.0f} ms, bare fork {bare[-1]:.1f} ms")
    return [
        at_most(
            "`phalanx run` exec to first line of output", launched, "ms", 150, peer="Slurm 1 to 3 s, Kubernetes 8 s"
        ),
        plain_figure("bare fork to first line", bare, "ms"),
    ]


def _until_first_line(command: list[str], head: BenchmarkCluster) -> float:
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=head.environment, cwd=head.home
    )
    if process.stdout is None or not process.stdout.readline():
        raise RuntimeError(f"{command} printed nothing, exit code {process.wait()}")
    seconds = time.monotonic() - began
    process.stdout.read()
    process.wait(timeout=60)
    return seconds


def _crash(runs: int) -> list[Figure]:
    """Kill one rank of 2 x 2; measure until all ranks of the next generation are exec'd, and have printed."""
    running, printed = [], []
    with cluster("2x2") as head:
        for run in range(runs):
            job = head.submit(run=[sys.executable, "-c", WORKER], gpus="2x2", name="gang")
            wait_until(lambda: _lines_up(head, job) == 4, "every rank has printed", every_s=0.01)
            at_s = time.time()
            os.kill(_a_rank(head), signal.SIGKILL)
            line = wait_until(lambda: _running_line(head, job, after_s=at_s), "all ranks run again", every_s=0.01)
            running.append(line["at_s"] - at_s)
            wait_until(lambda: _lines_up(head, job) == 8, "every rank has printed again", every_s=0.01)
            printed.append(time.time() - at_s)
            print_progress(f"rank crash, run {run + 1}: all ranks run again after {running[-1]:.2f} s")
            head.call("POST", f"/v1/jobs/{job}/cancel")
            head.wait_for_state(job, "cancelled")
    return [
        at_most(
            "rank crash to all ranks exec'd again", running, "s", 3.0, peer="torchrun 11 to 15 s, imports included"
        ),
        plain_figure("the same, to a line from every rank", printed, "s"),
    ]


def _node_death(runs: int, *, silent: bool) -> list[Figure]:
    """Send SIGKILL or SIGSTOP (a silent node) to a whole node; measure until the gang runs on another."""
    running = []
    for run in range(runs):
        with cluster("3x2") as head:
            job = head.submit(run=[sys.executable, "-c", WORKER], gpus="2x2", name="gang")
            _all_run(head, job, 0)
            node = head.job(job)["nodes"][1]
            pids = head.node_pids(node)
            at_s = head.kill_node(node, signal.SIGSTOP if silent else signal.SIGKILL)
            line = wait_until(lambda: _running_line(head, job, after_s=at_s), "the gang runs elsewhere", every_s=0.01)
            running.append(line["at_s"] - at_s)
            print_progress(
                f"node {'silent' if silent else 'killed'}, run {run + 1}: running elsewhere after {running[-1]:.2f} s"
            )
            if silent:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):  # it ended when its parent woke
                        os.kill(pid, signal.SIGCONT)
    if silent:
        return [
            at_most(
                "silent node (SIGSTOP) to running elsewhere",
                running,
                "s",
                15.0,
                peer="Nomad 20 s, Slurm 300 s, Kubernetes 350 s",
            )
        ]
    return [
        at_most(
            "node killed (SIGKILL) to running elsewhere",
            running,
            "s",
            5.0,
            peer="Nomad 20 s, Slurm 300 s, Kubernetes 350 s",
        )
    ]


def _all_run(head: BenchmarkCluster, job: str, after_s: float) -> None:
    wait_until(lambda: _running_line(head, job, after_s=after_s), "all ranks run")


def _running_line(head: BenchmarkCluster, job: str, *, after_s: float) -> dict[str, Any] | None:
    return next((line for line in head.history(job) if line["kind"] == "running" and line["at_s"] > after_s), None)


def _lines_up(head: BenchmarkCluster, job: str) -> int:
    chunks = head.call("GET", f"/v1/jobs/{job}/logs?rank=all")["chunks"]
    return sum(chunk["text"].count("up\n") for chunk in chunks)


def _a_rank(head: BenchmarkCluster) -> int:
    for name in head.node_records():
        for pid in head.node_pids(name):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if WORKER.encode() in words:
                return pid
    raise RuntimeError("no rank of the gang is running")


if __name__ == "__main__":
    main()
