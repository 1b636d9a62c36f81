"""The supervisor's end of a spawner process: start it, ask it for keepers, end it. `processes` holds one, each zygote is one."""

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

from phalanx.node.shell.descriptors import of_ranks
from phalanx.node.shell.proctable import identity
from phalanx.node.shell.sweeps import NODE_KEY_VARIABLE, SPAWNER_VARIABLE, Table

SPAWNER_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawner_main.py")
PACKET_BYTES_MAX: Final = 65536  # as in keeper.py: a longer request travels in a memory file
ANSWER_LIMIT_S: Final = 15.0  # longer than keeper.START_LIMIT_S, so that its answer comes first


class SpawnerLost(Exception):
    """A spawner or keeper is dead or does not answer. What it would have started was not started; another one may do it."""


def send_request(channel: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Send a request and copies of the descriptors to a spawner or keeper.

    Raises:
        OSError: the other side is gone.
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
        """Start it; `command` gets the number of its socket's descriptor as one more word.

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
                stdout=2,  # what an import prints belongs into the supervisor's log, never among its words
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
        with contextlib.suppress(OSError):  # dead already, as the first answer will tell
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, of_ranks())  # before it is asked for a rank

    @classmethod
    def cold(cls, node_key: str) -> Spawner:
        """The spawner for ranks that start by exec, under this process's own interpreter (20 ms: no site, no environment)."""
        env = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        spawner = cls([sys.executable, "-S", "-E", SPAWNER_PROGRAM], node_key=node_key, env=env)
        if spawner.hear(ANSWER_LIMIT_S) is None:
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

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Its next message; None when it is gone or none comes in time."""
        with self._lock:
            return self._hear(timeout_s)

    def keeper(self, cgroup: str | None) -> tuple[socket.socket, int]:
        """A new keeper: the socket to it and its pid.

        Raises:
            SpawnerLost: there is no spawner any more.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._lock:
                self._control.settimeout(ANSWER_LIMIT_S)
                send_request(self._control, {"op": "keeper", "cgroup": cgroup}, [theirs.fileno()])
                answer = self._hear(ANSWER_LIMIT_S)
            if answer is None:
                raise SpawnerLost(f"spawner {self.pid} gave no answer")
        except (OSError, SpawnerLost) as error:
            ours.close()
            raise SpawnerLost(f"spawner {self.pid} is gone: {error}") from error
        finally:
            theirs.close()
        pid: int = answer["pid"]
        self._keepers = {known for known in self._keepers if identity(known) is not None} | {pid}
        return ours, pid

    def adopted(self, table: Table) -> set[int]:
        """The processes that the kernel gave to it because their keeper died."""
        return {row.pid for row in table.values() if row.parent == self.pid and row.pid not in self._keepers}

    def hang_up(self) -> None:
        """Tell it to end once its keepers have, and do not wait; from now on it makes no keeper."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # also wakes whoever waits to hear from it
        self._control.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Let it end, as it does once its keepers have; kill it when it does not."""
        self.hang_up()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            self._control.settimeout(timeout_s)
            packet = self._control.recv(PACKET_BYTES_MAX)
        except OSError:
            return None
        if not packet:
            return None
        message: dict[str, Any] = json.loads(packet)
        return message
