"""A whole head in a process of its own, with every part but nodes that could start a process; a supervisor is played by the test.

python -m tests.hostile.head --home DIR --port PORT
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, list-item, no-any-return"

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec

from phalanx.app import head as composition
from phalanx.app.options import parse_arguments, resolve_options
from phalanx.app.state_folder import StateFolder
from phalanx.core.access.node_tokens import node_token
from phalanx.core.ids import NodeId
from phalanx.core.state.reports import MemberReady, MemberStarted, MemberStopped
from phalanx.node.processes.file_limits import raise_file_limit
from phalanx.ports.provider import NodeOrder
from phalanx.providers.virtual.provider import VirtualProvider
from phalanx.wire.supervisor import (
    CommandsReply,
    EventsRequest,
    HelloRequest,
    LeaseRequest,
    OpenExec,
    decode,
    decode_command,
    encode_envelope,
)
from tests.contract.api_head import make_node
from tests.contract.exec_socket import ExecSocket
from tests.hostile.asked import NOBODY
from tests.hostile.good import BLOB, DIGEST, SERVICE

START_S = 60.0  # a hang guard
ROLES = {"viewer": "vic", "user": "ada", "other": "bob", "operator": "opal"}
NODE, SUPERVISOR, DEVICES = "n0", "s1", 4
JOB = {"run": ["true"], "gpus": 1, "workdir": "/tmp", "name": "good"}
ADMIN = "admin"
SUPERVISING = "supervisor"
WAITING = 0.2
MARK = "    | "  # before each line of a traceback in the head's log (node.shell.journal)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FRAME = re.compile(r'File "[^"]*?((?:phalanx|tests)/[^"]+)", line (\d+)')
ROOT = Path(__file__).resolve().parents[2]  # where the package of the tests is found


def main() -> None:
    """As `phalanx.app.head.main`, but with no node: random commands must never run."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = parse_arguments(None)
    home = StateFolder.open(given.home)
    lock = home.lock()
    composition._log_to(home)
    raise_file_limit()
    options = replace(resolve_options(given, home, lock), nodes=[])
    mock.patch.object(VirtualProvider, "start", _no_node).start()
    composition._run(options)


def _no_node(_self: VirtualProvider, order: NodeOrder) -> None:
    raise OSError(f"{order.node_id}: no node starts here")


@dataclass
class Served:
    """The running head: where it is, and everybody's token."""

    home: str
    process: subprocess.Popen
    port: int
    tokens: dict[str, str]
    job_id: str = "1"
    epoch: int = 1
    seq: int = 0
    waiting_id: str = ""
    session: str = "none"
    socket: ExecSocket | None = None
    token_id: str = "none"
    _read_bytes: int = 0  # of the head's log

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, role, method, path, body=None):
        """One orderly request."""
        headers = {} if role == NOBODY else {"authorization": f"Bearer {self.tokens[role]}"}
        content = None if body is None else msgspec.json.encode(body)
        return httpx.request(
            method, f"http://{self.host}{path}", headers=headers, content=content, timeout=60, trust_env=False
        )

    def names(self, rng: random.Random | None = None) -> dict[str, str]:
        """Things that exist, by the name that paths give them; with `rng` the job is now and then one that waits."""
        job_id = self.waiting_id if rng is not None and rng.random() < WAITING else self.job_id
        return {
            "job_id": job_id,
            "node_id": NODE,
            "user_id": "victim",
            "project_id": "victims",
            "queue_id": "side",
            "token_id": self.token_id,
            "reservation_id": "r1",
            "service_id": "web",
            "pool_id": "burst",
            "name": "matlab",  # a licence, and a secret
            "epoch": "1",
            "month": "2026-08",
            "sha256": DIGEST,
            "session_name": self.session,
            "gateway_id": "g1",
        }

    def tend(self) -> None:
        """As a supervisor and a user do: renew the lease, say hello when asked to; keep one job running, one waiting, one service, one session open."""
        lease = LeaseRequest(supervisor_id=SUPERVISOR, node_id=NODE, epochs=[(self.job_id, self.epoch)])
        if self.call(SUPERVISING, "POST", "/v1/node/lease", lease).status_code == 409:
            hello = HelloRequest(version=1, supervisor_id=SUPERVISOR, node=make_node(NODE, DEVICES), members=[])
            self.call(SUPERVISING, "POST", "/v1/node/hello", hello)
            self.seq = 0
        self.call(ADMIN, "POST", f"/v1/nodes/{NODE}/undrain")
        view = self._job(self.job_id)
        if view["state"] not in ("running", "pending"):
            self.job_id = self._submit()
        elif view["state"] == "running":
            self._play(view)
        if self._job(self.waiting_id)["state"] != "pending":
            self.waiting_id = self._submit(hold=True)
        service = self.call(ADMIN, "GET", "/v1/services/web")
        if service.status_code == 404:
            self.call("user", "POST", "/v1/services", SERVICE)
        if self.call(SUPERVISING, "GET", f"/v1/node/exec/{self.session}/input?limit=0&closed=1").status_code == 404:
            self._open_session()

    def _open_session(self) -> None:
        """Open an exec session; its name is in the command that its supervisor is sent."""
        if self.socket is not None and self.socket.line is not None:
            self.socket.close()
        token = {"authorization": f"Bearer {self.tokens['user']}"}
        self.socket = ExecSocket(f"http://{self.host}", self.job_id, token, {"argv": ["true"]})
        self.session = "none"
        if self.socket.refused is None and self.socket.frame()["type"] == "opened":
            reply = self.call(SUPERVISING, "GET", "/v1/node/commands").content
            commands = [decode_command(one) for one in decode(reply, CommandsReply).commands]
            self.session = next((one.session for one in reversed(commands) if isinstance(one, OpenExec)), "none")

    def _job(self, job_id: str) -> dict[str, Any]:
        reply = self.call(ADMIN, "GET", f"/v1/jobs/{job_id or 'none'}")
        return reply.json()["job"] if reply.status_code == 200 else {"state": "none"}

    def _submit(self, **more) -> str:
        reply = self.call("user", "POST", "/v1/jobs", {**JOB, **more})
        assert reply.status_code == 201, (reply.status_code, reply.text)
        return reply.json()["job"]["id"]

    def _play(self, view: dict[str, Any]) -> None:
        """The next thing that a supervisor would say of a running job."""
        self.epoch = view["epoch"]
        place = {"job_id": self.job_id, "epoch": self.epoch, "generation": view["generation"], "node_id": NODE}
        now_s = time.time()
        match view["attempt_state"]:
            case "placed" | "starting":
                happened = [MemberReady(**place, port=29500), MemberStarted(**place, at_s=now_s)]
            case "stopping":
                happened = [MemberStopped(**place, at_s=now_s)]
            case _:
                return
        framed = [encode_envelope(self.seq + number + 1, event) for number, event in enumerate(happened)]
        self.seq += len(framed)
        self.call(SUPERVISING, "POST", "/v1/node/events", EventsRequest(supervisor_id=SUPERVISOR, events=framed))

    def memory_mib(self) -> float:
        """Resident memory of the head."""
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE_BYTES / 2**20

    def cpu_s(self) -> float:
        """Processor time that the head has used."""
        with open(f"/proc/{self.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def grew(self) -> bool:
        """Whether the head has logged a traceback since this was last asked."""
        with open(os.path.join(self.home, "head.log"), "rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        self._read_bytes += len(text)
        return b"Traceback" in text

    def faults(self) -> list[str]:
        """What the tracebacks in the head's log end with: faults of ours, told to the caller or not."""
        with open(os.path.join(self.home, "head.log"), encoding="utf-8", errors="replace") as file:
            text = file.read()
        return [_ends_with(part) for part in text.split("Traceback (most recent call last):")[1:]]


def _ends_with(traceback: str) -> str:
    """The exception's own line, the first that is not indented, and where it was raised."""
    lines = [line.removeprefix(MARK) for line in traceback.lstrip("\n").splitlines()]
    at = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), 0)
    where = [found for line in lines[:at] if (found := _FRAME.search(line))]
    return f"{lines[at] if lines else 'a traceback'}{f' ({where[-1][1]}:{where[-1][2]})' if where else ''}"


