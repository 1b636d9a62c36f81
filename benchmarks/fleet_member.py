"""Many supervisors without ranks in one process: `python -m benchmarks.fleet_member`, controlled by lines of JSON on standard input.

The first line has the address of the head and the names of the nodes; each further line is an order, answered by one line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from typing import Any, Final

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import JobId, NodeId, SupervisorId
from phalanx.core.units import GIB
from phalanx.node.head_link.channels import (
    CommandPoller,
    EventSender,
    LeaseRenewer,
    Registrar,
    start_thread,
)
from phalanx.node.head_link.head_address import HeadAddress
from phalanx.node.head_link.head_connection import HeadAccess, HeadConnection
from phalanx.node.logic.events import LeaseRenewed
from phalanx.node.probes.sampling import Sampler
from phalanx.node.probes.virtual_devices import VirtualProbe
from phalanx.wire import supervisor as wire
from phalanx.wire.join import JoinReply, JoinRequest
from phalanx.wire.rank import boottime_ns

DEVICES: Final = 8
_ASK_S: Final = 30.0
_HELLO_S: Final = 120.0  # time-out


class LoadSupervisor:
    """One supervisor: only its channels, without ranks."""

    def __init__(self, name: NodeId, url: str, ca_file: str, token: str, *, busy: bool) -> None:
        self._ended = threading.Event()
        self.seconds: list[float] = []
        self.who = SupervisorId(f"{name}-load")
        self.name = name
        self._probe = VirtualProbe(name, DEVICES, 64 * GIB)
        self.access = HeadAccess(address=HeadAddress(url, None), token=token, ca_file=ca_file)
        self._node = Node(
            id=name,
            engine="joined",
            cpus=64,
            memory_bytes=512 * GIB,
            state=NodeState.UP,
            supervisor_id=self.who,
            address="10.77.0.2",
            hostname=name,
            virtual=True,
            devices=tuple(
                Device(index=d.index, uuid=d.uuid, model=d.model, memory_bytes=d.memory_bytes, virtual=True)
                for d in self._probe.devices()
            ),
        )
        self.greeter = Registrar(self.access, self._hello, self._ended)
        jobs = {index: JobId("1") for index in range(DEVICES)} if busy else {}
        renewer = LeaseRenewer(
            self.access,
            self.greeter,
            node_id=name,
            supervisor_id=self.who,
            epochs=list,
            on_renewed=self._on_renewed,
            ended=self._ended,
        )
        self._threads = {
            "renewer": renewer.run,
            "commands": CommandPoller(
                self.access, self.greeter, supervisor_id=self.who, on_commands=lambda _: None, ended=self._ended
            ).run,
            "events": EventSender(self.access, self.greeter, supervisor_id=self.who, ended=self._ended).run,
            "sampler": Sampler(
                self.access,
                self._probe,
                node_id=name,
                supervisor_id=self.who,
                folder="/var/tmp",
                job_by_device=lambda: jobs,
                tenants_by_device=dict,
                ended=self._ended,
                renew_interval_s=lambda: renewer.renew_in_s,
            ).run,
        }

    def begin(self) -> None:
        """Start the threads."""
        for name, run in self._threads.items():
            start_thread(name, run)

    def _hello(self, challenge: str) -> wire.HelloRequest:
        return wire.HelloRequest(
            version=wire.WIRE_VERSION, supervisor_id=self.who, node=self._node, members=[], challenge=challenge
        )

    def _on_renewed(self, renewed: LeaseRenewed) -> None:
        self.seconds.append((boottime_ns() - renewed.sent_ns) / 1e9)


def main() -> None:
    """Join, start, and answer orders until standard input ends."""
    order = json.loads(sys.stdin.readline())
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(order["ca_pem"])
    members = [_joined(NodeId(name), order, file.name) for name in order["names"]]
    for member in members:
        member.begin()
        time.sleep(0.01)  # as servers join: not all at once
    for member in members:
        if not member.greeter.registered.wait(_HELLO_S):
            raise TimeoutError(f"{member.name} was not registered within {_HELLO_S:g} s")
    _reply({"up": len(members)})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "renewals":
            taken = [each for member in members for each in member.seconds]
            for member in members:
                member.seconds = []
            _reply({"seconds": taken})
        else:
            _reply(_burst(members[0], order["kind"], order["seconds"]))


def _joined(name: NodeId, order: dict[str, Any], ca_file: str) -> LoadSupervisor:
    access = HeadAccess(address=HeadAddress(order["url"], None), token=order["token"], ca_file=ca_file)
    request = JoinRequest(node_id=name, hostname=name, address="10.77.0.2", devices=DEVICES, virtual=True)
    connection = HeadConnection(access)
    given = wire.decode(connection.call("POST", "/v1/join", wire.encode(request), timeout_s=_ASK_S), JoinReply)
    connection.close()
    return LoadSupervisor(name, order["url"], ca_file, given.token, busy=order["busy"])


def _burst(member: LoadSupervisor, kind: str, seconds: float) -> dict[str, float]:
    """Send one request after the other over one connection."""
    connection, count, began = HeadConnection(member.access), 0, time.monotonic()
    renewal = wire.encode(wire.LeaseRequest(supervisor_id=member.who, node_id=member.name, epochs=[], held_s=6.0))
    devices = [
        wire.DeviceSample(
            index=index,
            uuid=f"VIRTUAL-{member.name}-{index}",
            counter="virtual",
            utilization=0.5,
            memory_used_bytes=GIB,
            memory_total_bytes=64 * GIB,
            power_w=0.0,
            temperature_c=0.0,
            throttle=(),
            virtual=True,
            job_id=JobId("1"),
        )
        for index in range(DEVICES)
    ]
    samples = wire.encode(
        wire.SamplesRequest(
            supervisor_id=member.who,
            node_id=member.name,
            at_s=time.time(),
            devices=devices,
            load_1m=1.0,
            memory_available_bytes=GIB,
            disk_free_bytes=GIB,
        )
    )
    requests: dict[str, tuple[str, str, bytes | None]] = {
        "renewal": ("POST", "/v1/node/lease", renewal),
        "sample": ("POST", "/v1/node/samples", samples),
        "poll": ("GET", "/v1/node/commands?after=0&wait_s=0.001", None),  # as a poll that timed out
    }
    while time.monotonic() - began < seconds:
        connection.call(*requests[kind], timeout_s=_ASK_S)
        count += 1
    took_s = time.monotonic() - began
    connection.close()
    return {"count": count, "seconds": took_s}


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
