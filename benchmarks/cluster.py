"""A real head with virtual nodes in a temporary folder, for the duration of a benchmark."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from phalanx.node.processes.proctable import ProcessIdentity, descendants, read_table
from phalanx.node.processes.sweeps import sweep_node

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PORTS = 10_000, 19_999  # below the kernel's own (32,768 and more) and those of gangs (20,000 and more)
HANG_S = 120.0  # time-out of a hanging benchmark


@dataclass(slots=True)
class BenchmarkCluster:
    """One head and its virtual nodes."""

    home: str
    port: int
    virtual: str
    lease_s: float = 6.0
    revive_s: float = 0.0
    head_arguments: tuple[str, ...] = ()
    head: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *, wait_nodes: bool = True) -> None:
        """Start the head and wait until it answers and its nodes are up."""
        self.start_head("--virtual", self.virtual, "--revive", str(self.revive_s))
        if wait_nodes:
            expected = sum(int(part.partition("x")[0]) for part in self.virtual.split(","))
            self.wait_for_nodes(expected)

    def start_head(self, *words: str, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the head with further arguments and variables, and wait until it answers."""
        options = {"--home": self.home, "--port": str(self.port), "--lease": str(self.lease_s)}
        command = [sys.executable, "-m", "phalanx.app.head", *(word for pair in options.items() for word in pair)]
        own = {"PHALANX_HOME": self.home, "PYTHONPATH": os.path.join(ROOT, "src")}
        self.environment = {**os.environ, **variables, **own}
        with open(os.path.join(self.home, "head.out"), "ab") as output:
            self.head = subprocess.Popen(
                [*command, *words, *self.head_arguments],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
            )
        wait_until(self.answers, "the head serves", every_s=0.005)

    def wait_for_nodes(self, number: int) -> None:
        """Wait until so many nodes are up."""
        wait_until(lambda: sum(node["state"] == "up" for node in self.nodes()) == number, "all nodes are up")

    def kill_head(self) -> None:
        """Kill the head only; the nodes continue."""
        if self.head is not None:
            self.head.kill()
            self.head.wait()
            self.head = None

    def stop(self) -> None:
        """Stop the head and all nodes."""
        if self.head is not None:
            with contextlib.suppress(OSError, AssertionError, TimeoutError):
                self.call("POST", "/v1/stop", {"cancel_jobs": True})
            self.head.send_signal(signal.SIGTERM)
            try:
                self.head.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.head.kill()
                self.head.wait()
            self.head = None
        for record in self.node_records().values():  # nodes with jobs that survived the head
            root = ProcessIdentity(pid=int(record["pid"]), started_ticks=int(record["start_ticks"]))
            sweep_node(str(record["node_key"]), root=root)

    def answers(self) -> bool:
        """Return whether the head answers."""
        try:
            return bool(self.call("GET", "/v1/health")["status"])
        except OSError:
            return False

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the API once; return the decoded reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.sock = self.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token()}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status >= 400:
            raise AssertionError(f"{method} {path}: {reply.status} {data[:500]!r}")
        return json.loads(data) if data else None

    def connect(self) -> socket.socket:
        """Connect to the loopback port of the head."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def on_head_host(self, argv: list[str]) -> list[str]:
        """Return the command that runs `argv` on the machine of the head."""
        return argv

    def token(self) -> str:
        """Return the token of the administrator; empty until the head has created it."""
        try:
            with open(os.path.join(self.home, "token"), encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the head."""
        nodes: list[dict[str, Any]] = self.call("GET", "/v1/nodes")["nodes"]
        return nodes

    def submit(self, **body: Any) -> str:
        """Submit a job; return its id."""
        job_id: str = self.call("POST", "/v1/jobs", {"workdir": self.home, **body})["job"]["id"]
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the view of one job."""
        view: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}")["job"]
        return view

    def history(self, job_id: str) -> list[dict[str, Any]]:
        """Return the history of one job."""
        lines: list[dict[str, Any]] = self.call("GET", f"/v1/jobs/{job_id}/story")["story"]
        return lines

    def wait_for_state(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until the job is in one of the states; return its view."""
        wait_until(lambda: self.job(job_id)["state"] in states, f"job {job_id} is {' or '.join(states)}", every_s=0.02)
        return self.job(job_id)

    def node_records(self) -> dict[str, dict[str, Any]]:
        """Return the record of the local engine for each running node."""
        records = {}
        root = os.path.join(self.home, "nodes")
        for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
            with (
                contextlib.suppress(OSError, ValueError),
                open(os.path.join(root, name, "engine.json"), encoding="utf-8") as file,
            ):
                records[name] = json.load(file)
        return records

    def node_pids(self, name: str) -> list[int]:
        """Return all processes of a node, its supervisor first."""
        root = int(self.node_records()[name]["pid"])
        assert root, f"the supervisor of {name} is starting: its record has no pid yet"
        return [root, *sorted(descendants(read_table(), [root]))]

    def kill_node(self, name: str, signal_number: int = signal.SIGKILL) -> float:
        """Send a signal to all processes of a node; return the Unix time just before."""
        pids = self.node_pids(name)
        at_s = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        return at_s


@contextlib.contextmanager
def cluster(virtual: str = "3x4", **options: Any) -> Iterator[BenchmarkCluster]:
    """Run a cluster; remove it afterwards."""
    home = tempfile.mkdtemp(prefix="phalanx-bench-")
    made = BenchmarkCluster(home=home, port=free_port(), virtual=virtual, **options)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(home, ignore_errors=True)


def command_words(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")
    except OSError:
        return []


def free_port() -> int:
    """Return a port on which nobody listens, and which the kernel gives to no connection of anybody else before it is used."""
    while True:
        port = random.randint(*_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], Any], what: str, *, every_s: float = 0.02, limit_s: float = HANG_S) -> Any:
    """Wait until `holds()` is true and return its value.

    Raises:
        TimeoutError: it was false for `limit_s`.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(every_s)
    raise TimeoutError(f"timed out after {limit_s:.0f} s: {what}")
