"""One `ray start --block` and all it starts: begun in a session of its own, found again by a later head, ended without leftovers.

Every process of it carries our marker in its environment, so that a sweep finds what a killed Ray left behind.
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
from phalanx.engines.local import records
from phalanx.engines.local.engine import LocalEngine
from phalanx.engines.local.records import LivingNode
from phalanx.engines.ray.carrier import FOLDER_VARIABLE
from phalanx.engines.ray.render import cleaned
from phalanx.failpoints import around
from phalanx.node.shell.proctable import ProcessIdentity, ProcessRow, alive, environment, identity
from phalanx.node.shell.sweeps import NODE_KEY_VARIABLE, kill_until_none

# Ray ends its own processes within 3 s; where an actor of ours was not released it does not, and is killed.
STOP_GRACE_S: Final = 5.0
SWEEP_S: Final = 5.0
OUTPUT_MAX: Final = 1 << 16  # characters looked at
_POLL_S: Final = 0.05
_log = logging.getLogger("phalanx.engines.ray")


@dataclass(slots=True)
class RayProcess:
    """One Ray node of ours on this machine.

    Attributes:
        folder: its record and its output.
        carried: where the supervisor that its actor starts keeps its folder.
        command: made anew at each start: an address may have changed.
    """

    name: str
    folder: str
    carried: str
    command: Callable[[], list[str]]
    variables: Mapping[str, str]
    _living: LivingNode | None = None
    _process: subprocess.Popen[bytes] | None = None

    def lives(self) -> bool:
        """Whether it runs, also one that an earlier head started."""
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
        """Start it unless it lives."""
        if self.lives():
            return
        with around("ray.start.directory"):
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
        with around("ray.start.carried"):
            os.makedirs(self.carried, mode=0o700, exist_ok=True)
        key = f"ray-{self.name}-{secrets.token_hex(6)}"
        given = {
            **cleaned(dict(os.environ)), **self.variables, NODE_KEY_VARIABLE: key, FOLDER_VARIABLE: self.carried,
        }  # fmt: skip
        # Its key first, as the local engine does: a head that dies in between must not leave a Ray node that nobody knows.
        nobody = ProcessIdentity(pid=0, started_ticks=0)
        records.write(self.folder, LivingNode(id=NodeId(self.name), node_key=key, identity=nobody, virtual_devices=0))
        with around("ray.start.output"):
            out = open(os.path.join(self.folder, "ray.out"), "wb")  # noqa: SIM115  # closed below
        with out, around("ray.start.process"):
            self._process = subprocess.Popen(
                self.command(), env=given, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                cwd=self.folder,
            )  # fmt: skip
        who = identity(self._process.pid) or ProcessIdentity(pid=self._process.pid, started_ticks=0)
        self._living = LivingNode(id=NodeId(self.name), node_key=key, identity=who, virtual_devices=0)
        records.write(self.folder, self._living)

    def stop(self) -> None:
        """End it and all it started. Harmless twice."""
        if not self.lives() or self._living is None:
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
        """End it at once, without Ray's own leave-taking. Harmless twice."""
        if self.lives() and self._living is not None:
            self._sweep(self._living)

    def said(self, words: str) -> bool:
        """Whether its output holds these words."""
        return words in self._output()

    def last_words(self) -> str:
        """The last line of its output, for a log."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def _output(self) -> str:
        """The end of it; what it says is some kilobytes."""
        try:
            with open(os.path.join(self.folder, "ray.out"), encoding="utf-8", errors="replace") as out:
                return out.read()[-OUTPUT_MAX:]
        except OSError:
            return ""

    def _sweep(self, living: LivingNode) -> None:
        left = sweep_ray(living)
        if left:
            _log.warning("Ray's processes %s of %s survive SIGKILL", left, self.name)
        if self._process is not None:
            self._process.poll()
        self._living = self._process = None
        records.remove(self.folder)


def sweep_ray(living: LivingNode) -> list[int]:
    """Kill what carries this Ray node's marker: Ray's own processes, and not the supervisor that one of them started; what is left.

    That one has a marker of its own. It outlives Ray, since its lease and not Ray decides when its ranks end.
    """
    wanted = living.node_key.encode()

    def marked(table: Mapping[int, ProcessRow]) -> set[int]:
        return {pid for pid in table if environment(pid).get(NODE_KEY_VARIABLE.encode(), b"") == wanted}

    return kill_until_none(marked, SWEEP_S, certain=lambda: False)


def sweep_carried(folder: str) -> None:
    """End the supervisors that Ray's actors left in this folder, and all under them."""
    engine = LocalEngine(home=folder, environment=dict, token_of=lambda _: "", revive_after_s=None)
    engine.adopt(records.known(folder))
    engine.close(keep_nodes=False)
