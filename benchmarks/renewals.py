"""Renewals of leases by a thousand simulated supervisors over TLS: `python -m benchmarks.control --only renewals`.

Each supervisor joins, registers, and renews its lease when it was told to, over a persistent connection of its own, from two other processes on the same
processors. Twice in each run, on two heads: once by connections that the head's API answers, and once by connections that offer to be handed over,
as real supervisors do. The processor time is that of the head's processes, all of it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import ROOT, BenchmarkCluster, cluster
from benchmarks.figures import Figure, at_most, plain_figure, print_progress
from phalanx.controller.leases import LeaseBook
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.units import GIB
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import (
    HeadAccess,
    HeadConnection,
    HeadUnavailable,
    RegistrationRequired,
    RequestRejected,
)
from phalanx.node.processes.proctable import TICKS_PER_S, read_row, read_table
from phalanx.wire import supervisor as wire
from phalanx.wire.join import JoinReply, JoinRequest
from phalanx.wire.rank import boottime_ns

SUPERVISORS: Final = 1000
PROCESSES: Final = 2
SETTLE_S: Final = 12.0  # for connections to be handed over, and for the terms to follow
MEASURE_S: Final = 20.0
FLEET: Final = 10_000
WANTED_S: Final = 10.0  # lease of that fleet
_ASK_S: Final = 60.0
_PROCESS: Final = "phalanx.app.renewal_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalLoad:
    """What a head did for its renewals in a while. Seconds of processor time are per second; `late_s`: 99th percentile of an answer."""

    rate: float
    lease_s: float
    head_cores: float
    process_cores: float
    middle_s: float
    late_s: float


def measure(runs: int, supervisors: int = SUPERVISORS) -> list[Figure]:
    """Measure, and compute what ten thousand nodes need."""
    found: dict[bool, list[RenewalLoad]] = {False: [], True: []}
    for run in range(runs):
        for handed in (False, True):
            load = _load(supervisors, handed=handed)
            found[handed].append(load)
            print_progress(f"renewals, run {run + 1}, {'handed over' if handed else 'by the API'}: {load}")
    by_api = [load.head_cores / load.rate * 1e6 for load in found[False]]
    by_process = [load.process_cores / load.rate * 1e6 for load in found[True]]
    rest = [load.head_cores / load.rate * 1e6 for load in found[True]]
    rate = FLEET / LeaseBook().terms_for(FLEET, FLEET)[1]
    cores = statistics.median(by_process) * rate / 1e6
    return [
        plain_figure(f"{supervisors} supervisors, by the API: lease", [one.lease_s for one in found[False]], "s"),
        plain_figure("... a renewal: processor time of the head", by_api, "us"),
        plain_figure(f"{supervisors} supervisors, handed over: lease", [one.lease_s for one in found[True]], "s"),
        plain_figure("... a renewal: processor time of the process", by_process, "us"),
        plain_figure("... and of the head itself, with all else that it does", rest, "us"),
        plain_figure("... an answer, p50", [one.middle_s * 1e3 for one in found[True]], "ms"),
        plain_figure("... an answer, p99", [one.late_s * 1e3 for one in found[True]], "ms"),
        plain_figure("by the process over by the API", [p / a for p, a in zip(by_process, by_api, strict=True)], ""),
        at_most(
            f"computed: lease of {FLEET} nodes",
            [LeaseBook().terms_for(FLEET, FLEET)[0]],
            "s",
            WANTED_S,
            note=f"{rate:.0f} renewals/s, {100 * cores:.0f} % of a core of the process",
        ),
    ]


def _load(supervisors: int, *, handed: bool) -> RenewalLoad:
    address = own_address()
    with cluster("1x1", head_arguments=("--listen", address)) as head:
        line = head.call("GET", "/v1/join")
        order = {
            "url": f"https://{line['address']}",
            "token": line["token"],
            "ca_pem": Path(head.home, "tls", "ca.pem").read_text(encoding="ascii"),
            "handed": handed,
        }
        names = [f"s{number}" for number in range(supervisors)]
        parts = [_start({**order, "names": names[part::PROCESSES]}) for part in range(PROCESSES)]
        try:
            for part in parts:
                _read(part)
            time.sleep(SETTLE_S)
            for part in parts:
                _ask(part, "reset")
            before, began = processor_s(head), time.monotonic()
            time.sleep(MEASURE_S)
            after, took_s = processor_s(head), time.monotonic() - began
            answers = [_ask(part, "report") for part in parts]
        finally:
            for part in parts:
                part.kill()
                part.wait()
        seconds = sorted(each for answer in answers for each in answer["seconds"])
        assert sum(answer["refused"] for answer in answers) == 0, "a supervisor lost its lease"
    return RenewalLoad(
        rate=len(seconds) / took_s,
        lease_s=max(answer["lease_s"] for answer in answers),
        head_cores=(after[0] - before[0]) / took_s,
        process_cores=(after[1] - before[1]) / took_s,
        middle_s=statistics.median(seconds),
        late_s=seconds[int(0.99 * (len(seconds) - 1))],
    )


def own_address() -> str:
    """Return an address of this machine off loopback, where the head uses TLS."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def processor_s(head: BenchmarkCluster) -> tuple[float, float]:
    """Return the processor time of the head and of its process for renewals, in seconds."""
    assert head.head is not None
    own = read_row(head.head.pid)
    assert own is not None
    other = 0.0
    for pid, row in read_table().items():
        if row.parent == head.head.pid and not row.dead:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if _PROCESS.encode() in file.read():
                    other += (row.cpu_ticks - row.waited_cpu_ticks) / TICKS_PER_S
    return (own.cpu_ticks - own.waited_cpu_ticks) / TICKS_PER_S, other