@contextlib.contextmanager
def serving():
    """A head for as long as it is needed; nothing of it is left."""
    home = tempfile.mkdtemp(prefix="phalanx-hostile-")
    with open(os.path.join(home, "head.out"), "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.head", "--home", home, "--port", "0", "--virtual", "1x1"],
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, "PHALANX_HOME": home},
        )
    try:
        yield _known(home, process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _known(home: str, process: subprocess.Popen) -> Served:
    end = time.monotonic() + START_S
    path = os.path.join(home, "head.json")
    while not os.path.exists(path):
        assert process.poll() is None, Path(home, "head.out").read_text()
        assert time.monotonic() < end, "the head did not start"
        time.sleep(0.02)
    with open(path, encoding="utf-8") as file:
        port = int(json.load(file)["url"].rsplit(":", 1)[1])
    with open(os.path.join(home, "token"), encoding="utf-8") as file:
        admin = file.read().strip()
    node = node_token(StateFolder(path=home).secret(), NodeId(NODE))
    served = Served(home=home, process=process, port=port, tokens={ADMIN: admin, SUPERVISING: node, NOBODY: ""})
    for role, name in ROLES.items():
        served.call(ADMIN, "PUT", f"/v1/users/{name}", {"role": "user" if role == "other" else role})
        made = served.call(ADMIN, "POST", "/v1/tokens", {"user": name})
        assert made.status_code == 201, made.text
        served.tokens[role] = made.json()["secret"]
    served.call(ADMIN, "PUT", "/v1/users/victim", {"role": "user"})
    served.call(ADMIN, "PUT", "/v1/projects/victims", {"members": ["victim"]})
    served.call(ADMIN, "PUT", "/v1/queues/side", {"open": True})
    pool = {"provider": "virtual", "node": "1xh100:8", "max_nodes": 2}
    assert served.call(ADMIN, "PUT", "/v1/pools/burst", pool).status_code == 200
    made = served.call(ADMIN, "POST", "/v1/tokens", {"user": "victim"}).json()
    served.token_id = made["token"]["id"]
    httpx.put(
        f"http://{served.host}/v1/blobs/{DIGEST}",
        content=BLOB,
        headers={"authorization": f"Bearer {admin}"},
        trust_env=False,
    )
    for _ in range(4):
        served.tend()
        time.sleep(0.1)
    return served


if __name__ == "__main__":
    main()
