"""One `ray start --block` and its child processes: started in its own session, found again by a later head, stopped completely.

All its processes have our marker in their environment, so that a sweep finds what a killed Ray left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import NodeId
from phalanx.durable_files import make_directory
from phalanx.engines.local import records
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.local.records import StartedNode
from phalanx.engines.ray.node_actor import FOLDER_VARIABLE
from phalanx.engines.ray.render import without_ray_variables
from phalanx.failpoints import around
from phalanx.node.processes.proctable import (
    ProcessIdentity,
    ProcessRow,
    alive,
    identity,
    process_environment,
)
from phalanx.node.processes.sweeps import NODE_KEY_VARIABLE, kill_until_none

# Ray ends its processes within 3 s, unless an actor of ours was not released; then it is killed.
STOP_GRACE_S: Final = 5.0
SWEEP_S: Final = 5.0
OUTPUT_MAX: Final = 1 << 16  # characters read from the end
_POLL_S: Final = 0.05
_log = logging.getLogger("phalanx.engines.ray")


@dataclass(slots=True)
class RayProcess:
    """One Ray node of ours on this machine.

    Attributes:
        folder: of its record and output.
        supervisor_folder: folder of the supervisor that its actor starts.
        command: called at each start, because an address may have changed.
    """

    name: str
    folder: str
    supervisor_folder: str
    command: Callable[[], list[str]]
    variables: Mapping[str, str]
    _living: StartedNode | None = None
    _process: subprocess.Popen[bytes] | None = None

    def is_running(self) -> bool:
        """Whether it runs, started by this head or an earlier one."""
        if self._living is None:
            self._living = records.read(self.folder)
        if self._living is None:
            return False
        if self._process is not None:
            self._process.poll()
        if alive(self._living.identity):
            return True
        self._sweep(self._living)
        return False

    def start(self) -> None:
        """Start it unless it runs."""
        if self.is_running():
            return
        make_directory("ray.start", self.folder)
        make_directory("ray.supervisor", self.supervisor_folder)
        key = f"ray-{self.name}-{secrets.token_hex(6)}"
        given = {
            **without_ray_variables(dict(os.environ)),
            **self.variables,
            NODE_KEY_VARIABLE: key,
            FOLDER_VARIABLE: self.supervisor_folder,
        }
        # The key is recorded first, as in the local engine: if the head dies before it records the pid, the next head finds the Ray node.
        unknown = ProcessIdentity(pid=0, started_ticks=0)
        records.write(self.folder, StartedNode(id=NodeId(self.name), node_key=key, identity=unknown, virtual_devices=0))
        with around("ray.start.output"):
            out = open(os.path.join(self.folder, "ray.out"), "wb")  # noqa: SIM115  # closed below
        with out, around("ray.start.process"):
            self._process = subprocess.Popen(
                self.command(),
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.folder,
            )
        who = identity(self._process.pid) or ProcessIdentity(pid=self._process.pid, started_ticks=0)
        self._living = StartedNode(id=NodeId(self.name), node_key=key, identity=who, virtual_devices=0)
        records.write(self.folder, self._living)

    def stop(self) -> None:
        """Stop it and its child processes. Idempotent."""
        if not self.is_running() or self._living is None:
            return
        living = self._living
        with contextlib.suppress(ProcessLookupError):
            os.kill(living.identity.pid, signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE_S
        while alive(living.identity) and time.monotonic() < until:
            if self._process is not None:
                self._process.poll()
            time.sleep(_POLL_S)
        self._sweep(living)

    def kill(self) -> None:
        """Kill it without Ray's own shutdown. Idempotent."""
        if self.is_running() and self._living is not None:
            self._sweep(self._living)

    def has_printed(self, words: str) -> bool:
        """Whether its output contains these words."""
        return words in self._output()

    def last_line(self) -> str:
        """Return the last line of its output, for a log."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _output(self) -> str:
        """Return the end of its output; all of it is a few kilobytes."""
        try:
            with open(os.path.join(self.folder, "ray.out"), encoding="utf-8", errors="replace") as out:
                return out.read()[-OUTPUT_MAX:]
        except OSError:
            return ""

    def _sweep(self, living: StartedNode) -> None:
        left = sweep_ray(living)
        if left:
            _log.warning("Processes %s of Ray node %s survive SIGKILL", left, self.name)
        if self._process is not None:
            self._process.poll()
        self._living = self._process = None
        records.remove(self.folder)


def sweep_ray(living: StartedNode) -> list[int]:
    """Kill the processes with this Ray node's marker, and return the survivors. The supervisor has its own marker and is not killed.

    It outlives Ray: its lease decides when its ranks end.
    """
    wanted = living.node_key.encode()

    def marked(table: Mapping[int, ProcessRow]) -> set[int]:
        return {pid for pid in table if process_environment(pid).get(NODE_KEY_VARIABLE.encode(), b"") == wanted}

    return kill_until_none(marked, SWEEP_S, certain=lambda: False)


def sweep_supervisors(folder: str) -> None:
    """Stop the supervisors that Ray's actors left in this folder, with all their processes."""
    nodes = records.recorded_nodes(folder)
    engine = LocalEngine(home=folder, own_nodes=nodes, environment=dict, token_of=lambda _: "")
    engine.adopt()
    engine.close(keep_nodes=False)
