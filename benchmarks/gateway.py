"""What the gateway costs and what its routing finds, beside a bare aiohttp proxy and peers in the same run. Prints a table, or JSON with --json.

Processor time is the scheduler's own account of each process (`schedstat`), which other work on the machine disturbs least. Latencies are disturbed:
the gateways take turns request by request, and what was asked without a gateway is subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.cluster import free_port
from benchmarks.figures import Figure, at_least, at_most, plain_figure, print_progress, print_report
from benchmarks.gateway_load import KEY, Connection, ask_many, request_bytes
from benchmarks.gateway_peers import ComparedGateway, commands, start_gateway
from benchmarks.gateway_trace import conversations, decision_ms, replay
from benchmarks.gateway_trace_cache import compare_reads
from tests.gateway_rig import EngineProcess, GatewayRig, gateway_rig

PARTS = ("latency", "cpu", "held", "cold", "decision", "trace", "caches")
UPSTREAMS = 2
CONTRACT = (
    "added_p50_ms",
    "added_p99_ms",
    "cpu_per_stream_ms",
    "ratio_aiohttp",
    "ratio_litellm",
    "streams_held",
    "failed_cold",
    "prefix_hit_share",
)


@contextlib.contextmanager
def upstreams(count: int) -> Iterator[list[int]]:
    """Run upstreams in one process of their own; returns their ports."""
    ports = [free_port() for _ in range(count)]
    words = [sys.executable, "-m", "benchmarks.gateway_upstream", *map(str, ports)]
    process = subprocess.Popen(words)
    try:
        until_s = time.monotonic() + 60
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/health", timeout=5),
            ):
                break
            if time.monotonic() > until_s:
                raise RuntimeError("the upstream does not answer")
            time.sleep(0.05)
        yield ports
    finally:
        process.kill()
        process.wait()


async def start_all(rig: GatewayRig, ports: list[int], only: set[str], folder: Path) -> list[ComparedGateway]:
    """Start the gateways that are installed, ours first. `folder`: for their configuration and logs."""
    for number, port in enumerate(ports, 1):
        rig.engines[number] = EngineProcess(number=number, port=port, process=None)
    found = []
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for name, (words, port) in commands(urls, rig.head, folder, only).items():
        began_s = time.monotonic()
        one = await asyncio.to_thread(start_gateway, name, words, port, folder)
        print_progress(
            f"{name}: {'answers after ' + format(time.monotonic() - began_s, '.1f') + ' s' if one else 'does not start'}"
        )
        found += [one] if one is not None else []
    return found


def percentile(values: list[float], share: float) -> float:
    """Return a percentile."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def latency(gateways: list[ComparedGateway], direct: str, rounds: int) -> dict[str, Any]:
    """Ask each in turn, one request at a time; returns what each adds, in ms."""
    whole: dict[str, list[float]] = {name: [] for name in ["direct", *(one.name for one in gateways)]}
    first: dict[str, list[float]] = {name: [] for name in whole}
    urls = {"direct": direct, **{one.name: one.url for one in gateways}}
    lines = {name: Connection(url) for name, url in urls.items()}
    short = {name: request_bytes(url, stream=False) for name, url in urls.items()}
    stream = {name: request_bytes(url, stream=True, chunks=4) for name, url in urls.items()}
    for turn in range(rounds):
        for name, line in lines.items():
            answer, streamed = await line.ask(short[name]), await line.ask(stream[name])
            if answer.status != 200 or streamed.status != 200:
                raise RuntimeError(f"{name} answered with {answer.status}, {streamed.status}")
            if turn >= 10:
                whole[name].append(answer.end_s * 1000)
                first[name].append(streamed.first_s * 1000)
    for line in lines.values():
        line.close()
    found = {}
    for one in gateways:
        row = {}
        for kind, values in (("", whole), ("ttft_", first)):
            for share in (0.5, 0.99):
                added = percentile(values[one.name], share) - percentile(values["direct"], share)
                row[f"{kind}added_p{round(share * 100)}_ms"] = round(added, 3)
        found[one.name] = row
    return {
        "by_gateway": found,
        "direct_p50_ms": round(percentile(whole["direct"], 0.5), 3),
        "direct_p99_ms": round(percentile(whole["direct"], 0.99), 3),
    }


