"""The local engine: this machine's GPUs, or virtual nodes on it, each one process tree with a supervisor at its root.

Supervisors run in their own sessions and outlive the head; a restarted head finds them by pid and start time and watches them again. The
engine sweeps all processes of a dead supervisor's node before it reports the death, so that the death is confirmed, and starts the
supervisor again after a pause, like a server that is switched on again.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.fleet.virtual_devices import VIRTUAL_CPUS_VARIABLE, VIRTUAL_MEMORY_VARIABLE, VirtualDevices
from phalanx.core.ids import NodeId, SupervisorId
from phalanx.core.state.reports import NodeDied
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.durable_files import make_directory
from phalanx.engines.local import records
from phalanx.engines.local.process_exits import RETRY_S, ProcessExits
from phalanx.engines.local.records import StartedNode
from phalanx.engines.observations import Observations
from phalanx.failpoints import around
from phalanx.node.files import job_accounts
from phalanx.node.logic.operator_hooks import HOOKS_VARIABLE
from phalanx.node.logic.variables.environment import HEAD_ONLY_VARIABLES
from phalanx.node.processes.proctable import ProcessIdentity, alive, identity
from phalanx.node.processes.sweeps import sweep_node
from phalanx.ports.engine import Admission, Discovery, LocalNode

ENGINE_NAME: Final = "local"
MEMBER_ENGINE: Final = "joined"  # keeps the supervisor of a server that joins (engines.joined)
SCOPE_VARIABLE: Final = "PHALANX_SUPERVISOR_SCOPE"  # set by the system unit of a node
START_ATTEMPT_S: Final = 2.0  # a supervisor that dies sooner is restarted with growing pauses
_STOP_GRACE_S: Final = 10.0
_PASSED: Final = (
    "PHALANX_LOG",
    "PHALANX_CONTAINMENT",
    "PHALANX_LIMITS",
    HOOKS_VARIABLE,
    VIRTUAL_CPUS_VARIABLE,
    VIRTUAL_MEMORY_VARIABLE,
    *job_accounts.ACCOUNT_VARIABLES,
)
_log = logging.getLogger("phalanx.engines.local")


@dataclass(slots=True)
class _Watched:
    node: LocalNode
    living: StartedNode | None = None
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    revive_at_s: float | None = None
    failed_starts: int = 0
    died: bool = False  # while no head ran: its record was there, its supervisor was not


@dataclass(slots=True, kw_only=True)
class LocalEngine:
    """Runs the supervisors of this machine.

    Args:
        home: the head's state folder; each node keeps its own in `nodes/<name>`.
        own_nodes: the nodes to run.
        environment: returns variables of every supervisor, such as the head's URL.
        token_of: makes a node's token.
        revive_after_s: pause before a dead supervisor is restarted; None disables restarts.
        jobs_as: "owner" if a supervisor that runs as root shall run jobs as their owners; a value in `inherited` has precedence.
        sole_head: no other head shares the store: every node of the store that has the engine's name was started by this engine.
        inherited: returns the base environment of supervisors and ranks; by default this process's.
    """

    home: str
    environment: Callable[[], dict[str, str]]
    token_of: Callable[[NodeId], str]
    own_nodes: Sequence[LocalNode] = ()
    revive_after_s: float | None = None
    inherited: Callable[[], Mapping[str, str]] = lambda: os.environ
    jobs_as: str = "head"
    sole_head: bool = True
    _watched: dict[NodeId, _Watched] = field(default_factory=dict)
    _deaths: Observations[NodeDied] = field(default_factory=Observations)
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _exits: ProcessExits | None = None
    _thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The engine's name."""
        return ENGINE_NAME

    def discover(self, known: Sequence[Node], live: Sequence[tuple[Job, Attempt]]) -> Discovery:
        """Take charge of the nodes, and return which do not run: their remaining processes were removed."""
        del live
        running = set(self.adopt())
        # Each of several heads knows only the nodes of its own machine; leases cover those of the others.
        ours = [node for node in known if node.engine == ENGINE_NAME and (self.sole_head or node.id in self._watched)]
        gone = [node for node in ours if node.state is NodeState.UP and node.id not in running]
        return Discovery(
            deaths=[self._death(node, died=self._died(node.id)) for node in gone],
            retired=[node.id for node in ours if node.id not in self._watched],  # none with several heads
        )

    @staticmethod
    def _death(node: Node, *, died: bool) -> NodeDied:
        why = "it did not run when the head started" if died else "it was stopped with the head"
        return NodeDied(node_id=node.id, supervisor_id=node.supervisor_id, why=why, confirmed=True, planned=not died)

    def _died(self, node_id: NodeId) -> bool:
        """Whether the node died while no head ran: a head that stops its nodes removes their records."""
        watched = self._watched.get(node_id)
        return records.read(self.node_folder(node_id)) is not None if watched is None else watched.died

    def add(self, node: LocalNode) -> None:
        """Add a node to those of this engine; `adopt` or `start` follows. Idempotent."""
        if all(own.id != node.id for own in self.own_nodes):
            self.own_nodes = [*self.own_nodes, node]
        with self._guard:
            if self._thread is not None:
                self._watched.setdefault(node.id, _Watched(node=node))
                self._wake_watch()

    def adopt(self) -> list[NodeId]:
        """Take charge of the nodes without starting any: sweep dead ones, and return those whose supervisors run. Idempotent."""
        for node in self.own_nodes:
            if node.id in self._watched:
                continue
            watched = _Watched(node=node)
            living = records.read(self.node_folder(node.id))
            if living is not None and alive(living.identity):
                watched.living = living
                _log.info("adopted the supervisor of %s, pid %d", node.id, living.identity.pid)
            elif living is not None:
                watched.died = True
                self._sweep(living)
                records.remove(self.node_folder(node.id))
            self._watched[node.id] = watched
        return self.running_nodes()

    def running_nodes(self) -> list[NodeId]:
        """Return the nodes whose supervisors run, by id."""
        return sorted(node_id for node_id, watched in list(self._watched.items()) if watched.living is not None)

    def open(self) -> None:
        """Watch all nodes and start missing supervisors. Failed starts are retried after a pause."""
        if self._thread is not None:
            return
        self.watch()
        for node_id in self.nodes():
            with contextlib.suppress(OSError):  # `start` logs it and retries
                self.start(node_id)

    def watch(self) -> None:
        """Start to watch the nodes."""
        self._exits = exits = ProcessExits()
        self._thread = threading.Thread(target=lambda: self._watch(exits), name="local-engine", daemon=True)
        self._thread.start()

    def nodes(self) -> list[NodeId]:
        """Return the nodes of this engine, by id."""
        return sorted(self._watched)

    def start(self, node_id: NodeId) -> None:
        """Start the node's supervisor unless it runs.

        Raises:
            OSError: it could not be started; the engine retries after a pause.
        """
        with self._guard:
            watched = self._watched.get(node_id)
            if watched is None or watched.living is not None:
                return  # the node was removed, or its supervisor runs
            try:
                watched.process, watched.living = self._spawn(watched.node)
            except OSError as error:
                watched.failed_starts += 1
                self._revive_later(watched)
                self._wake_watch()
                _log.warning("Could not start the supervisor of node %s: %s", node_id, error)
                raise
            watched.started_s = time.monotonic()
            watched.revive_at_s = None
            self._wake_watch()

    def stop(self, node_id: NodeId) -> None:
        """SIGTERM the supervisor, then kill all remaining processes of the node."""
        with self._guard:
            watched = self._watched.pop(node_id, None)
            self.own_nodes = [node for node in self.own_nodes if node.id != node_id]
        if watched is not None and watched.living is not None:
            self._end(watched.living, watched.process)

    def close(self, *, keep_nodes: bool) -> None:
        """Stop watching; unless `keep_nodes`, stop all supervisors in parallel."""
        self._ended.set()
        self._wake_watch()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if keep_nodes:
            return
        enders = [threading.Thread(target=self.stop, args=(node_id,)) for node_id in self.nodes()]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def expected_nodes(self) -> list[NodeId]:
        """Return the nodes of this engine."""
        return self.nodes()

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Do nothing: this engine's supervisors get attempts from the head."""

    def admit(self, node_id: NodeId, address: str, hostname: str) -> Admission | None:
        """Admit every server: it starts its own supervisor."""
        del node_id, address, hostname
        return Admission(engine=MEMBER_ENGINE)

    def observe(self) -> list[NodeDied]:
        """Return deaths since the last call."""
        return self._deaths.take()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each event."""
        self._deaths.listen(wake)

    # ---- watching -----------------------------------------------------------------------------------------------------

    def _watch(self, exits: ProcessExits) -> None:
        retry = False
        while not self._ended.is_set():
            watched = list(self._watched.values())
            living = [one.living.identity for one in watched if one.living is not None]
            due_s = [one.revive_at_s for one in watched if one.living is None and one.revive_at_s is not None]
            waits_s = [at_s - time.monotonic() for at_s in due_s] + ([RETRY_S] if retry else [])
            exits.wait(living, min(waits_s, default=None))
            retry = False
            for one in list(self._watched.values()):
                try:
                    if not self._ended.is_set():
                        self._check(one)
                except OSError:
                    _log.exception("Could not check node %s; retrying", one.node.id)
                    retry = True
        exits.close()

    def _wake_watch(self) -> None:
        if self._exits is not None:
            self._exits.wake()

    def _check(self, watched: _Watched) -> None:
        now_s = time.monotonic()
        living = watched.living
        if living is None:
            if watched.revive_at_s is not None and now_s >= watched.revive_at_s:
                with contextlib.suppress(OSError):  # `start` logs it and retries
                    self.start(watched.node.id)
            return
        if watched.process is not None:
            watched.process.poll()  # reaps our child, so that its pid counts as dead
        if alive(living.identity):
            return
        self._sweep(living)
        records.remove(self.node_folder(living.id))
        with self._guard:
            watched.living, watched.process = None, None
            young = now_s - watched.started_s < START_ATTEMPT_S
            watched.failed_starts = watched.failed_starts + 1 if young else 0
            self._revive_later(watched)
        self._deaths.append(
            NodeDied(
                node_id=living.id,
                supervisor_id=living.supervisor_id,
                why="its supervisor died; all its processes have ended",
                confirmed=True,
            )
        )

    def _revive_later(self, watched: _Watched) -> None:
        if self.revive_after_s is not None:
            watched.revive_at_s = time.monotonic() + self.revive_after_s * 2 ** min(watched.failed_starts, 5)

    def _sweep(self, living: StartedNode) -> None:
        swept = sweep_node(living.node_key, root=living.identity)
        _log.info(
            "Swept node %s: killed %d processes, still running: %s", living.id, swept.killed, swept.leftover or "none"
        )

    # ---- starting and ending ------------------------------------------------------------------------------------------

    def _spawn(self, node: LocalNode) -> tuple[subprocess.Popen[bytes], StartedNode]:
        folder = self.node_folder(node.id)
        make_directory("local.spawn", folder)
        node_key = f"{node.id}-{secrets.token_hex(6)}"
        supervisor_id = SupervisorId(f"{node.id}-{secrets.token_hex(8)}")
        environment = {
            job_accounts.JOBS_AS_VARIABLE: self.jobs_as,
            **{
                name: value
                for name, value in self.inherited().items()
                if (not name.startswith("PHALANX_") or name in _PASSED) and name not in HEAD_ONLY_VARIABLES
            },
            "PHALANX_NODE_ENGINE": ENGINE_NAME,
            "PHALANX_NODE_ADDRESS": "127.0.0.1",
            **self.environment(),
            "PHALANX_NODE_ID": node.id,
            "PHALANX_NODE_KEY": node_key,
            "PHALANX_NODE_LIFE": supervisor_id,
            "PHALANX_NODE_DIR": folder,
            "PHALANX_NODE_VIRTUAL": str(
                VirtualDevices(count=node.virtual_devices, model=node.virtual_model, mig=node.virtual_mig)
            ),
            "PHALANX_NODE_OFFERS": node.offers,
            "PHALANX_NODE_CORDONED": "1" if node.cordoned else "",
            "PHALANX_NODE_TOKEN": self.token_of(node.id),
        }
        left = records.read(folder)
        if left is not None:  # a failed start left processes, which only this key can find
            self._sweep(left)
        # The key is recorded first: if the head dies before it records the pid, the next head finds and sweeps the supervisor by its key.
        unknown = ProcessIdentity(pid=0, started_ticks=0)
        living = StartedNode(
            id=node.id,
            node_key=node_key,
            identity=unknown,
            virtual_devices=node.virtual_devices,
            supervisor_id=supervisor_id,
        )
        records.write(folder, living)
        with around("local.spawn.output"):
            output = open(os.path.join(folder, "supervisor.out"), "ab")  # noqa: SIM115  # closed below
        with output, around("local.spawn.process"):
            process = subprocess.Popen(
                [*self._scope(node), sys.executable, "-m", "phalanx.app.node"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder,
            )
        try:
            who = identity(process.pid) or ProcessIdentity(pid=process.pid, started_ticks=0)
            living = replace(living, identity=who)
            records.write(folder, living)
        except BaseException:  # the supervisor would run unwatched
            self._kill(living, process)
            raise
        return process, living

    def _scope(self, node: LocalNode) -> list[str]:
        """Return the words before the supervisor's command that place it into a cgroup of its own; see systemd-run(1).

        systemd-run replaces itself by the supervisor, which so keeps the pid and the environment.
        """
        if not self.inherited().get(SCOPE_VARIABLE):
            return []
        unit = f"phalanx-supervisor-{secrets.token_hex(4)}"
        words = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={unit}", "--property=Delegate=yes"]
        return [*words, f"--description=Phalanx supervisor of node {node.id}", "--"]

    def _kill(self, living: StartedNode, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_GRACE_S)
        self._sweep(living)

    def _end(self, living: StartedNode, process: subprocess.Popen[bytes] | None) -> None:
        if alive(living.identity):
            with contextlib.suppress(ProcessLookupError):  # it may have just ended; the sweep below is still needed
                os.kill(living.identity.pid, 15)
        until = time.monotonic() + _STOP_GRACE_S
        while alive(living.identity) and time.monotonic() < until:
            if process is not None:
                process.poll()
            time.sleep(0.01)
        self._sweep(living)
        if process is not None:
            process.poll()
        records.remove(self.node_folder(living.id))

    def node_folder(self, node_id: NodeId) -> str:
        """Return the folder in which the node keeps its record, log and scratch."""
        return os.path.join(self.home, "nodes", node_id)
