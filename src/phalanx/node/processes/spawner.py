"""The supervisor's end of a spawner process: start it, request keepers, end it. `processes` holds one, and each zygote is one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from phalanx.node.processes.file_limits import rank_file_limits
from phalanx.node.processes.proctable import identity
from phalanx.node.processes.sweeps import NODE_KEY_VARIABLE, SPAWNER_VARIABLE, Table

SPAWNER_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawner_main.py")
PACKET_BYTES_MAX: Final = 65536  # as in keeper.py: a longer request travels in a memory file
ANSWER_LIMIT_S: Final = 15.0  # longer than keeper.START_LIMIT_S, so that its answer comes first


class SpawnerLost(Exception):
    """A spawner or keeper is dead or does not answer. The requested process was not started; another spawner may start it."""


def send_request(channel: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send a request and copies of the descriptors to a spawner or keeper.

    Raises:
        OSError: the peer is gone.
    """
    text = json.dumps(request).encode()
    if len(text) < PACKET_BYTES_MAX:
        socket.send_fds(channel, [b"J" + text], descriptors)
        return
    memory = os.memfd_create("phalanx-request", os.MFD_CLOEXEC)
    with open(memory, "wb") as file:
        file.write(text)
        file.flush()
        socket.send_fds(channel, [b"M"], [memory, *descriptors])


class Spawner:
    """A spawner process. Calls may come from any thread."""

    def __init__(self, command: Sequence[str], *, node_key: str, env: Mapping[str, str], cwd: str = "/") -> None:
        """Start it; `command` gets the descriptor number of its socket as an additional argument.

        Raises:
            OSError: the program could not be started.
        """
        self._lock = threading.Lock()
        self._keepers: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # output of imports goes to the supervisor's log
                env={**env, NODE_KEY_VARIABLE: node_key, SPAWNER_VARIABLE: "1"},
                cwd=cwd,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        with contextlib.suppress(OSError):  # dead already; the first request reports it
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, rank_file_limits())  # before the first rank

    @classmethod
    def start_cold(cls, node_key: str) -> Spawner:
        """Start the spawner of cold ranks, under this process's own interpreter (20 ms: no site, no environment)."""
        env = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        spawner = cls([sys.executable, "-S", "-E", SPAWNER_PROGRAM], node_key=node_key, env=env)
        if spawner.receive(ANSWER_LIMIT_S) is None:
            spawner.close()
            raise SpawnerLost(f"node {node_key}: the spawner did not start; see the supervisor's log")
        return spawner

    @property
    def pid(self) -> int:
        """Its pid."""
        return self._process.pid

    def alive(self) -> bool:
        """True while it runs."""
        return self._process.poll() is None

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next message; None if it is gone, or on timeout."""
        with self._lock:
            return self._receive(timeout_s)

    def fork_keeper(self, confinement: Mapping[str, Any]) -> tuple[socket.socket, int]:
        """Fork a new keeper: returns its socket and pid. `confinement`: see keeper.py.

        Raises:
            SpawnerLost: the spawner is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock:
                self._control.settimeout(ANSWER_LIMIT_S)
                send_request(self._control, {"op": "keeper", "confinement": confinement}, [theirs.fileno()])
                answer = self._receive(ANSWER_LIMIT_S)
            if answer is None:
                raise SpawnerLost(f"spawner {self.pid} did not answer")
        except (OSError, SpawnerLost) as error:
            ours.close()
            raise SpawnerLost(f"spawner {self.pid} is gone: {error}") from error
        finally:
            theirs.close()
        pid: int = answer["pid"]
        self._keepers = {known for known in self._keepers if identity(known) is not None} | {pid}
        return ours, pid

    def orphans(self, table: Table) -> set[int]:
        """The processes that the kernel reparented to it because their keeper died."""
        return {row.pid for row in table.values() if row.parent == self.pid and row.pid not in self._keepers}

    def disconnect(self) -> None:
        """Make it end once its keepers have, without waiting; it forks no more keepers."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # also wakes a thread that waits for a message
        self._control.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Make it end once its keepers have; kill it on timeout."""
        self.disconnect()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            self._control.settimeout(timeout_s)
            packet = self._control.recv(PACKET_BYTES_MAX)
        except OSError:
            return None
        if not packet:
            return None
        message: dict[str, Any] = json.loads(packet)
        return message
