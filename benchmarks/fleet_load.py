"""What supervisors cost a head: a hundred of them, without ranks, on one head over TLS; and what a larger fleet would need.

    python -m benchmarks.fleet_load [--supervisors 100] [--seconds 20] [--busy] [--json]

Each is the supervisor's own code: the threads that renew its lease, wait for commands, send events and samples, with a connection each.
Nothing runs under them. The head is a real one in the lab (root; docs/lab.md) and they sit on another host of it, on the same processors.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.engine_clusters import LabCluster, joined
from benchmarks.figures import Figure, arguments, report, shown, tell
from phalanx.controller.leases import MARGIN_S, LeaseBook
from phalanx.node.shell.channels import POLL_S
from phalanx.node.shell.proctable import TICKS_PER_S, read_row
from phalanx.node.shell.sampling import tell_every_s
from tests.lab.lab import Lab
from tests.lab.needs import why_not

PROCESSES: Final = 4
"""Of the load: 400 threads under one interpreter lock would measure that lock."""
SUBMITS_PER_S: Final = 10.0
SETTLE_S: Final = 3.0
BURST_S: Final = 3.0
BURSTS: Final = 3
FLEETS: Final = (100, 1_000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one request of each kind costs the head in processor time, and a supervisor in memory."""

    renewal_s: float
    sample_s: float
    poll_s: float
    supervisor_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a fleet asks of one head.

    Attributes:
        lease_s, renew_s: lease and interval (controller/leases.py).
        cores: processor time per second, for the channel alone. Past 1 a head cannot: one Python thread serves it.
        lost_s: from the silence of a node until its jobs may start elsewhere.
    """

    nodes: int
    lease_s: float
    renew_s: float
    renewals_per_s: float
    samples_per_s: float
    polls_per_s: float
    cores: float
    memory_bytes: float
    lost_s: float


def needs(nodes: int, costs: Costs, *, busy: bool) -> Needs:
    """Compute what `nodes` supervisors need, all of them with ranks or none. Pure."""
    lease_s, renew_s = LeaseBook().terms_for(nodes)
    renewals = nodes / renew_s
    samples = nodes / tell_every_s(renew_s, busy=busy)
    polls = nodes / POLL_S
    return Needs(
        nodes=nodes, lease_s=lease_s, renew_s=renew_s, renewals_per_s=renewals, samples_per_s=samples, polls_per_s=polls,
        cores=renewals * costs.renewal_s + samples * costs.sample_s + polls * costs.poll_s,
        memory_bytes=nodes * costs.supervisor_bytes, lost_s=lease_s + MARGIN_S,
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--supervisors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--busy", action="store_true", help="samples as often as under ranks, each second")
    given = parser.parse_args()
    if why_not():
        tell(f"no lab here: {why_not()}")
        return
    with Lab(size=2, gpus=0) as lab, joined(lab) as head:
        empty_mib = head.memory_mib()[0]
        load = Load(head, given.supervisors, busy=given.busy)
        try:
            load.begin()
            figures = [*_steady(head, load, given.seconds), *_bursts(head, load, given.supervisors, empty_mib)]
        finally:
            load.end()
    report(f"A head under {given.supervisors} supervisors", figures, as_json=given.json)


class Load:
    """The supervisors, in a few processes on another host."""

    def __init__(self, head: LabCluster, count: int, *, busy: bool) -> None:
        self._head = head
        self._count = count
        self._busy = busy
        self._processes: list[subprocess.Popen[str]] = []

    def begin(self) -> None:
        """Start them all, and wait until each has said hello. Nothing is placed on them."""
        line = self._head.call("GET", "/v1/join")
        ca_pem = self._head.lab.host("h0").path("/home/lab/.phalanx/tls/ca.pem").read_text(encoding="ascii")
        for number in range(PROCESSES):
            names = [f"f{index}" for index in range(number, self._count, PROCESSES)]
            order = {"url": f"https://{line['address']}", "token": line["token"], "ca_pem": ca_pem, "names": names, "busy": self._busy}  # fmt: skip
            process = self._head.lab.start(
                "h1", [sys.executable, "-m", "benchmarks.fleet_member"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._processes.append(process)
            self._write(process, order)
        for process in self._processes:
            self._read(process)
        for node in self._head.nodes():
            path = f"/v1/nodes/{node['id']}/drain"
            self._head.call("POST", path, {"why": "benchmark", "cordon_only": True})
        tell(f"{self._count} supervisors are up")

    def ask(self, what: str, **more: str | float) -> list[dict[str, Any]]:
        """Tell every process and wait for all answers."""
        for process in self._processes:
            self._write(process, {"do": what, **more})
        return [self._read(process) for process in self._processes]

    def end(self) -> None:
        """They die at once; the head is about to end as well."""
        for process in self._processes:
            process.kill()
            process.communicate()

    @staticmethod
    def _write(process: subprocess.Popen[str], order: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"supervisors ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _steady(head: LabCluster, load: Load, seconds: float) -> list[Figure]:
    """Let them be for a while, with a few submits beside: traffic, the head's processor time, and how long answers take."""
    time.sleep(SETTLE_S)
    load.ask("renewals")  # those of the beginning
    submits: list[float] = []
    over = threading.Event()
    beside = threading.Thread(target=_submit, args=(head, submits, over))
    before_s, began = cpu_s(head), time.monotonic()
    beside.start()
    time.sleep(seconds)
    took_s, used_s = time.monotonic() - began, cpu_s(head) - before_s
    over.set()
    beside.join()
    renewals = [1000 * each for answer in load.ask("renewals") for each in answer["seconds"]]
    return [
        shown("renewals", [len(renewals) / took_s], "/s"),
        shown("head, processor time, submits included", [100 * used_s / took_s], "% of a core"),
        shown("a renewal, p50", [statistics.median(renewals)], "ms"),
        shown("a renewal, p99", [_p99(renewals)], "ms"),
        shown(f"a durable submit beside, {SUBMITS_PER_S:g} /s, p50", [statistics.median(submits)], "ms"),
        shown("the same, p99", [_p99(submits)], "ms"),
    ]


