"""The demo's cluster: a head in a temporary state folder, started as by `phalanx up` and removed completely at the end."""

from __future__ import annotations

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

from phalanx.cli.demo.node_kill import kill_marked, kill_node
from phalanx.client import Client
from phalanx.core.errors import PhalanxError, Unreachable

_UP_S: Final = 30.0  # a head usually starts within 1 s; a loaded machine needs longer
_DOWN_S: Final = 20.0
_SIGNAL_S: Final = 5.0
_POLL_S: Final = 0.05


class DemoCluster:
    """One head and its nodes. Call `stop` after `start`, also after errors.

    Args:
        virtual: NODESxDEVICES, or None for this machine's GPUs.
        revive_s: seconds until a killed node restarts.
    """

    def __init__(self, *, virtual: str | None, revive_s: float) -> None:
        self.home = tempfile.mkdtemp(prefix="phalanx-demo-")
        self._virtual = virtual
        self._revive_s = revive_s
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._marks = {self.home}

    @property
    def client(self) -> Client:
        """The client of the head; available once `open` has returned."""
        assert self._client is not None
        return self._client

    def start(self) -> None:
        """Start the head and wait until it answers.

        Raises:
            Unreachable: the head exited or does not answer; the message contains its last output line.
        """
        words = [sys.executable, "-m", "phalanx.app.head", "--home", self.home, "--port", "0"]
        words += ["--revive", str(self._revive_s)]
        if self._virtual:
            words += ["--virtual", self._virtual]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
        with open(self._output_path, "wb") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**environment, "PHALANX_HOME": self.home},
                cwd=self.home,
            )
        record = self._await(self._read_head_record, _UP_S, "did not write its address")
        with open(os.path.join(self.home, "token"), encoding="utf-8") as file:
            self._client = Client(str(record["url"]), file.read().strip())

    def kill_node(self, node: str) -> int:
        """Kill a node and return the number of killed processes.

        Raises:
            Conflict: the node is not running.
        """
        self._collect_node_keys()
        return kill_node(self.home, node)

    def stop(self) -> None:
        """Cancel jobs, stop head and nodes, kill remaining processes, and remove the folder. Idempotent.

        Raises:
            Conflict: a process cannot be killed.
        """
        self._collect_node_keys()
        process = self._process
        if process is not None:
            self._stop_gracefully(process)
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    self._wait(lambda: process.poll() is not None, _SIGNAL_S)
            self._process = None
        try:
            kill_marked(self._marks)
        finally:
            shutil.rmtree(self.home, ignore_errors=True)

    def _stop_gracefully(self, process: subprocess.Popen[bytes]) -> None:
        """Stop as `phalanx down --cancel-jobs` does; repeat until the head confirms."""

        def stopping() -> bool:
            if process.poll() is not None or self._client is None:
                return True
            return self._client.stop(cancel_jobs=True).stopping

        try:
            if self._client is not None and self._wait(stopping, _DOWN_S):
                self._wait(lambda: process.poll() is not None, _DOWN_S)
        except (PhalanxError, OSError):
            pass  # the head is gone or does not answer: signals follow

    def _read_head_record(self) -> dict[str, object] | None:
        try:
            with open(os.path.join(self.home, "head.json"), encoding="utf-8") as file:
                record: dict[str, object] = json.load(file)
        except (OSError, ValueError):
            return None
        return record if os.path.exists(os.path.join(self.home, "token")) else None

    def _await(self, ask: Callable[[], dict[str, object] | None], limit_s: float, problem: str) -> dict[str, object]:
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            found = ask()
            if found is not None:
                return found
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(_POLL_S)
        with open(self._output_path, encoding="utf-8", errors="replace") as file:
            output = file.read().strip().splitlines()
        raise Unreachable(
            f"the demo's head {problem}: {output[-1] if output else 'it printed nothing'}",
            hint="run phalanx doctor to check this machine",
        )

    def _wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        until_s = time.monotonic() + limit_s
        while not done():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _collect_node_keys(self) -> None:
        """Store the keys of the running nodes: they mark every process of a node, also reparented ones."""
        for path in glob.glob(os.path.join(self.home, "nodes", "*", "engine.json")):
            try:
                with open(path, encoding="utf-8") as file:
                    self._marks.add(str(json.load(file)["node_key"]))
            except (OSError, ValueError, KeyError):
                continue  # the node has exited meanwhile

    @property
    def _output_path(self) -> str:
        return os.path.join(self.home, "head.out")


def gpu_count() -> int:
    """Return the number of devices that NVML finds; 0 without a driver."""
    from phalanx.node.probes.nvml import open_nvml

    probe = open_nvml()
    if probe is None:
        return 0
    try:
        return len(probe.devices())
    finally:
        probe.close()
