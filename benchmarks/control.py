"""Benchmark of the control plane: durable submits, small jobs, and the restart of a killed head, and renewals of leases.

python -m benchmarks.control [--json] [--runs N] [--only submits,jobs,restart,renewals]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks import renewals
from benchmarks.cluster import (
    ROOT,
    BenchmarkCluster,
    cluster,
    wait_until,
)
from benchmarks.figures import (
    Figure,
    argument_parser,
    at_least,
    at_most,
    plain_figure,
    print_progress,
    print_report,
)
from phalanx.node.processes.proctable import TICKS_PER_S, descendants, read_table

SUBMITS = 4000
CONNECTIONS = 64
TRUE_JOBS = 600
PENDING = 10_000


def main() -> None:
    """Measure and print."""
    given = argument_parser(__doc__ or "").parse_args()
    only = set(filter(None, given.only.split(",")))
    figures: list[Figure] = []
    if not only or "submits" in only:
        figures.append(_submits(given.runs or 3))
    if not only or "jobs" in only:
        figures += _true_jobs(given.runs or 3)
    if not only or "restart" in only:
        figures += _restart(given.runs or 5)
    if not only or "renewals" in only:
        figures += renewals.measure(given.runs or 2)
    print_report("Control plane", figures, as_json=given.json)


def _submits(runs: int) -> Figure:
    rates = []
    with cluster("1x4") as head:
        head.call("POST", "/v1/nodes/n0/drain", {"why": "benchmark", "cordon_only": True})
        for run in range(runs):
            seconds = submit_load(head, SUBMITS, CONNECTIONS)
            rates.append(SUBMITS / seconds)
            print_progress(f"submits, run {run + 1}: {rates[-1]:,.0f} /s")
    return at_least(
        "durable submits over HTTP",
        rates,
        "/s",
        1000,
        peer="Slurm 118 /s by REST, 27 /s by sbatch",
        note=f"{SUBMITS} submits over {CONNECTIONS} connections, client on the same two cores",
    )


def _true_jobs(runs: int) -> list[Figure]:
    """Measure jobs a second, and what each costs the head, the supervisor, and the processes that start the ranks, with the ranks."""
    rates: list[float] = []
    costs: dict[str, list[float]] = {"head": [], "supervisor": [], "keepers and ranks": []}
    with cluster("1x16") as head:
        supervisor = int(head.node_records()["n0"]["pid"])
        for run in range(runs):
            before = _processor_times(head, supervisor)
            began = time.monotonic()
            submit_load(head, TRUE_JOBS, 16, run_line="true", gpus=1)
            wait_until(lambda: not _any_unfinished(head), "all jobs ended", every_s=0.1)
            rates.append(TRUE_JOBS / (time.monotonic() - began))
            if succeeded_jobs(head) != TRUE_JOBS * (run + 1):
                raise RuntimeError("not all jobs succeeded")
            for name, after_s in _processor_times(head, supervisor).items():
                costs[name].append((after_s - before[name]) / TRUE_JOBS * 1000)
            spent = ", ".join(f"{name} {found[-1]:.1f} ms" for name, found in costs.items())
            print_progress(f"jobs of one `true`, run {run + 1}: {rates[-1]:,.0f} /s; {spent} of processor time a job")
    rate = at_least(
        "jobs of one `true`, submitted to ended",
        rates,
        "/s",
        300,
        peer="Slurm 14 /s, HyperQueue 301 /s",
        note=f"{TRUE_JOBS} jobs, one node of 16 virtual devices",
    )
    return [
        rate,
        *(plain_figure(f"the same, processor time a job: {name}", found, "ms") for name, found in costs.items()),
    ]


def _any_unfinished(head: BenchmarkCluster) -> bool:
    """Return whether a job waits or runs. The overview, which views all jobs that run, would cost the head a sixth of its time."""
    return bool(head.call("GET", "/v1/jobs?state=pending&state=running&limit=1")["jobs"])


def _processor_times(head: BenchmarkCluster, supervisor: int) -> dict[str, float]:
    """Return the seconds of processor time that each part has used so far."""
    assert head.head is not None
    table = read_table()
    below = descendants(table, [supervisor])
    ticks = {
        "head": table[head.head.pid].cpu_ticks - table[head.head.pid].waited_cpu_ticks,
        "supervisor": table[supervisor].cpu_ticks - table[supervisor].waited_cpu_ticks,
        "keepers and ranks": sum(table[pid].cpu_ticks for pid in below),
    }
    return {name: found / TICKS_PER_S for name, found in ticks.items()}


def _restart(runs: int) -> list[Figure]:
    to_serving, to_scheduled = [], []
    with cluster("1x4") as head:
        head.call("POST", "/v1/nodes/n0/drain", {"why": "benchmark", "cordon_only": True})
        submit_load(head, PENDING, CONNECTIONS)
        for run in range(runs):
            head.kill_head()
            began = time.monotonic()
            head.start(wait_nodes=False)
            to_serving.append(time.monotonic() - began)
            wait_until(
                lambda: head.call("GET", "/v1/jobs?limit=1")["jobs"][0]["detail"], "the newest job was scheduled"
            )
            to_scheduled.append(time.monotonic() - began)
            print_progress(f"restart with {PENDING} jobs, run {run + 1}: serving after {to_serving[-1]:.2f} s")
    return [
        at_most(
            f"head killed, restarted with {PENDING} jobs: exec to serving",
            to_serving,
            "s",
            2.0,
            peer="Ray loses all without Redis",
        ),
        plain_figure("the same, to every pending job judged", to_scheduled, "s"),
    ]


def succeeded_jobs(head: BenchmarkCluster) -> int:
    """Return the number of jobs that have succeeded."""
    counts = head.call("GET", "/v1/overview")["counts"]
    return int(counts["succeeded"])


def submit_load(
    head: BenchmarkCluster, count: int, connections: int, *, run_line: str = "sleep 1000", gpus: int = 4
) -> float:
    """Submit from another process, as a client would; return the seconds from the first request to the last answer."""
    body = {"run": [*run_line.split()], "gpus": gpus, "workdir": head.home, "name": "bench"}
    command = [sys.executable, "-m", "benchmarks.control", "--as-client"]
    order = {"port": head.port, "token": head.token(), "count": count, "connections": connections, "body": body}
    done = subprocess.run(
        head.on_head_host(command),
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "src")},
    )
    return float(json.loads(done.stdout)["seconds"])


# ---- the client process: plain HTTP/1.1 over asyncio streams, so that it uses little CPU compared with the head ---------


async def _client(order: dict[str, Any]) -> float:
    body = json.dumps(order["body"]).encode()
    left = iter(range(order["count"]))
    began = time.monotonic()

    async def one_connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", order["port"])
        for number in left:
            writer.write(
                (
                    f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{order['port']}\r\nAuthorization: Bearer {order['token']}\r\n"
                    f"Content-Type: application/json\r\nIdempotency-Key: {began}-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
                ).encode()
                + body
            )
            status = await reader.readline()
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            reply = await reader.readexactly(length)
            if b" 201 " not in status:
                raise RuntimeError(f"{status!r} {reply[:300]!r}")
        writer.close()

    await asyncio.gather(*(one_connection() for _ in range(order["connections"])))
    return time.monotonic() - began


if __name__ == "__main__":
    if sys.argv[1:] == ["--as-client"]:
        sys.stdout.write(json.dumps({"seconds": asyncio.run(_client(json.load(sys.stdin)))}))
    else:
        main()
