"""The Ray engine in the head: implements `ports.engine`, runs the driver process that uses Ray, and Ray itself if the cluster is ours.

Each Ray node has one supervisor as long as it lives. An actor pinned there holds the GPUs that were free when it started, so that Ray's own
accounting is correct. GPUs of other users of a shared Ray cluster are not offered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import NodeId
from phalanx.core.state.reports import NodeDied, Report
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.engines.observations import Observations
from phalanx.engines.ray.cluster import ManagedRayCluster, reachable
from phalanx.engines.ray.joined_node import python_version, ray_version
from phalanx.engines.ray.options import ENGINE_NAME
from phalanx.engines.ray.protocol import (
    LINE_BYTES_MAX,
    DriverCommand,
    DriverConnected,
    DriverEvent,
    DriverProblem,
    NodeReleased,
    NodesListed,
    RayJoin,
    RayNode,
    ReleaseNode,
    StartSupervisor,
    SupervisorDied,
    SupervisorSpec,
    decode_event,
    encode_line,
)
from phalanx.engines.ray.render import RayCredentials, ray_environment
from phalanx.failpoints import around
from phalanx.ports.engine import Admission, Discovery, SignedCertificate

KEEP_EVERY_S: Final = 1.0  # interval at which dead Ray processes are restarted
DRIVER_PAUSE_S: Final = 1.0  # before an ended driver is restarted; doubles up to the next constant
DRIVER_PAUSE_MAX_S: Final = 15.0
START_RETRY_S: Final = 10.0  # before a failed start of a supervisor is retried
REACH_EVERY_S: Final = 0.25  # interval of connection tests to a Ray head
# When a lost Ray head of others is reported, after its loss: at once for the history, and once leases have expired, as a node's cause.
LOSS_REPORTS_S: Final = (0.0, 15.0)
NODES_LISTED_S: Final = (
    15.0  # for a starting driver to list the Ray nodes: it imports Ray in 1 to 3 s on an idle machine
)
RELEASE_S: Final = 25.0  # to release all nodes in parallel: a supervisor stops its ranks with grace, and is swept
_log = logging.getLogger("phalanx.engines.ray")


@dataclass(slots=True, kw_only=True)
class RayEngine:
    """See the module.

    Args:
        address: of Ray's head.
        cluster: the Ray cluster if we run it; None for an existing one.
        files: the driver's credentials; None takes them from the environment.
        cluster_id: part of the actors' namespace and of the folder on each node, unique to this Phalanx on a shared Ray cluster.
        environment: returns variables of every supervisor, such as the head's URL.
        ca_pem: the head's CA certificate; empty if supervisors connect by loopback.
        token_of: makes a node's token.
        home: for the driver's log.
        sign: returns the certificate of a joining server's Ray node, given its address and host name.
    """

    address: str
    cluster: ManagedRayCluster | None
    files: RayCredentials | None
    cluster_id: str
    environment: Callable[[], dict[str, str]]
    ca_pem: str
    token_of: Callable[[NodeId], str]
    home: str
    sign: Callable[[str, str], SignedCertificate] | None = None
    _nodes: dict[NodeId, RayNode] = field(default_factory=dict)
    _started: dict[NodeId, str] = field(default_factory=dict)
    _stopped: set[NodeId] = field(default_factory=set)
    _released: dict[NodeId, threading.Event] = field(default_factory=dict)
    _events: Observations[Report] = field(default_factory=Observations)
    _driver: subprocess.Popen[bytes] | None = None
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _nodes_listed: threading.Event = field(default_factory=threading.Event)  # by the present driver
    _ever_listed: bool = False
    _hurry: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    def discover(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> Discovery:
        """Return the deaths of our own cluster's nodes on this machine that certainly do not run."""
        del live
        gone = set() if self.cluster is None else self.cluster.nodes_certainly_down()
        return Discovery(
            deaths=[
                NodeDied(
                    node_id=node.id,
                    supervisor_id=node.supervisor_id,
                    why="it did not run when the head started",
                    confirmed=True,
                )
                for node in known
                if node.engine == ENGINE_NAME and node.state is NodeState.UP and node.id in gone
            ]
        )

    def open(self) -> None:
        """Start Ray if the cluster is ours, and the driver; from then on every Ray node gets a supervisor."""
        if self._threads:
            return
        keep = self._watch_others_cluster if self.cluster is None else self._run_cluster
        for name, run in (("ray-cluster", keep), ("ray-driver", self._run_drivers)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def nodes(self) -> list[NodeId]:
        """Return the live nodes of the Ray cluster, by id."""
        with self._guard:
            return sorted(node_id for node_id, node in self._nodes.items() if node.alive)

    def expected_nodes(self) -> list[NodeId] | None:
        """Return the live nodes of the Ray cluster; None while no driver has listed them."""
        if not self._ever_listed:
            return None
        return [node_id for node_id, node in self._nodes.items() if node.alive]  # replaced as a whole: no lock needed

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Do nothing: supervisors run before jobs are placed."""

    def observe(self) -> list[Report]:
        """Return deaths since the last call."""
        return self._events.take()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each event."""
        self._events.listen(wake)

    def admit(self, node_id: NodeId, address: str, hostname: str) -> Admission | None:
        """Admit a server to our own Ray cluster; an existing one takes none from us."""
        if self.cluster is None or self.sign is None:
            return None
        if not address:
            raise BadRequest(
                f"node {node_id} sent no address", hint="it must state the address on which the other nodes reach it"
            )
        signed = self.sign(address, hostname)
        given = RayJoin(
            address=self.cluster.ray_address,
            token=self.cluster.token,
            key_pem=signed.key_pem,
            certificate_pem=signed.certificate_pem,
            ray_version=ray_version(),
            python_version=python_version(),
            reconnect_s=self.cluster.files.reconnect_s,
        )
        settings = {name: str(value) for name, value in msgspec.to_builtins(given).items()}
        return Admission(engine=ENGINE_NAME, settings=settings)

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless `keep_nodes`, release every node, and stop Ray if the cluster is ours."""
        if not keep_nodes:
            if self.cluster is None:
                self._hurry.set()
                # Only a driver that knows the nodes can release actors of an earlier head or driver.
                if not self._nodes_listed.wait(NODES_LISTED_S):
                    _log.warning(
                        "No driver listed the Ray nodes within %.0f s; actors there keep their GPUs", NODES_LISTED_S
                    )
            self._release(self.nodes())
        with self._guard:
            self._ended.set()
            self._hurry.set()
            driver = self._driver
        if driver is not None and driver.stdin is not None:
            with contextlib.suppress(OSError):
                driver.stdin.close()
            try:
                driver.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                driver.kill()
        for thread in self._threads:
            thread.join(timeout=5.0)
        if self.cluster is not None and not keep_nodes:
            self.cluster.stop()

    # ----------------------------------------------------------------------------------------------- processes kept running

    def _run_cluster(self) -> None:
        while self.cluster is not None and not self._ended.is_set():
            try:
                for line in self.cluster.ensure_running():
                    _log.info("%s", line)
            except (PhalanxError, OSError) as error:
                _log.error("%s", error)
            self._ended.wait(KEEP_EVERY_S)

    def _watch_others_cluster(self) -> None:
        """Report a lost Ray head of a cluster that we do not run. A driver notices it late, and ends without a reason."""
        why = f"the Ray head at {self.address} does not answer, and Ray ends its nodes without it"
        lost_s: float | None = None
        reports: list[float] = []
        while not self._ended.wait(KEEP_EVERY_S):
            if reachable(self.address):
                lost_s = None
                continue
            if lost_s is None:
                lost_s, reports = time.monotonic(), list(LOSS_REPORTS_S)
                _log.error("%s; start that Ray cluster again at this address", why[0].upper() + why[1:])
            if reports and time.monotonic() - lost_s >= reports[0]:
                del reports[0]
                self._events.extend(
                    NodeDied(node_id=node_id, supervisor_id=None, why=why, confirmed=False) for node_id in self.nodes()
                )

    def _run_drivers(self) -> None:
        pause_s = DRIVER_PAUSE_S
        while not self._ended.is_set():
            if not reachable(self.address):  # without a Ray head a driver waits long, then aborts
                self._ended.wait(REACH_EVERY_S)
                continue
            began_s = time.monotonic()
            try:
                self._run_driver()
            except (OSError, RuntimeError) as error:  # no process, thread, file or space available; may be temporary
                _log.error("The Ray driver failed: %s; restarting it", error)
            if self._ended.is_set():
                return
            pause_s = DRIVER_PAUSE_S if time.monotonic() - began_s > 30.0 else min(2 * pause_s, DRIVER_PAUSE_MAX_S)
            self._hurry.wait(pause_s)
            self._hurry.clear()  # skips one pause only

    def _run_driver(self) -> None:
        """Start a driver, and handle its messages until it ends.

        Raises:
            OSError, RuntimeError: it could not be started, or its messages not be handled; it has ended.
        """
        with self._guard:
            if self._ended.is_set():  # closed while we waited for Ray: this driver would never be stopped
                return
            self._driver = driver = self._spawn()
        try:
            self._read_messages(driver)
        except BaseException:
            driver.kill()
            raise
        finally:
            code = driver.wait()
            with self._guard:  # the next driver gets all nodes again, which is idempotent
                self._driver = None
                self._started.clear()
                self._nodes_listed.clear()
        if not self._ended.is_set():
            _log.warning("The Ray driver ended with code %d; restarting it", code)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with around("ray.driver.log"):
            log = open(os.path.join(self.home, "ray-driver.log"), "ab")  # noqa: SIM115  # closed below
        with log, around("ray.driver.process"):
            return subprocess.Popen(
                driver_command(self.address, self.cluster_id),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=driver_environment(self.files),
                start_new_session=True,
            )

    def _read_messages(self, driver: subprocess.Popen[bytes]) -> None:
        assert driver.stdout is not None
        while line := driver.stdout.readline(LINE_BYTES_MAX):
            try:
                self._on_message(decode_event(line))
            except msgspec.MsgspecError as error:
                _log.warning("Ignored an invalid message of the Ray driver: %s", error)

    # ------------------------------------------------------------------------------------------------ messages of the driver

    def _on_message(self, tiding: DriverEvent) -> None:
        match tiding:
            case DriverConnected(version=version):
                _log.info("The driver is connected to Ray %s at %s", version, self.address)
            case NodesListed(nodes=nodes):
                self._on_nodes(nodes)
            case SupervisorDied(node_id=node_id, why=why, supervisor_id=who):
                # A newer supervisor may run by now; without an id the death is unconfirmed, and the lease decides.
                self._events.append(NodeDied(node_id=node_id, supervisor_id=who, why=why, confirmed=who is not None))
            case NodeReleased(node_id=node_id):
                done = self._released.pop(node_id, None)
                if done is not None:
                    done.set()
            case DriverProblem(text=text, node_id=node_id, fatal=fatal):
                _log.log(
                    logging.ERROR if fatal else logging.WARNING, "%s: %s", f"Node {node_id}" if node_id else "Ray", text
                )
                if node_id is not None:
                    with self._guard:
                        self._started.pop(node_id, None)
                    later = threading.Timer(START_RETRY_S, self._retry_start, (node_id,))
                    later.daemon = True  # a stopping head does not wait for it
                    later.start()
            case _:
                assert_never(tiding)

    def _on_nodes(self, nodes: list[RayNode]) -> None:
        with self._guard:
            self._nodes_listed.set()
            self._ever_listed = True
            before, self._nodes = self._nodes, {node.node_id: node for node in nodes}
            for node in nodes:
                known = before.get(node.node_id)
                if node.alive:
                    self._start_supervisor(node.node_id)
                elif known is not None and known.alive:
                    self._started.pop(node.node_id, None)
                    # Ray may only have lost the connection: the lease decides whether its ranks still run.
                    why = f"Ray reports it dead: {node.why}"
                    self._events.append(NodeDied(node_id=node.node_id, supervisor_id=None, why=why, confirmed=False))

    def _release(self, node_ids: list[NodeId]) -> None:
        """Stop the supervisors of these nodes in parallel, started or still starting, within RELEASE_S."""
        asked = {}
        with self._guard:
            for node_id in node_ids:
                self._stopped.add(node_id)
                self._started.pop(node_id, None)
                if self._driver is not None and node_id in self._nodes:
                    asked[node_id] = self._released[node_id] = threading.Event()
                    self._send(ReleaseNode(node_id=node_id))
        until_s = time.monotonic() + RELEASE_S
        for node_id, done in asked.items():
            if not done.wait(max(0.0, until_s - time.monotonic())):
                _log.warning("Node %s was not released within %.0f s", node_id, RELEASE_S)

    def _retry_start(self, node_id: NodeId) -> None:
        with self._guard:
            if not self._ended.is_set():
                self._start_supervisor(node_id)

    def _start_supervisor(self, node_id: NodeId) -> None:
        node = self._nodes.get(node_id)
        if self._driver is None:
            return  # the next driver gets the node once it has listed them
        if node is None or not node.alive or node_id in self._stopped or self._started.get(node_id) == node.ray_id:
            return
        what = SupervisorSpec(
            node_id=node_id,
            token=self.token_of(node_id),
            environment=self.environment(),
            ca_pem=self.ca_pem,
            virtual_devices=node.virtual_devices,
            address=node.address,
            cluster=self.cluster_id,
            gpus=int(node.gpus),
        )
        self._started[node_id] = node.ray_id
        self._send(StartSupervisor(node=node, spec=what))

    def _send(self, order: DriverCommand) -> None:
        driver = self._driver
        if driver is None or driver.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # the driver just ended; the next one gets all nodes again
            driver.stdin.write(encode_line(order))
            driver.stdin.flush()


def driver_command(address: str, cluster_id: str, *more: str) -> list[str]:
    """Return the driver's command line."""
    return [
        sys.executable,
        "-P",
        "-m",
        "phalanx.engines.ray.driver",
        "--address",
        address,
        "--namespace",
        f"phalanx-{cluster_id}",
        *more,
    ]


def driver_environment(files: RayCredentials | None) -> dict[str, str]:
    """Return the driver's environment; for an existing Ray cluster it includes the user's own Ray settings."""
    if files is not None:
        given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    else:
        given = dict(os.environ)
        known = given.get("RAY_AUTH_TOKEN") or given.get("RAY_AUTH_TOKEN_PATH")
        file = os.path.join(os.path.expanduser("~"), ".ray", "auth_token")
        given.setdefault("RAY_AUTH_MODE", "token" if known or os.path.exists(file) else "disabled")
    return {**given, **ray_environment(files)}
