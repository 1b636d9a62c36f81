"""The Ray engine, as the head sees it: the verbs of `ports.engine`, a driver process that speaks Ray, and Ray itself where it is ours.

One supervisor for each Ray node, for as long as the node lives: an actor pinned there holds what GPUs of it nobody else held when it came,
so that Ray's own books say who has what. Every other user's GPUs on a shared Ray cluster are simply not offered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec

from phalanx.core.errors import PhalanxError
from phalanx.core.ids import NodeId
from phalanx.core.state.events import NodeDead, Report
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.engines.ray.cluster import OwnCluster, reachable
from phalanx.engines.ray.protocol import (
    LINE_BYTES_MAX,
    Carried,
    Carry,
    Connected,
    Died,
    Order,
    RayNode,
    Release,
    Released,
    Seen,
    Tiding,
    Trouble,
    line_of,
    tiding_of,
)
from phalanx.engines.ray.render import RayFiles, environment
from phalanx.failpoints import around
from phalanx.ports.engine import Capabilities

KEEP_EVERY_S: Final = 1.0  # how late a Ray process that died is started again
DRIVER_PAUSE_S: Final = 1.0  # before a driver that ended is started again; doubled up to the next
DRIVER_PAUSE_MAX_S: Final = 15.0
CARRY_AGAIN_S: Final = 10.0  # after a node could not be carried
REACH_EVERY_S: Final = 0.25  # how soon a Ray head that has come up is noticed
LOOKED_S: Final = 15.0  # for a driver that is being started, to see the Ray cluster: it imports Ray in 1 to 3 s where nothing else runs
RELEASE_S: Final = 25.0  # of all nodes side by side: a supervisor ends its ranks with grace, and is swept
_log = logging.getLogger("phalanx.engines.ray")


@dataclass(slots=True, kw_only=True)
class RayEngine:
    """See the module.

    Args:
        address: of Ray's head.
        cluster: the Ray cluster, where it is ours to keep; None for one that was there.
        files: what the driver proves itself with; None leaves that to the environment.
        cluster_id: names the actors' namespace, and the folder on each node: another Phalanx on the same Ray has others.
        environment: what every supervisor gets: where the head is.
        ca_pem: the head's CA; empty where supervisors reach it by loopback.
        token_of: makes a node's token.
        home: for the driver's log.
    """

    address: str
    cluster: OwnCluster | None
    files: RayFiles | None
    cluster_id: str
    environment: Callable[[], dict[str, str]]
    ca_pem: str
    token_of: Callable[[NodeId], str]
    home: str
    _nodes: dict[NodeId, RayNode] = field(default_factory=dict)
    _carried: dict[NodeId, str] = field(default_factory=dict)
    _stopped: set[NodeId] = field(default_factory=set)
    _released: dict[NodeId, threading.Event] = field(default_factory=dict)
    _seen: deque[Report] = field(default_factory=deque)
    _driver: subprocess.Popen[bytes] | None = None
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _looked: threading.Event = field(default_factory=threading.Event)
    _hurry: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The engine's word."""
        return "ray"

    @property
    def capabilities(self) -> Capabilities:
        """Devices are picked by Phalanx among those that the actor holds; a dead supervisor is brought back by its actor."""
        return Capabilities(picks_devices=True, shares_files=False, revives_nodes=True)

    def open(self) -> None:
        """Bring up Ray where it is ours, and the driver; from then on every node of the Ray cluster gets a supervisor."""
        for name, run in (("ray-cluster", self._keep_cluster), ("ray-driver", self._keep_driver)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def gone(self) -> set[NodeId]:
        """Nodes that certainly do not run, as a head that starts can tell; of all others the lease tells."""
        return set() if self.cluster is None else self.cluster.gone()

    def nodes(self) -> list[NodeId]:
        """Nodes of the Ray cluster that live, by id."""
        with self._guard:
            return sorted(node_id for node_id, node in self._nodes.items() if node.alive)

    def start(self, node_id: NodeId) -> None:
        """Have the node carried; again is harmless."""
        with self._guard:
            self._stopped.discard(node_id)
            self._carry(node_id)

    def stop(self, node_id: NodeId) -> None:
        """End the node's supervisor, and give its GPUs back to Ray."""
        self._release([node_id])

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Nothing: supervisors are there before jobs are."""

    def observe(self) -> list[Report]:
        """Deaths since the last call."""
        found = []
        while self._seen:
            found.append(self._seen.popleft())
        return found

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless kept, release every node and end Ray where it is ours."""
        if not keep_nodes:
            if self.cluster is None:
                self._hurry.set()
                # What an earlier head of ours left there, or an earlier driver, can only be released by one that knows the nodes.
                if not self._looked.wait(LOOKED_S):
                    _log.warning("no driver saw the Ray cluster in %.0f s: what actors hold there stays held", LOOKED_S)
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

    # ----------------------------------------------------------------------------------------------------- what is kept up

    def _keep_cluster(self) -> None:
        while self.cluster is not None and not self._ended.is_set():
            try:
                for line in self.cluster.keep():
                    _log.info("%s", line)
            except (PhalanxError, OSError) as error:
                _log.error("%s", error)
            self._ended.wait(KEEP_EVERY_S)

    def _keep_driver(self) -> None:
        pause_s = DRIVER_PAUSE_S
        while not self._ended.is_set():
            if not reachable(self.address):  # a driver that finds nobody waits long, and aborts
                self._ended.wait(REACH_EVERY_S)
                continue
            began_s = time.monotonic()
            try:
                self._drive()
            except (OSError, RuntimeError) as error:  # no process, thread, file or space is to be had: not for ever
                _log.error("the Ray driver could not be kept: %s; another is started", error)
            if self._ended.is_set():
                return
            pause_s = DRIVER_PAUSE_S if time.monotonic() - began_s > 30.0 else min(2 * pause_s, DRIVER_PAUSE_MAX_S)
            self._hurry.wait(pause_s)
            self._hurry.clear()  # once: who cannot be started is not tried without a pause

    def _drive(self) -> None:
        """One life of the driver.

        Raises:
            OSError, RuntimeError: it could not be started, or what it said not be followed; it has ended.
        """
        with self._guard:
            if self._ended.is_set():  # while we looked whether Ray is there: nobody would end this driver
                return
            self._driver = driver = self._spawn()
        try:
            self._listen(driver)
        except BaseException:
            driver.kill()
            raise
        finally:
            code = driver.wait()
            with self._guard:  # the next one knows nothing yet; carrying again is harmless
                self._driver = None
                self._carried.clear()
                self._looked.clear()
        if not self._ended.is_set():
            _log.warning("the Ray driver ended with %d; another is started", code)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with around("ray.driver.log"):
            log = open(os.path.join(self.home, "ray-driver.log"), "ab")  # noqa: SIM115  # closed below
        with log, around("ray.driver.process"):
            return subprocess.Popen(
                driver_command(self.address, self.cluster_id), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=driver_environment(self.files), start_new_session=True,
            )  # fmt: skip

    def _listen(self, driver: subprocess.Popen[bytes]) -> None:
        assert driver.stdout is not None
        while line := driver.stdout.readline(LINE_BYTES_MAX):
            try:
                self._hear(tiding_of(line))
            except msgspec.MsgspecError as error:
                _log.warning("the Ray driver said what is not understood: %s", error)

    # -------------------------------------------------------------------------------------------------- what the driver says

    def _hear(self, tiding: Tiding) -> None:
        match tiding:
            case Connected(version=version):
                _log.info("the driver speaks with Ray %s at %s", version, self.address)
            case Seen(nodes=nodes):
                self._look(nodes)
            case Died(node_id=node_id, why=why, supervisor_id=who):
                # Another life may speak for the node by now: of one without a name, its lease decides.
                self._seen.append(NodeDead(node_id=node_id, supervisor_id=who, why=why, confirmed=who is not None))
            case Released(node_id=node_id):
                done = self._released.pop(node_id, None)
                if done is not None:
                    done.set()
            case Trouble(text=text, node_id=node_id, fatal=fatal):
                _log.log(logging.ERROR if fatal else logging.WARNING, "%s%s", f"node {node_id}: " if node_id else "Ray: ", text)  # fmt: skip
                if node_id is not None:
                    with self._guard:
                        self._carried.pop(node_id, None)
                    later = threading.Timer(CARRY_AGAIN_S, self._carry_again, (node_id,))
                    later.daemon = True  # a head that ends does not wait for it
                    later.start()
            case _:
                assert_never(tiding)

    def _look(self, nodes: list[RayNode]) -> None:
        with self._guard:
            self._looked.set()
            before, self._nodes = self._nodes, {node.node_id: node for node in nodes}
            for node in nodes:
                known = before.get(node.node_id)
                if node.alive:
                    self._carry(node.node_id)
                elif known is not None and known.alive:
                    self._carried.pop(node.node_id, None)
                    # Ray may only have lost sight of it: whether its ranks still run is for the lease to say.
                    self._seen.append(
                        NodeDead(node_id=node.node_id, supervisor_id=None, why=f"Ray lost it: {node.why}", confirmed=False)
                    )  # fmt: skip

    def _release(self, node_ids: list[NodeId]) -> None:
        """End the supervisors of these nodes side by side, also of those that were only asked to be carried; bounded by RELEASE_S."""
        asked = {}
        with self._guard:
            for node_id in node_ids:
                self._stopped.add(node_id)
                self._carried.pop(node_id, None)
                if self._driver is not None and node_id in self._nodes:
                    asked[node_id] = self._released[node_id] = threading.Event()
                    self._send(Release(node_id=node_id))
        until_s = time.monotonic() + RELEASE_S
        for node_id, done in asked.items():
            if not done.wait(max(0.0, until_s - time.monotonic())):
                _log.warning("node %s was not released in %.0f s", node_id, RELEASE_S)

    def _carry_again(self, node_id: NodeId) -> None:
        with self._guard:
            if not self._ended.is_set():
                self._carry(node_id)

    def _carry(self, node_id: NodeId) -> None:
        node = self._nodes.get(node_id)
        if self._driver is None:
            return  # the next one is told once it has looked
        if node is None or not node.alive or node_id in self._stopped or self._carried.get(node_id) == node.ray_id:
            return
        what = Carried(
            node_id=node_id, token=self.token_of(node_id), environment=self.environment(), ca_pem=self.ca_pem,
            virtual=node.virtual, address=node.address, cluster=self.cluster_id,
        )  # fmt: skip
        self._carried[node_id] = node.ray_id
        self._send(Carry(node=node, what=what))

    def _send(self, order: Order) -> None:
        driver = self._driver
        if driver is None or driver.stdin is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a driver that just ended: the next one is told anew
            driver.stdin.write(line_of(order))
            driver.stdin.flush()


def driver_command(address: str, cluster_id: str, *more: str) -> list[str]:
    """The driver's command line."""
    return [
        sys.executable, "-P", "-m", "phalanx.engines.ray.driver", "--address", address, "--namespace", f"phalanx-{cluster_id}", *more,
    ]  # fmt: skip


def driver_environment(files: RayFiles | None) -> dict[str, str]:
    """The driver's environment; for a Ray cluster of somebody else's, the user's own settings of Ray count."""
    if files is not None:
        given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    else:
        given = dict(os.environ)
        known = given.get("RAY_AUTH_TOKEN") or given.get("RAY_AUTH_TOKEN_PATH")
        file = os.path.join(os.path.expanduser("~"), ".ray", "auth_token")
        given.setdefault("RAY_AUTH_MODE", "token" if known or os.path.exists(file) else "disabled")
    return {**given, **environment(files)}