def _start(order: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.renewals"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "src")},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return process


def _ask(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    return _read(process)


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"simulated supervisors ended with {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


# ---- a process of supervisors -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SimulatedSupervisor:
    """A supervisor that only renews its lease."""

    name: NodeId
    access: HeadAccess
    due_s: float = 0.0
    held_until_ns: int = 0
    connection: HeadConnection = field(init=False)

    @property
    def supervisor_id(self) -> SupervisorId:
        """Its id."""
        return SupervisorId(f"{self.name}-simulated")

    def register(self, *, handed: bool) -> None:
        """Register, and open the connection for renewals."""
        node = Node(
            id=self.name,
            engine="joined",
            cpus=8,
            memory_bytes=64 * GIB,
            state=NodeState.UP,
            supervisor_id=self.supervisor_id,
            address="127.0.0.1",
            hostname=self.name,
            virtual=True,
            devices=(),
        )
        hello = wire.HelloRequest(
            version=wire.WIRE_VERSION, supervisor_id=self.supervisor_id, node=node, members=[], challenge=""
        )
        first = HeadConnection(self.access)
        first.call("POST", "/v1/node/hello", wire.encode(hello), timeout_s=_ASK_S)
        first.close()
        self.connection = HeadConnection(self.access, protocol=wire.RENEWAL_PROTOCOL if handed else "")

    def renew(self, *, handed: bool) -> tuple[float, float]:
        """Renew; return the seconds until the answer, and the lease."""
        sent_ns = boottime_ns()
        request = wire.LeaseRequest(
            supervisor_id=self.supervisor_id,
            node_id=self.name,
            epochs=[],
            held_s=max(0, self.held_until_ns - sent_ns) / 1e9,
            reconnects=handed,
        )
        body = self.connection.call("POST", "/v1/node/lease", wire.encode(request), timeout_s=_ASK_S)
        reply = wire.decode(body, wire.LeaseReply)
        self.held_until_ns = sent_ns + int(reply.lease_s * 1e9)
        self.due_s = max(self.due_s + reply.renew_in_s, time.monotonic())  # without a burst after a pause
        return (boottime_ns() - sent_ns) / 1e9, reply.lease_s


def main() -> None:
    """Join and register, then renew; answer each line of standard input."""
    order = json.loads(sys.stdin.readline())
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(order["ca_pem"])
    joined = HeadConnection(
        HeadAccess(address=HeadAddress(order["url"], None), token=order["token"], ca_file=file.name)
    )
    handed, fleet = bool(order["handed"]), []
    for name in order["names"]:
        request = JoinRequest(node_id=NodeId(name), hostname=name, address="127.0.0.1", devices=0, virtual=True)
        given = wire.decode(joined.call("POST", "/v1/join", wire.encode(request), timeout_s=_ASK_S), JoinReply)
        access = HeadAccess(address=HeadAddress(order["url"], None), token=given.token, ca_file=file.name)
        fleet.append(SimulatedSupervisor(NodeId(name), access))
    up: list[SimulatedSupervisor] = []
    for one in fleet:
        one.register(handed=handed)
        one.due_s = time.monotonic()
        up.append(one)
        for other in up:  # those before go on renewing
            if other.due_s <= time.monotonic():
                other.renew(handed=handed)
    _reply({"up": len(fleet)})
    _renew_until_end(fleet, handed=handed)


def _renew_until_end(fleet: list[SimulatedSupervisor], *, handed: bool) -> None:
    seconds: list[float] = []
    lease_s, refused = 0.0, 0
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        for one in sorted(fleet, key=lambda each: each.due_s):
            now_s = time.monotonic()
            if one.due_s > now_s:
                time.sleep(min(0.01, one.due_s - now_s))
                break
            try:
                took_s, lease_s = one.renew(handed=handed)
                seconds.append(took_s)
            except (HeadUnavailable, RegistrationRequired, RequestRejected) as error:
                print(f"{one.name}: {error!r}", file=sys.stderr)
                refused += 1
                one.register(handed=handed)
        for word in (sys.stdin.readline() or "").split():
            if word == "report":
                _reply({"seconds": seconds, "lease_s": lease_s, "refused": refused})
            else:
                seconds, refused = [], 0
                _reply({})


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