async def cpu(gateways: list[ComparedGateway], rounds: int, streams: int) -> dict[str, dict[str, list[float]]]:
    """Return the processor time of each gateway per stream of 32 chunks and per short request, in ms, for each round; they take turns."""
    found: dict[str, dict[str, list[float]]] = {
        one.name: {"stream": [], "short": [], "memory_mib": []} for one in gateways
    }
    for turn in range(rounds + 1):
        for one in gateways:
            # LiteLLM takes a second for what the others do in 20 ms.
            count = streams if one.name != "litellm" else max(16, streams // 8)
            before_s = one.cpu_s()
            answers = await ask_many(one.url, request_bytes(one.url, stream=True, chunks=32, pause_s=0.005), count, 16)
            middle_s = one.cpu_s()
            answers += await ask_many(one.url, request_bytes(one.url, stream=False), count, 16)
            after_s = one.cpu_s()
            if any(answer.status != 200 for answer in answers):
                raise RuntimeError(f"{one.name} failed")
            if turn:
                found[one.name]["stream"].append((middle_s - before_s) / count * 1000)
                found[one.name]["short"].append((after_s - middle_s) / count * 1000)
                found[one.name]["memory_mib"].append(one.memory_mib())
    return found


async def held(gateway: ComparedGateway, direct: str, streams: int, pause_s: float) -> dict[str, Any]:
    """Hold paced streams, all at once, without and with the gateway; a stream stalls if nothing comes for more than 200 ms."""
    found: dict[str, Any] = {}
    for name, url in (("direct", direct), ("gateway", gateway.url)):
        before_s, began_s = gateway.cpu_s(), time.monotonic()
        answers = await ask_many(url, request_bytes(url, stream=True, chunks=64, pause_s=pause_s), streams, streams)
        stalled = sum(one.longest_s > pause_s + 0.2 or one.status != 200 for one in answers)
        found[name] = {
            "held": len(answers) - stalled,
            "longest_ms": round(max(one.longest_s for one in answers) * 1000),
            "core_share": round((gateway.cpu_s() - before_s) / (time.monotonic() - began_s), 2),
        }
    return found


def peak_memory_mib(pid: int) -> float:
    """Return the most resident memory that a process had, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


async def cold(requests: int, ports: list[int]) -> dict[str, Any]:
    """Send all requests at once to a service without a replica; one comes up a second after it was asked for."""
    async with gateway_rig() as rig:
        rig.desired = 0
        gateway = await rig.gateway("--waiting", str(requests + 1))
        await rig.until_up(rig.url + "/health")

        async def start() -> None:
            while not rig.patched:  # noqa: ASYNC110 - a request of another process
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)
            rig.desired = 1
            for number, port in enumerate(ports, 1):
                rig.engines[number] = EngineProcess(number=number, port=port, process=None)

        starting = asyncio.create_task(start())
        statuses: dict[Any, int] = {}

        async def one(number: int) -> None:
            await asyncio.sleep(number * 0.0003)
            body = {"model": "chat", "messages": [{"role": "user", "content": f"cold {number}"}], "max_tokens": 4}
            try:
                async with rig.session.post(
                    rig.url + "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}
                ) as answer:
                    await answer.read()
                    status: Any = answer.status
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                status = type(error).__name__
            statuses[status] = statuses.get(status, 0) + 1

        began_s = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(requests)))
        took_s = time.monotonic() - began_s
        await starting
        peak_mib = peak_memory_mib(gateway.pid)
        failed = requests - statuses.get(200, 0)
        return {
            "failed": failed,
            "statuses": {str(key): value for key, value in statuses.items()},
            "seconds": round(took_s, 1),
            "gateway_peak_mib": round(peak_mib),
        }


def trace(runs: int) -> dict[str, Any]:
    """Replay traces with and without shared prompts on 4, 8 and 16 replicas, and take the worst of each figure."""
    shares, loads, worse, rows = [], [], [], {}
    for seed in range(1, runs + 1):
        shared = conversations(seed, count=700, systems=12, rate_per_s=6)
        for count in (4, 8, 16):
            ours, best = replay(shared, count, "phalanx"), replay(shared, count, "best")
            least = replay(shared, count, "least")
            shares.append(ours.hit_share / best.hit_share)
            loads.append(ours.max_over_mean)
            rows[f"seed {seed}, {count} replicas"] = {
                "hits": round(ours.hit_share, 3),
                "best_hits": round(best.hit_share, 3),
                "least_load_hits": round(least.hit_share, 3),
                "max_over_mean": round(ours.max_over_mean, 2),
                "best_max_over_mean": round(best.max_over_mean, 2),
                "ttft_p95_s": round(ours.ttft_p95_s, 3),
                "least_load_ttft_p95_s": round(least.ttft_p95_s, 3),
            }
        apart = conversations(seed, count=1500, systems=0, rate_per_s=10)
        worse.append(replay(apart, 8, "phalanx").ttft_p95_s / replay(apart, 8, "least").ttft_p95_s)
    return {"shares": shares, "loads": loads, "ttft_over_least_load": worse, "rows": rows}


async def measure(asked: argparse.Namespace) -> tuple[dict[str, Any], list[Figure]]:
    """Measure the parts that were asked for."""
    parts = [one for one in asked.only.split(",") if one] or list(PARTS)
    figures: list[Figure] = []
    facts: dict[str, Any] = {"load_before": [round(one, 1) for one in os.getloadavg()], "cores": os.cpu_count()}
    with upstreams(UPSTREAMS) as ports, tempfile.TemporaryDirectory(prefix="gateways-") as folder:
        if {"latency", "cpu", "held"} & set(parts):
            async with gateway_rig() as rig:
                only = {one for one in asked.gateways.split(",") if one}
                gateways = await start_all(rig, ports, only, Path(folder))
                ours = next(one for one in gateways if one.name == "phalanx")
                direct = f"http://127.0.0.1:{ports[0]}"
                try:
                    if "latency" in parts:
                        facts["latency"] = found = await latency(gateways, direct, asked.rounds)
                        row = found["by_gateway"]["phalanx"]
                        figures += [
                            at_most("added_p50_ms", [row["added_p50_ms"]], "ms", 0.5),
                            at_most("added_p99_ms", [row["added_p99_ms"]], "ms", 1.5),
                            at_most("added_ttft_p99_ms", [row["ttft_added_p99_ms"]], "ms", 1.0),
                        ]
                    if "cpu" in parts:
                        figures += cpu_figures(facts, await cpu(gateways, asked.runs or 5, asked.streams))
                    if "held" in parts:
                        facts["held"] = found = await held(ours, direct, asked.held, asked.pace)
                        figures.append(at_least("streams_held", [found["gateway"]["held"]], "streams", 400))
                finally:
                    for one in gateways:
                        one.stop()
        if "cold" in parts:
            facts["cold"] = found = await cold(asked.cold, ports)
            figures.append(at_most("failed_cold", [found["failed"]], "requests", 0))
    if "decision" in parts:
        taken, memory_mib = decision_ms(100, 500)
        figures += [
            plain_figure("decision_p50_ms", [percentile(taken, 0.5)], "ms"),
            at_most("decision_p99_ms", [percentile(taken, 0.99)], "ms", 0.3),
            at_most("index_mib", [memory_mib], "MiB", 300),
        ]
    if "trace" in parts:
        found = trace(asked.runs or 2)
        facts["trace"] = found["rows"]
        figures += [
            at_least(
                "prefix_hit_share",
                [min(found["shares"])],
                "of the best",
                0.95,
                note="the worst of all traces and numbers of replicas",
            ),
            at_most("max_over_mean", [max(found["loads"])], "of the mean", 1.25),
            at_most(
                "ttft_over_least_load", [max(found["ttft_over_least_load"])], "x", 1.05, note="where nothing is shared"
            ),
        ]
    if "caches" in parts:
        facts["caches"] = cases = compare_reads(range(1, 1 + (asked.runs or 2)))
        means = [one["mean_ratio"] for one in cases.values()]
        figures += [
            plain_figure("caches_read_best", [min(means)], "x"),
            at_most(
                "caches_read_worst",
                [max(means)],
                "x",
                1.05,
                note="mean time to the first token over that of gateways that do not read KV use",
            ),
        ]
    facts["load_after"] = [round(one, 1) for one in os.getloadavg()]
    return facts, figures


def cpu_figures(facts: dict[str, Any], found: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """Return the figures of processor time: ratios are medians of pairs that were measured one after the other."""
    facts["cpu"] = {
        name: {
            f"{kind}_ms" if kind != "memory_mib" else kind: round(statistics.median(values), 3)
            for kind, values in row.items()
        }
        for name, row in found.items()
    }
    ours = found["phalanx"]["stream"]
    figures = [plain_figure("cpu_per_stream_ms", ours, "ms")]
    for name, bound in (("aiohttp", 1.25), ("litellm", 1 / 25)):
        if name in found:
            pairs = [mine / other for mine, other in zip(ours, found[name]["stream"], strict=True)]
            figures.append(at_most(f"ratio_{name}", pairs, "x", bound))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one flat object")
    parser.add_argument("--only", default="", help=f"comma-separated parts: {', '.join(PARTS)}")
    parser.add_argument(
        "--gateways",
        default="",
        help="comma-separated names: phalanx, aiohttp, litellm, smg, vllm-router, sglang-router, haproxy",
    )
    parser.add_argument("--runs", type=int, default=None, help="rounds of processor time (5), and seeds of traces (2)")
    parser.add_argument("--rounds", type=int, default=300, help="requests of each gateway for latencies")
    parser.add_argument("--streams", type=int, default=160, help="streams of a round")
    parser.add_argument("--held", type=int, default=400, help="paced streams at once")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two chunks of a paced stream")
    parser.add_argument("--cold", type=int, default=10_000, help="requests to a service without a replica")
    asked = parser.parse_args()
    facts, figures = asyncio.run(measure(asked))
    if asked.json:
        flat: dict[str, float | None] = dict.fromkeys(
            CONTRACT
        )  # null: not measured, as for a peer that is not installed
        flat |= {one.name: round(one.value, 4) for one in figures}
        print(
            json.dumps({**flat, "missed": [one.name for one in figures if one.met is False], "facts": facts}, indent=1)
        )
        return
    print_report("gateway", figures, as_json=False)
    for name, value in facts.items():
        print(name, value)


if __name__ == "__main__":
    main()
