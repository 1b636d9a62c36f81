"""A Ray cluster of our own: its head on this machine, beside it as many more nodes as there are virtual ones, and what joins is let in.

The Ray processes outlive the Phalanx head, as supervisors do. A Ray head that died is started again at the same port; supervisors do not
notice, since they speak to the Phalanx head and not through Ray. With Redis the new head knows what the old one knew, and Ray's other nodes
and their actors go on as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import TryLater
from phalanx.core.ids import NodeId
from phalanx.engines.local import records
from phalanx.engines.local.private import write_private
from phalanx.engines.local.records import LocalNode
from phalanx.engines.ray import redis
from phalanx.engines.ray.process import RayProcess, sweep_carried
from phalanx.engines.ray.render import (
    GCS_RECONNECT_REDIS_S,
    RayFiles,
    RayStart,
    cleaned,
    environment,
    head_command,
    kept_in,
    member_command,
)
from phalanx.failpoints import around
from phalanx.wire.join import RAY_RECONNECT_S

STARTED: Final = "Ray runtime started"  # printed by `ray start` when its node is registered
STARTED_S: Final = 60.0  # 4 to 5 s where nothing else runs
_POLL_S: Final = 0.1
_PORTS: Final = range(6379, 6479)  # Ray's own port and those behind it; one that is taken is passed over
_CLIENT_PORTS: Final = range(9801, 9901)  # below those that Ray gives its workers (10002 to 19999)


@dataclass(slots=True)
class OwnCluster:
    """See the module.

    Attributes:
        home: the head's state folder; all of this lies in `ray/` and `ray-nodes/`.
        address: of this machine, as other servers reach it; loopback where none joins.
        nodes: ours on this machine, the first beside Ray's head.
        files: what Ray's processes prove themselves with.
        redis: HOST:PORT where Ray's head keeps what it knows; empty for its own memory.
        namespace: of ours there.
    """

    home: str
    address: str
    nodes: Sequence[LocalNode]
    certificate: str = ""
    key: str = ""
    ca: str = ""
    redis: str = ""
    namespace: str = "phalanx"
    files: RayFiles = field(init=False)
    port: int = field(init=False)
    client_port: int = field(init=False)
    _processes: list[RayProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = os.path.join(self.home, "ray")
        with around("ray.open.directory"):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self.port, self.client_port = self._ports(folder)
        token = os.path.join(folder, "token")
        if not os.path.exists(token):
            write_private(folder, "token", secrets.token_hex(32))
        self.files = RayFiles(
            token=token, certificate=self.certificate, key=self.key, ca=self.ca,
            reconnect_s=GCS_RECONNECT_REDIS_S if self.redis else RAY_RECONNECT_S,
        )  # fmt: skip
        for index, node in enumerate(self.nodes):
            self._processes.append(self._process(folder, node, first=index == 0))

    @property
    def ray_address(self) -> str:
        """Of Ray's head."""
        return f"{self.address}:{self.port}"

    @property
    def token(self) -> str:
        """That lets a process into the Ray cluster."""
        with open(self.files.token, encoding="ascii") as file:
            return file.read().strip()

    def keep(self) -> list[str]:
        """Start what does not run; a line about each that had to be started again. Quick where all of it lives.

        Raises:
            TryLater: Ray's head does not come up.
        """
        told = []
        if not self._processes[0].lives() and not self.redis:
            # Without Redis, nodes of the Ray cluster that was are unknown to a new head, and Ray starts none while they still run here.
            for process in self._processes[1:]:
                process.kill()
        for index, process in enumerate(self._processes):
            if process.lives():
                continue
            words = process.last_words()
            if index == 0:
                # Ray starts no head where this says that one was started and another of its nodes still runs on this machine.
                with contextlib.suppress(FileNotFoundError), around("ray.start.mark"):
                    os.unlink(os.path.join(temp_of(self.home), "ray_current_cluster"))
            process.start()
            told.append(f"Ray's node {process.name} is started{f' (the last one said: {words})' if words else ''}")
            self._await_started(process, needed=index == 0)
        return told

    def gone(self) -> set[NodeId]:
        """Those of our nodes that certainly do not run: on this machine, and their record was removed when they were swept."""
        root = os.path.join(self.home, "ray-nodes", "nodes")
        return {node.id for node in self.nodes if records.read(os.path.join(root, node.id)) is None}

    def stop(self) -> None:
        """End all of it; nothing of Ray is left on this machine."""
        enders = [threading.Thread(target=process.stop) for process in self._processes]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        sweep_carried(os.path.join(self.home, "ray-nodes"))
        with around("ray.stop.temp"):
            shutil.rmtree(temp_of(self.home), ignore_errors=True)
        if self.redis:
            redis.forget(self.redis, self.namespace, {**cleaned(dict(os.environ)), **environment(self.files)})

    def _process(self, folder: str, node: LocalNode, *, first: bool) -> RayProcess:
        start = RayStart(
            name=node.id, address=self.address, devices=node.virtual_devices, virtual=node.virtual_devices > 0, temp=temp_of(self.home)
        )  # fmt: skip
        return RayProcess(
            name=node.id, folder=os.path.join(folder, node.id), carried=os.path.join(self.home, "ray-nodes"),
            command=lambda: head_command(start, self.port, self.client_port) if first else member_command(start, self.ray_address),
            variables={**environment(self.files), **(kept_in(self.redis, self.namespace) if first else {})},
        )  # fmt: skip

    def _await_started(self, process: RayProcess, *, needed: bool) -> None:
        """Until Ray says so: one after the other, since Ray gives up a node that takes over 30 s, as several at once may.

        Raises:
            TryLater: it ends instead, or takes too long, and all others need it.
        """
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until:
            if process.said(STARTED):
                return
            if not process.lives():
                break
            time.sleep(_POLL_S)
        if needed:
            raise TryLater(f"Ray's head does not start: {process.last_words()}", hint=f"see {process.folder}/ray.out")

    def _ports(self, folder: str) -> tuple[int, int]:
        """As before, since joined servers know the first; else the first that are free."""
        path = os.path.join(folder, "ray.json")
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            return int(record["port"]), int(record["client_port"])
        except (OSError, ValueError, KeyError, TypeError):
            port = next(port for port in _PORTS if _free(self.address, port))
            client_port = next(port for port in _CLIENT_PORTS if _free(self.address, port))
            write_private(folder, "ray.json", json.dumps({"port": port, "client_port": client_port}))
            return port, client_port


def temp_of(home: str) -> str:
    """Ray's session folder: short, because its sockets' names may have 107 bytes."""
    mark = hashlib.sha256(home.encode()).hexdigest()[:8]
    return os.path.join(tempfile.gettempdir(), f"phalanx-ray-{os.getuid()}-{mark}")


def reachable(address: str, timeout_s: float = 1.0) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
