"""Measure the load of supervisors on a head: a hundred of them, without ranks, over TLS; and compute the needs of a larger fleet.

    python -m benchmarks.fleet_load [--supervisors 100] [--seconds 20] [--busy] [--json]

Each one runs the real code of a supervisor: the threads that renew the lease, wait for commands, send events and samples, with one
connection each, but no ranks. The head is a real one in the lab (needs root; docs/lab.md); the supervisors run on another host of the lab, on
the same processors.
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
from benchmarks.figures import (
    Figure,
    argument_parser,
    plain_figure,
    print_progress,
    print_report,
)
from phalanx.controller.leases import MARGIN_S, LeaseBook
from phalanx.node.head_link.channels import POLL_S
from phalanx.node.probes.sampling import report_every_s
from phalanx.node.processes.proctable import TICKS_PER_S, read_row
from tests.lab.lab import Lab
from tests.lab.needs import why_not

PROCESSES: Final = 4
"""Processes of the load: with 400 threads in one process, the interpreter lock would dominate."""
SUBMITS_PER_S: Final = 10.0
SETTLE_S: Final = 3.0
BURST_S: Final = 3.0
BURSTS: Final = 3
FLEETS: Final = (100, 1_000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCosts:
    """Processor time of the head per request of each kind, and its memory per supervisor."""

    renewal_s: float
    sample_s: float
    poll_s: float
    supervisor_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNeeds:
    """The load of a fleet on one head.

    Attributes:
        lease_s, renew_s: lease and renewal interval (controller/leases.py).
        cores: processor time per second for the channel only. The limit is 1, because one Python thread serves it.
        lost_s: from the last message of a node until its jobs may start elsewhere.
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


def fleet_needs(nodes: int, costs: RequestCosts, *, busy: bool) -> FleetNeeds:
    """Compute the load of `nodes` supervisors, either all with ranks or none."""
    lease_s, renew_s = LeaseBook().terms_for(nodes)
    renewals = nodes / renew_s
    samples = nodes / report_every_s(renew_s, busy=busy)
    polls = nodes / POLL_S
    return FleetNeeds(
        nodes=nodes,
        lease_s=lease_s,
        renew_s=renew_s,
        renewals_per_s=renewals,
        samples_per_s=samples,
        polls_per_s=polls,
        cores=renewals * costs.renewal_s + samples * costs.sample_s + polls * costs.poll_s,
        memory_bytes=nodes * costs.supervisor_bytes,
        lost_s=lease_s + MARGIN_S,
    )


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--supervisors", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--busy", action="store_true", help="send samples every second, as with ranks")
    given = parser.parse_args()
    if why_not():
        print_progress(f"no lab here: {why_not()}")
        return
    with Lab(size=2, gpus=0) as lab, joined(lab) as head:
        empty_mib = head.memory_mib()[0]
        load = SupervisorLoad(head, given.supervisors, busy=given.busy)
        try:
            load.begin()
            figures = [*_steady(head, load, given.seconds), *_bursts(head, load, given.supervisors, empty_mib)]
        finally:
            load.end()
    print_report(f"A head under {given.supervisors} supervisors", figures, as_json=given.json)


class SupervisorLoad:
    """The supervisors, in a few processes on another host."""

    def __init__(self, head: LabCluster, count: int, *, busy: bool) -> None:
        self._head = head
        self._count = count
        self._busy = busy
        self._processes: list[subprocess.Popen[str]] = []

    def begin(self) -> None:
        """Start all supervisors, wait until each has registered, and cordon them."""
        line = self._head.call("GET", "/v1/join")
        ca_pem = self._head.lab.host("h0").path("/home/lab/.phalanx/tls/ca.pem").read_text(encoding="ascii")
        for number in range(PROCESSES):
            names = [f"f{index}" for index in range(number, self._count, PROCESSES)]
            order = {
                "url": f"https://{line['address']}",
                "token": line["token"],
                "ca_pem": ca_pem,
                "names": names,
                "busy": self._busy,
            }
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
        print_progress(f"{self._count} supervisors are up")

    def send_order(self, what: str, **more: str | float) -> list[dict[str, Any]]:
        """Send an order to every process and wait for all answers."""
        for process in self._processes:
            self._write(process, {"do": what, **more})
        return [self._read(process) for process in self._processes]

    def end(self) -> None:
        """Kill all processes; the head ends soon, too."""
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


