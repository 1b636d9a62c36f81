"""A real head that dies at a failpoint, its nodes, and calls that tell a head that is gone from one that refuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cluster import HANG_S, ROOT, BenchmarkCluster
from phalanx.core.access.node_tokens import node_token
from phalanx.core.ids import NodeId
from phalanx.failpoints import ENVIRONMENT_VARIABLE
from phalanx.node.processes.proctable import process_environment, read_table

LEASE_S = 60.0  # no head is away for so long, so that nothing has a reason to run twice
_GONE = (ConnectionError, http.client.HTTPException, TimeoutError)


class HeadGone(ConnectionError):
    """The head died before it answered: nobody knows whether it did what was asked."""


class Refused(Exception):
    """The head answered no."""

    def __init__(self, status: int, said: bytes) -> None:
        super().__init__(f"{status} {said[:300]!r}")
        self.status = status


@dataclass(slots=True)
class ArmedHead(BenchmarkCluster):
    """One home, and one life of the head after the other in it. The nodes go on in between.

    Attributes:
        keys: of every node process that this home ever knew.
        store: the address of its database; empty for SQLite in its folder.
    """

    keys: set[str] = field(default_factory=set)
    store: str = ""
    _prefix: str = ""
    _line: http.client.HTTPConnection | None = None

    def begin(self, armed: str = "") -> bool:
        """Start a head, armed as told, and wait until it serves. False: it died before."""
        command = [
            sys.executable,
            "-m",
            "phalanx.app.head",
            "--home",
            self.home,
            "--port",
            str(self.port),
            "--virtual",
            self.virtual,
            "--lease",
            str(LEASE_S),
            "--revive",
            "0",
            *self.head_arguments,
        ]
        given = {
            **os.environ,
            "PHALANX_HOME": self.home,
            "PYTHONPATH": os.path.join(ROOT, "src"),
            ENVIRONMENT_VARIABLE: armed,
        }
        if self.store:
            given["PHALANX_STORE"] = self.store
        os.makedirs(os.path.dirname(self.home), exist_ok=True)
        with open(f"{self.home}.out", "ab") as output:
            self.head = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=given)
        self._line = None
        limit = time.monotonic() + HANG_S
        while time.monotonic() < limit:
            if self.head.poll() is not None:
                return False
            if self.answers():
                return True
            time.sleep(0.005)
        raise TimeoutError(f"the head neither serves nor dies; see {self.home}.out")

    def stop(self) -> None:
        """End everything. The line may have stood idle for longer than a head keeps one."""
        self._line = None
        BenchmarkCluster.stop(self)

    def dead(self) -> bool:
        """Whether the head has been killed. A head that ended otherwise fails the test."""
        assert self.head is not None
        code = self.head.poll()
        assert code in (None, 0, -signal.SIGKILL), f"the head ended with {code}: {tail(self.home + '.out')}"
        return code == -signal.SIGKILL

    def await_death(self) -> None:
        """The head is gone, so its process ends: by SIGKILL."""
        assert self.head is not None
        assert self.head.wait(timeout=HANG_S) == -signal.SIGKILL, tail(self.home + ".out")

    def ask(self, method: str, path: str, body: Any = None, *, token: str = "", key: str = "", mark: str = "") -> Any:
        """One call; bytes go as they are, all else as JSON.

        Raises:
            HeadGone: it died before it answered.
            Refused: it answered no.
        """
        headers = {"Authorization": f"Bearer {token or self.token()}"}
        if key:
            headers["Idempotency-Key"] = key
        if mark:  # for the trace: the bytes that this request is to make durable
            headers["X-Mark"] = mark
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            line = self._line or http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
            self._line = None
            line.request(method, path, data, headers)
            answer = line.getresponse()
            said = answer.read()
        except _GONE as error:
            raise HeadGone(f"{method} {path}") from error
        self._line = line
        if answer.status >= 400:
            raise Refused(answer.status, said)
        return json.loads(said) if said and answer.headers.get_content_type() == "application/json" else said

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """As `ask`: whatever of a cluster asks something can tell a head that is gone."""
        return self.ask(method, path, body)

    def answers(self) -> bool:
        """Whether the head answers, and not as one that stands by."""
        try:
            return bool(self.ask("GET", "/v1/health")["role"] == ("leader" if self.store else ""))
        except HeadGone:
            return False

    def as_node(self, name: str, method: str, path: str, body: Any = None, *, mark: str = "") -> Any:
        """One call with the token of a node's supervisor, for what it brings of nodes that share no folder with the head."""
        name = self.node(name)
        with open(os.path.join(self.home, "node_secret"), encoding="ascii") as file:
            secret = bytes.fromhex(file.read())
        return self.ask(method, path, body, token=node_token(secret, NodeId(name)), mark=mark)

    def node(self, name: str) -> str:
        """The id of the node that a head alone calls so: one of several says whose they are."""
        if not self.store:
            return name
        if not self._prefix:
            self._prefix = str(self.ask("GET", "/v1/nodes")["nodes"][0]["id"]).rpartition("-")[0] + "-"
        return f"{self._prefix}{name}" if name in ("n0", "n1") else name

    def orphans(self) -> list[str]:
        """Processes of a node of this home that is none of its nodes now: of a supervisor that no head knows, or below one that died."""
        current = {str(record["node_key"]) for record in self.node_records().values()}
        home = self.home.encode()
        self.keys |= current
        found = []
        for pid in read_table():
            seen = process_environment(pid)
            key = seen.get(b"PHALANX_NODE_KEY", b"").decode()
            if key and key not in current and (seen.get(b"PHALANX_HOME") == home or key in self.keys):
                found.append(f"{pid} of {key}")
        return found

    def jobs_with_processes(self) -> set[str]:
        """Jobs of this home of which some process runs."""
        outputs = os.path.join(self.home, "outputs").encode()
        return {
            seen[b"PHALANX_JOB_ID"].decode()
            for seen in map(process_environment, read_table())
            if seen.get(b"PHALANX_OUTPUT_DIR", b"").startswith(outputs)
        }

    def sees_nodes(self) -> bool:
        """Whether every node is up."""
        nodes = self.ask("GET", "/v1/nodes")["nodes"]
        return bool(sum(node["state"] == "up" for node in nodes) == int(self.virtual.split("x", maxsplit=1)[0]))


def tail(path: str, count: int = 3000) -> str:
    """The end of a file, for a failure's message."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()[-count:]
