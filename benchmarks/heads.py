"""Several real heads on loopback over one real PostgreSQL, each with its own folder, virtual nodes and port; and what is done to them."""

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

from benchmarks.cluster import ROOT, free_port, until
from phalanx.client import Client
from phalanx.core.errors import PhalanxError
from phalanx.node.shell.proctable import ProcessIdentity
from phalanx.node.shell.sweeps import sweep_node
from phalanx.wire.api.head import Health


@dataclass(slots=True)
class OneHead:
    """One of them; `store` is the address that it uses."""

    home: str
    port: int
    virtual: str
    store: str
    words: tuple[str, ...] = ()
    listen: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers, as whatever."""
        command = [
            sys.executable, "-P", "-m", "phalanx.app.head", "--home", self.home, "--port", str(self.port), "--virtual", self.virtual,
            "--revive", "0", *(["--listen", f"{self.listen}:{self.port}"] if self.listen else []), *self.words,
        ]  # fmt: skip
        environment = {
            **os.environ, "PHALANX_HOME": self.home, "PHALANX_STORE": self.store, "PYTHONPATH": os.path.join(ROOT, "src"),
        }  # fmt: skip
        with open(os.path.join(self.home, "head.out"), "ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )
        until(lambda: self.health() is not None or self.ended(), f"the head at {self.url} answers")
        assert not self.ended(), self.words_of()

    def health(self) -> Health | None:
        """What it says of itself; None where it does not answer."""
        with Client(self.url, "none", patience_s=0.0, answer_s=2.0) as client:
            try:
                return client.health()
            except PhalanxError:
                return None

    def role(self) -> str:
        """leader, standby, or nothing."""
        found = self.health()
        return "" if found is None else found.role

    def ended(self) -> bool:
        """Whether its process is gone."""
        return self.process is None or self.process.poll() is not None

    def send(self, number: int) -> None:
        """A signal to its process alone; its nodes go on."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None

    def log(self) -> str:
        """What it has logged."""
        with open(os.path.join(self.home, "head.log"), encoding="utf-8", errors="replace") as file:
            return file.read()

    def words_of(self) -> str:
        """What it printed."""
        with open(os.path.join(self.home, "head.out"), encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:]

    def stop(self) -> None:
        """End it and its nodes."""
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
class Heads:
    """All of them."""

    heads: list[OneHead] = field(default_factory=list)

    def leader(self) -> OneHead | None:
        """The one that says that it leads."""
        return next((head for head in self.heads if not head.ended() and head.role() == "leader"), None)

    def led(self, *, but: OneHead | None = None) -> OneHead:
        """Wait until one leads, another than `but`."""

        def another() -> OneHead | None:
            found = self.leader()
            return None if found is but else found

        found: OneHead = until(another, "a head leads")
        return found

    def client(self, *, patience_s: float = 60.0) -> Client:
        """One that knows all heads, with the first one's token."""
        if self.heads[0].listen:  # off loopback they have a CA, which the folder knows
            return Client(home=self.heads[0].home, patience_s=patience_s)
        return Client(",".join(head.url for head in self.heads), self.token(), patience_s=patience_s)

    def token(self) -> str:
        """Of the first head's folder."""
        with open(os.path.join(self.heads[0].home, "token"), encoding="ascii") as file:
            return file.read().strip()

    def all_up(self) -> None:
        """Wait until a head leads and every node has said hello."""
        self.led()
        wanted = sum(int(head.virtual.split("x")[0]) for head in self.heads)
        with self.client() as client:
            until(lambda: sum(node.state == "up" for node in client.nodes()) == wanted, "all nodes are up")


@contextlib.contextmanager
def heads(
    dsn: str, *virtual: str, words: tuple[str, ...] = (), stores: tuple[str, ...] = (), listen: tuple[str, ...] = ()
) -> Iterator[Heads]:
    """Running heads, one for each word of `virtual`; nothing of them is left afterwards.

    Args:
        dsn: of the database that they share.
        virtual: nodes and devices of each, as "1x2".
        words: arguments of every head.
        listen: addresses at which the first of them are reached with TLS, as from other machines.
        stores: addresses by which the first of them reach that database, where it is not `dsn`.
    """
    made = Heads()
    try:
        for number, nodes in enumerate(virtual):
            home = tempfile.mkdtemp(prefix="phalanx-heads-")
            store = stores[number] if number < len(stores) else dsn
            outer = listen[number] if number < len(listen) else ""
            made.heads.append(
                OneHead(home=home, port=free_port(), virtual=nodes, store=store, words=words, listen=outer)
            )
            made.heads[-1].start()
            made.led()  # the first one leads: who stands by is known to the tests
        made.all_up()
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