def _steady(head: LabCluster, load: SupervisorLoad, seconds: float) -> list[Figure]:
    """Measure a steady phase with a few submits: traffic, processor time of the head, and latency of answers."""
    time.sleep(SETTLE_S)
    load.send_order("renewals")  # discards those of the start
    submits: list[float] = []
    over = threading.Event()
    beside = threading.Thread(target=_submit, args=(head, submits, over))
    before_s, began = cpu_s(head), time.monotonic()
    beside.start()
    time.sleep(seconds)
    took_s, used_s = time.monotonic() - began, cpu_s(head) - before_s
    over.set()
    beside.join()
    renewals = [1000 * each for answer in load.send_order("renewals") for each in answer["seconds"]]
    return [
        plain_figure("renewals", [len(renewals) / took_s], "/s"),
        plain_figure("head, processor time, submits included", [100 * used_s / took_s], "% of a core"),
        plain_figure("a renewal, p50", [statistics.median(renewals)], "ms"),
        plain_figure("a renewal, p99", [_p99(renewals)], "ms"),
        plain_figure(f"a durable submit beside, {SUBMITS_PER_S:g} /s, p50", [statistics.median(submits)], "ms"),
        plain_figure("the same, p99", [_p99(submits)], "ms"),
    ]


def _submit(head: LabCluster, seconds: list[float], over: threading.Event) -> None:
    while not over.wait(1.0 / SUBMITS_PER_S):
        began = time.monotonic()
        head.submit(run=["true"], gpus=1)
        seconds.append(1000 * (time.monotonic() - began))


def _bursts(head: LabCluster, load: SupervisorLoad, count: int, empty_mib: float) -> list[Figure]:
    """Measure the cost of one request of each kind: a few connections send as fast as they can, minus the load of the fleet."""
    full_mib = head.memory_mib()[0]
    idle_began_s = cpu_s(head)
    time.sleep(BURST_S)
    idle = (cpu_s(head) - idle_began_s) / BURST_S
    costs, rates = {}, {}
    for kind in ("renewal", "sample", "poll"):
        runs = []
        for _ in range(BURSTS):
            before_s, began = cpu_s(head), time.monotonic()
            answers = load.send_order("burst", kind=kind, seconds=BURST_S)
            took_s, count_sent = time.monotonic() - began, sum(answer["count"] for answer in answers)
            runs.append(max(0.0, cpu_s(head) - before_s - idle * took_s) / count_sent)
            rates[kind] = count_sent / took_s
        costs[kind] = statistics.median(runs)
    known = RequestCosts(
        renewal_s=costs["renewal"],
        sample_s=costs["sample"],
        poll_s=costs["poll"],
        supervisor_bytes=max(0.0, full_mib - empty_mib) * 2**20 / count,
    )
    figures = [
        plain_figure(
            f"one {kind}: processor time of the head",
            [1e6 * cost],
            "us",
            note=f"{rates[kind]:.0f} /s over {PROCESSES} connections",
        )
        for kind, cost in costs.items()
    ]
    figures += [
        plain_figure("head without supervisors", [empty_mib], "MiB"),
        plain_figure("memory per supervisor", [known.supervisor_bytes / 1024], "KiB"),
        plain_figure("head, processor time, no submits", [100 * idle], "% of a core"),
    ]
    for nodes in FLEETS:
        for busy in (False, True):
            load_of_fleet = fleet_needs(nodes, known, busy=busy)
            kind = "busy" if busy else "idle"
            note = f"lease {load_of_fleet.lease_s:g} s; {load_of_fleet.renewals_per_s:.0f} renewals, {load_of_fleet.samples_per_s:.0f} samples, {load_of_fleet.polls_per_s:.0f} polls /s; {load_of_fleet.memory_bytes / 2**20:.0f} MiB"
            figures.append(
                plain_figure(f"computed: {nodes} nodes, {kind}", [100 * load_of_fleet.cores], "% of a core", note=note)
            )
    return figures


def cpu_s(head: LabCluster) -> float:
    """Return the processor time that the head has used."""
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
