"""The local engine: this machine's GPUs, or virtual nodes on it, each one process tree with a supervisor at its root.

Supervisors are started in sessions of their own and outlive the head; a head that comes back finds them by pid and start time and
watches them again. A dead one is swept (nothing of its node is left) before its death is told, so that the death is confirmed, and is
brought back after a while as a server that was switched on again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.events import NodeDead
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.engines.local import records
from phalanx.engines.local.records import LivingNode, LocalNode
from phalanx.failpoints import around
from phalanx.node.logic.environment import OF_THE_HEAD
from phalanx.node.shell import accounts
from phalanx.node.shell.proctable import ProcessIdentity, alive, identity
from phalanx.node.shell.sweeps import sweep_node
from phalanx.ports.engine import Capabilities

REVIVE_AFTER_S: Final = 20.0  # a killed virtual node comes back then; long enough to see the job go on without it
START_ATTEMPT_S: Final = 2.0  # a supervisor that dies younger than this is retried with growing pauses
_WATCH_EVERY_S: Final = 0.05
_STOP_GRACE_S: Final = 10.0
_HANDED_ON: Final = ("PHALANX_LOG", "PHALANX_CONTAINMENT", *accounts.SETTINGS)
_log = logging.getLogger("phalanx.engines.local")


@dataclass(slots=True)
class _Watched:
    node: LocalNode
    living: LivingNode | None = None
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    revive_at_s: float | None = None
    failed_starts: int = 0


@dataclass(slots=True, kw_only=True)
class LocalEngine:
    """Runs the supervisors of this machine.

    Args:
        home: the head's state folder; each node keeps its own in `nodes/<name>`.
        environment: what every supervisor gets (where the head is, at which address it is reached), beside its own token.
        token_of: makes a node's token.
        revive_after_s: pause before a dead node is brought back; None never does.
        jobs_as: "owner", where a supervisor that is root shall run jobs as their owners; what `inherited` says of it goes first.
        inherited: the environment that a supervisor and its ranks grow up in, without our own variables; this process's.
    """

    home: str
    environment: Callable[[], dict[str, str]]
    token_of: Callable[[NodeId], str]
    revive_after_s: float | None = REVIVE_AFTER_S
    inherited: Callable[[], Mapping[str, str]] = lambda: os.environ
    jobs_as: str = "head"
    _watched: dict[NodeId, _Watched] = field(default_factory=dict)
    _deaths: deque[NodeDead] = field(default_factory=deque)
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The engine's word."""
        return "local"

    @property
    def capabilities(self) -> Capabilities:
        """Devices are picked by Phalanx, files are shared: it is one machine."""
        return Capabilities(picks_devices=True, shares_files=True, revives_nodes=self.revive_after_s is not None)

    def adopt(self, nodes: Sequence[LocalNode]) -> list[NodeId]:
        """Take charge of these nodes without starting any: sweep what the dead left, and answer whose supervisors live."""
        for node in nodes:
            watched = _Watched(node=node)
            living = records.read(self._folder(node.id))
            if living is not None and alive(living.identity):
                watched.living = living
                _log.info("adopted the supervisor of %s, pid %d", node.id, living.identity.pid)
            elif living is not None:
                self._sweep(living)
                records.remove(self._folder(node.id))
            self._watched[node.id] = watched
        return self.living()

    def living(self) -> list[NodeId]:
        """Nodes whose supervisors live, by id."""
        return sorted(node_id for node_id, watched in list(self._watched.items()) if watched.living is not None)

    def open(self) -> dict[NodeId, OSError]:
        """Watch all nodes, and start the supervisors that do not live; why some could not be started. Those are tried again like the dead."""
        self._thread = threading.Thread(target=self._watch, name="local-engine", daemon=True)
        self._thread.start()
        failed = {}
        for node_id in self.nodes():
            try:
                self.start(node_id)
            except OSError as error:
                failed[node_id] = error
        return failed

    def nodes(self) -> list[NodeId]:
        """Nodes of this engine, by id."""
        return sorted(self._watched)

    def start(self, node_id: NodeId) -> None:
        """Start the node's supervisor unless it lives.

        Raises:
            OSError: it could not be started, and nothing of it runs; it is tried again after a pause, as a dead one is brought back.
        """
        with self._guard:
            watched = self._watched.get(node_id)
            if watched is None or watched.living is not None:
                return  # it was taken from us meanwhile, or lives
            try:
                watched.process, watched.living = self._spawn(watched.node)
            except OSError as error:
                watched.failed_starts += 1
                self._revive_later(watched)
                _log.warning("the supervisor of %s could not be started: %s", node_id, error)
                raise
            watched.started_s = time.monotonic()
            watched.revive_at_s = None

    def stop(self, node_id: NodeId) -> None:
        """SIGTERM the supervisor, then sweep whatever is left of the node."""
        with self._guard:
            watched = self._watched.pop(node_id, None)
        if watched is not None and watched.living is not None:
            self._end(watched.living, watched.process)

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless kept, end every supervisor, side by side."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if keep_nodes:
            return
        enders = [threading.Thread(target=self.stop, args=(node_id,)) for node_id in self.nodes()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Nothing: the supervisors of this engine live on their nodes and take attempts by themselves."""

    def observe(self) -> list[NodeDead]:
        """Deaths since the last call."""
        deaths = []
        while self._deaths:
            deaths.append(self._deaths.popleft())
        return deaths

    # ---- watching -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_EVERY_S):
            for watched in list(self._watched.values()):
                try:
                    self._look(watched)
                except OSError:
                    _log.exception("watching %s failed; tried again", watched.node.id)

    def _look(self, watched: _Watched) -> None:
        now_s = time.monotonic()
        living = watched.living
        if living is None:
            if watched.revive_at_s is not None and now_s >= watched.revive_at_s:
                with contextlib.suppress(OSError):  # it is logged, and tried again
                    self.start(watched.node.id)
            return
        if watched.process is not None:
            watched.process.poll()  # reaps our own child, so that its pid can be told dead
        if alive(living.identity):
            return
        self._sweep(living)
        records.remove(self._folder(living.id))
        with self._guard:
            watched.living, watched.process = None, None
            young = now_s - watched.started_s < START_ATTEMPT_S
            watched.failed_starts = watched.failed_starts + 1 if young else 0
            self._revive_later(watched)
        self._deaths.append(
            NodeDead(
                node_id=living.id,
                supervisor_id=living.supervisor_id,
                why="its supervisor died and nothing of it is left",
                confirmed=True,
            )
        )

    def _revive_later(self, watched: _Watched) -> None:
        if self.revive_after_s is not None:
            watched.revive_at_s = time.monotonic() + self.revive_after_s * 2 ** min(watched.failed_starts, 5)

    def _sweep(self, living: LivingNode) -> None:
        swept = sweep_node(living.node_key, root=living.identity)
        _log.info("swept %s: %d processes killed, left over: %s", living.id, swept.killed, swept.leftover or "none")

    # ---- starting and ending ------------------------------------------------------------------------------------------

    def _spawn(self, node: LocalNode) -> tuple[subprocess.Popen[bytes], LivingNode]:
        folder = self._folder(node.id)
        with around("local.spawn.directory"):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        node_key = f"{node.id}-{secrets.token_hex(6)}"
        supervisor_id = SupervisorId(f"{node.id}-{secrets.token_hex(8)}")
        environment = {
            accounts.JOBS_AS_VARIABLE: self.jobs_as,
            **{
                name: value
                for name, value in self.inherited().items()
                if (not name.startswith("PHALANX_") or name in _HANDED_ON) and name not in OF_THE_HEAD
            },
            "PHALANX_NODE_ADDRESS": "127.0.0.1",
            **self.environment(),
            "PHALANX_NODE_ID": node.id,
            "PHALANX_NODE_KEY": node_key,
            "PHALANX_NODE_LIFE": supervisor_id,
            "PHALANX_NODE_DIR": folder,
            "PHALANX_NODE_VIRTUAL": str(node.virtual_devices),
            "PHALANX_NODE_TOKEN": self.token_of(node.id),
        }
        left = records.read(folder)
        if left is not None:  # by a start that failed: once its key is forgotten, nobody finds what may still run
            self._sweep(left)
        # Its key first: a head that dies between start and record leaves a supervisor that the next one finds, and sweeps, by its key.
        nobody = ProcessIdentity(pid=0, started_ticks=0)
        living = LivingNode(
            id=node.id, node_key=node_key, identity=nobody, virtual_devices=node.virtual_devices, supervisor_id=supervisor_id
        )  # fmt: skip
        records.write(folder, living)
        with around("local.spawn.output"):
            output = open(os.path.join(folder, "supervisor.out"), "ab")  # noqa: SIM115  # closed below
        with output, around("local.spawn.process"):
            process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.app.node"], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True, cwd=folder,
            )  # fmt: skip
        try:
            who = identity(process.pid) or ProcessIdentity(pid=process.pid, started_ticks=0)
            living = replace(living, identity=who)
            records.write(folder, living)
        except BaseException:  # nobody would watch it
            self._take_back(living, process)
            raise
        return process, living

    def _take_back(self, living: LivingNode, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)
        self._sweep(living)

    def _end(self, living: LivingNode, process: subprocess.Popen[bytes] | None) -> None:
        if alive(living.identity):
            with contextlib.suppress(
                ProcessLookupError
            ):  # it may end by itself just now; the sweep below must come all the same
                os.kill(living.identity.pid, 15)
        until = time.monotonic() + _STOP_GRACE_S
        while alive(living.identity) and time.monotonic() < until:
            if process is not None:
                process.poll()
            time.sleep(0.01)
        self._sweep(living)
        if process is not None:
            process.poll()
        records.remove(self._folder(living.id))

    def _folder(self, node_id: NodeId) -> str:
        return os.path.join(self.home, "nodes", node_id)
