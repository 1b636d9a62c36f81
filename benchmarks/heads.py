"""Several real heads on loopback with one real PostgreSQL, each with its own folder, virtual nodes and port."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from benchmarks.cluster import ROOT, free_port, wait_until
from phalanx.client import Client
from phalanx.core.errors import PhalanxError
from phalanx.node.processes.proctable import ProcessIdentity
from phalanx.node.processes.sweeps import sweep_node
from phalanx.wire.api.head import Health

PROGRAM: Final = ("-P", "-m", "phalanx.app.head")


@dataclass(slots=True)
class HeadProcess:
    """One head; `store` is the address of its database, and `program` what Python runs."""

    home: str
    port: int
    virtual: str
    store: str
    arguments: tuple[str, ...] = ()
    listen: str = ""
    program: tuple[str, ...] = PROGRAM
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the head."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the head and wait until it answers, in any role."""
        command = [
            sys.executable,
            *self.program,
            "--home",
            self.home,
            "--port",
            str(self.port),
            "--virtual",
            self.virtual,
            "--revive",
            "0",
            *(["--listen", f"{self.listen}:{self.port}"] if self.listen else []),
            *self.arguments,
        ]
        environment = {
            **os.environ,
            "PHALANX_HOME": self.home,
            "PHALANX_STORE": self.store,
            "PYTHONPATH": os.path.join(ROOT, "src"),
        }
        with open(os.path.join(self.home, "head.out"), "ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )
        wait_until(lambda: self.health() is not None or self.ended(), f"the head at {self.url} answers")
        assert not self.ended(), self.output()

    def health(self) -> Health | None:
        """Return its health; None if it does not answer."""
        with Client(self.url, "none", retry_limit_s=0.0, answer_timeout_s=2.0) as client:
            try:
                return client.health()
            except PhalanxError:
                return None

    def role(self) -> str:
        """Return "leader", "standby" or ""."""
        found = self.health()
        return "" if found is None else found.role

    def ended(self) -> bool:
        """Return whether its process has ended."""
        return self.process is None or self.process.poll() is not None

    def send(self, number: int) -> None:
        """Send a signal to its process only; its nodes continue."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None

    def log(self) -> str:
        """Return its log."""
        with open(os.path.join(self.home, "head.log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def output(self) -> str:
        """Return the end of its output."""
        with open(os.path.join(self.home, "head.out"), encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:]

    def stop(self) -> None:
        """Kill the head and its nodes."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None
        root = os.path.join(self.home, "nodes")
        for name in os.listdir(root) if os.path.isdir(root) else []:
            with contextlib.suppress(OSError, ValueError, KeyError):
                _sweep(os.path.join(root, name, "engine.json"))


@dataclass(slots=True)
class HeadGroup:
    """A set of heads."""

    heads: list[HeadProcess] = field(default_factory=list)

    def leader(self) -> HeadProcess | None:
        """Return the current leader, if any."""
        return next((head for head in self.heads if not head.ended() and head.role() == "leader"), None)

    def wait_for_leader(self, *, but: HeadProcess | None = None) -> HeadProcess:
        """Wait until a head other than `but` leads; return it."""

        def another() -> HeadProcess | None:
            found = self.leader()
            return None if found is but else found

        found: HeadProcess = wait_until(another, "a head leads")
        return found

    def client(self, *, patience_s: float = 60.0) -> Client:
        """Return a client that knows all heads, with the token of the first one."""
        if self.heads[0].listen:  # off loopback the heads use TLS; the folder has their CA
            return Client(home=self.heads[0].home, retry_limit_s=patience_s)
        return Client(",".join(head.url for head in self.heads), self.token(), retry_limit_s=patience_s)

    def token(self) -> str:
        """Return the token in the folder of the first head."""
        with open(os.path.join(self.heads[0].home, "token"), encoding="ascii") as file:
            return file.read().strip()

    def wait_for_nodes(self) -> None:
        """Wait until a head leads and all nodes are registered."""
        self.wait_for_leader()
        wanted = sum(int(head.virtual.split("x")[0]) for head in self.heads)
        with self.client() as client:
            wait_until(lambda: sum(node.state == "up" for node in client.nodes()) == wanted, "all nodes are up")


@contextlib.contextmanager
def heads(
    dsn: str,
    *virtual: str,
    words: tuple[str, ...] = (),
    stores: tuple[str, ...] = (),
    listen: tuple[str, ...] = (),
    program: tuple[str, ...] = PROGRAM,
) -> Iterator[HeadGroup]:
    """Run one head for each item of `virtual`; remove them afterwards.

    Args:
        dsn: address of the shared database.
        virtual: nodes and devices of each head, such as "1x2".
        words: arguments of every head.
        stores: addresses of that database for the first heads, if not `dsn`.
        listen: addresses with TLS for the first heads, as for other machines.
        program: what Python runs as a head.
    """
    made = HeadGroup()
    try:
        for number, nodes in enumerate(virtual):
            home = tempfile.mkdtemp(prefix="phalanx-heads-")
            store = stores[number] if number < len(stores) else dsn
            outer = listen[number] if number < len(listen) else ""
            made.heads.append(
                HeadProcess(home, free_port(), nodes, store, arguments=words, listen=outer, program=program)
            )
            made.heads[-1].start()
            made.wait_for_leader()  # so the first head leads and the others are standbys
        made.wait_for_nodes()
        yield made
    finally:
        for head in made.heads:
            head.stop()
            shutil.rmtree(head.home, ignore_errors=True)


def _sweep(record: str) -> None:
    import json

    with open(record, encoding="utf-8") as file:
        found = json.load(file)
    root = ProcessIdentity(pid=int(found["pid"]), started_ticks=int(found["start_ticks"]))
    sweep_node(str(found["node_key"]), root=root)