def _submit(head: LabCluster, seconds: list[float], over: threading.Event) -> None:
    while not over.wait(1.0 / SUBMITS_PER_S):
        began = time.monotonic()
        head.submit(run=["true"], gpus=1)
        seconds.append(1000 * (time.monotonic() - began))


def _bursts(head: LabCluster, load: Load, count: int, empty_mib: float) -> list[Figure]:
    """What one request of each kind costs: a few connections ask as fast as they can, over what the fleet takes meanwhile."""
    full_mib = head.memory_mib()[0]
    idle_began_s = cpu_s(head)
    time.sleep(BURST_S)
    idle = (cpu_s(head) - idle_began_s) / BURST_S
    costs, rates = {}, {}
    for kind in ("renewal", "sample", "poll"):
        runs = []
        for _ in range(BURSTS):
            before_s, began = cpu_s(head), time.monotonic()
            answers = load.ask("burst", kind=kind, seconds=BURST_S)
            took_s, count_sent = time.monotonic() - began, sum(answer["count"] for answer in answers)
            runs.append(max(0.0, cpu_s(head) - before_s - idle * took_s) / count_sent)
            rates[kind] = count_sent / took_s
        costs[kind] = statistics.median(runs)
    known = Costs(
        renewal_s=costs["renewal"], sample_s=costs["sample"], poll_s=costs["poll"],
        supervisor_bytes=max(0.0, full_mib - empty_mib) * 2**20 / count,
    )  # fmt: skip
    figures = [shown(f"one {kind}: processor time of the head", [1e6 * cost], "us", note=f"{rates[kind]:.0f} /s over {PROCESSES} connections") for kind, cost in costs.items()]  # fmt: skip
    figures += [
        shown("head without supervisors", [empty_mib], "MiB"),
        shown("memory per supervisor", [known.supervisor_bytes / 1024], "KiB"),
        shown("head, processor time, no submits", [100 * idle], "% of a core"),
    ]
    for nodes in FLEETS:
        for busy in (False, True):
            told = needs(nodes, known, busy=busy)
            kind = "busy" if busy else "idle"
            note = f"lease {told.lease_s:g} s; {told.renewals_per_s:.0f} renewals, {told.samples_per_s:.0f} samples, {told.polls_per_s:.0f} polls /s; {told.memory_bytes / 2**20:.0f} MiB"
            figures.append(shown(f"computed: {nodes} nodes, {kind}", [100 * told.cores], "% of a core", note=note))
    return figures


def cpu_s(head: LabCluster) -> float:
    """Processor time that the head's process has used."""
    for pid in head.lab.processes("h0"):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"phalanx.app.head" not in file.read():
                continue
        row = read_row(pid)
        if row is not None:
            return (row.cpu_ticks - row.waited_cpu_ticks) / TICKS_PER_S
    raise RuntimeError("no head runs on h0")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


if __name__ == "__main__":
    main()
