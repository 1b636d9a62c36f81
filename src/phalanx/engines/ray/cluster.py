"""A Ray cluster that we run: its head and one Ray node for each virtual node on this machine; other servers may join.

The Ray processes outlive the Phalanx head, as supervisors do. A dead Ray head is restarted at the same port; supervisors are unaffected,
because they connect to the Phalanx head directly. With Redis the new Ray head has the state of the old one, and Ray's other nodes and their
actors survive too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.errors import TryLater
from phalanx.core.ids import NodeId
from phalanx.durable_files import make_directory, remove_file, remove_tree
from phalanx.engines.local import records
from phalanx.engines.ray import redis
from phalanx.engines.ray.protocol import RAY_RECONNECT_S
from phalanx.engines.ray.ray_process import RayProcess, sweep_supervisors
from phalanx.engines.ray.render import (
    GCS_RECONNECT_REDIS_S,
    RayCredentials,
    RayStart,
    head_command,
    node_command,
    ray_environment,
    redis_environment,
    without_ray_variables,
)
from phalanx.node.files.private_files import write_private
from phalanx.ports.engine import LocalNode

STARTED: Final = "Ray runtime started"  # printed by `ray start` when its node is registered
STARTED_S: Final = 60.0  # 4 to 5 s on an idle machine
_POLL_S: Final = 0.1
# What an HTTP/2 client sends first (RFC 9113, 3.4): the preface and an empty SETTINGS frame.
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES: Final = 9  # of a frame's header
_SETTINGS: Final = 4  # type of a frame
_PORTS: Final = range(6379, 6479)  # Ray's default port and the next ones; ports in use are skipped
_CLIENT_PORTS: Final = range(9801, 9901)  # below the ports of Ray's workers (10002 to 19999)


@dataclass(slots=True)
class ManagedRayCluster:
    """See the module.

    Attributes:
        home: the head's state folder; our files are in `ray/` and `ray-nodes/`.
        address: of this machine, as other servers reach it; loopback if none joins.
        nodes: our nodes on this machine; the first runs beside Ray's head.
        files: credentials of Ray's processes.
        redis: HOST:PORT where Ray's head stores its state; empty for memory.
        namespace: of our cluster in Redis.
    """

    home: str
    address: str
    nodes: Sequence[LocalNode]
    certificate: str = ""
    key: str = ""
    ca: str = ""
    redis: str = ""
    namespace: str = "phalanx"
    files: RayCredentials = field(init=False)
    port: int = field(init=False)
    client_port: int = field(init=False)
    _processes: list[RayProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = os.path.join(self.home, "ray")
        make_directory("ray.open", folder)
        self.port, self.client_port = self._ports(folder)
        token = os.path.join(folder, "token")
        if not os.path.exists(token):
            write_private(folder, "token", secrets.token_hex(32))
        self.files = RayCredentials(
            token=token,
            certificate=self.certificate,
            key=self.key,
            ca=self.ca,
            reconnect_s=GCS_RECONNECT_REDIS_S if self.redis else RAY_RECONNECT_S,
        )
        for index, node in enumerate(self.nodes):
            self._processes.append(self._process(folder, node, first=index == 0))

    @property
    def ray_address(self) -> str:
        """Address of Ray's head."""
        return f"{self.address}:{self.port}"

    @property
    def token(self) -> str:
        """Token that admits a process to the Ray cluster."""
        with open(self.files.token, encoding="ascii") as file:
            return file.read().strip()

    def ensure_running(self) -> list[str]:
        """Start Ray processes that do not run; return a log line about each. Fast if all run.

        Raises:
            TryLater: Ray's head does not start.
        """
        log_lines = []
        if not self._processes[0].is_running() and not self.redis:
            # Without Redis a new head does not know the nodes of the old cluster, and Ray starts no head while they still run here.
            for process in self._processes[1:]:
                process.kill()
        for index, process in enumerate(self._processes):
            if process.is_running():
                continue
            words = process.last_line()
            if index == 0:
                # Ray starts no head while this file exists and another of its nodes runs on this machine.
                with contextlib.suppress(FileNotFoundError):
                    remove_file("ray.mark", os.path.join(session_folder(self.home), "ray_current_cluster"))
            process.start()
            log_lines.append(
                f"Started Ray node {process.name}{f'; its predecessor ended with: {words}' if words else ''}"
            )
            self._await_started(process, needed=index == 0)
        return log_lines

    def nodes_certainly_down(self) -> set[NodeId]:
        """Return our nodes that certainly do not run: those on this machine without a record, which a sweep removes."""
        root = os.path.join(self.home, "ray-nodes", "nodes")
        return {node.id for node in self.nodes if records.read(os.path.join(root, node.id)) is None}

    def stop(self) -> None:
        """Stop all Ray processes of the cluster on this machine, and remove their files."""
        stoppers = [threading.Thread(target=process.stop) for process in self._processes]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()
        sweep_supervisors(os.path.join(self.home, "ray-nodes"))
        remove_tree("ray.temp", session_folder(self.home))
        if self.redis:
            redis.delete_data(
                self.redis, self.namespace, {**without_ray_variables(dict(os.environ)), **ray_environment(self.files)}
            )

    def _process(self, folder: str, node: LocalNode, *, first: bool) -> RayProcess:
        start = RayStart(
            name=node.id,
            address=self.address,
            devices=node.virtual_devices,
            virtual=node.virtual_devices > 0,
            temp=session_folder(self.home),
        )
        return RayProcess(
            name=node.id,
            folder=os.path.join(folder, node.id),
            supervisor_folder=os.path.join(self.home, "ray-nodes"),
            command=lambda: self._command(replace(start, started_ms=int(time.time() * 1000)), first=first),
            variables={
                **ray_environment(self.files),
                **(redis_environment(self.redis, self.namespace) if first else {}),
            },
        )

    def _command(self, start: RayStart, *, first: bool) -> list[str]:
        return head_command(start, self.port, self.client_port) if first else node_command(start, self.ray_address)

    def _await_started(self, process: RayProcess, *, needed: bool) -> None:
        """Wait until Ray reports the node as started. Nodes start one by one: several at once may exceed Ray's limit of 30 s each.

        Raises:
            TryLater: a `needed` node ends or takes too long.
        """
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until:
            if process.has_printed(STARTED):
                return
            if not process.is_running():
                break
            time.sleep(_POLL_S)
        if needed:
            raise TryLater(f"Ray's head did not start: {process.last_line()}", hint=f"see {process.folder}/ray.out")

    def _ports(self, folder: str) -> tuple[int, int]:
        """Return the recorded ports, because joined servers know the first; else choose free ones."""
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


def session_folder(home: str) -> str:
    """Return Ray's session folder: a short path, because socket paths may have at most 107 bytes."""
    mark = hashlib.sha256(home.encode()).hexdigest()[:8]
    return os.path.join(tempfile.gettempdir(), f"phalanx-ray-{os.getuid()}-{mark}")


def reachable(address: str, timeout_s: float = 1.0) -> bool:
    """Whether a process listens at the address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


def why_silent(address: str, *, tls: bool, timeout_s: float) -> str:
    """Return why no Ray head can be at the address; empty if a server answers there as Ray's head does, in HTTP/2.

    A driver finds that out only after half a minute.
    """
    host, _, port = address.rpartition(":")
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        with plain, _unverified_tls(plain) if tls else plain as connection:
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(64)
    except TimeoutError:
        return f"nothing answers at {address} within {timeout_s:.0f} s"
    except (ConnectionRefusedError, ValueError):
        return f"no Ray head listens at {address}"
    except ssl.SSLError as error:
        return f"the server at {address} does not speak TLS as RAY_USE_TLS=1 asks ({error.reason or error})"
    except OSError as error:
        return f"{address} cannot be reached: {error.strerror or error}"
    if not answer:
        return f"the server at {address} closes the connection without an answer; it is no Ray head, or it needs TLS (RAY_USE_TLS=1)"
    return "" if _is_http2(answer) else f"the server at {address} is no Ray head: it answers {answer[:16]!r}"


def _is_http2(answer: bytes) -> bool:
    """Whether an answer begins with a SETTINGS frame (RFC 9113, 3.4): three bytes of length, its type, no flags, stream 0."""
    return len(answer) >= _FRAME_BYTES and answer[3] == _SETTINGS and answer[5:_FRAME_BYTES] == bytes(4)


def _unverified_tls(plain: socket.socket) -> ssl.SSLSocket:
    """Return a TLS connection that is only asked whether it works; Ray's own client verifies the certificate and presents its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    certificate, key = os.environ.get("RAY_TLS_SERVER_CERT", ""), os.environ.get("RAY_TLS_SERVER_KEY", "")
    if certificate and key:
        context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain)


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
