"""MPI worlds of steps whose tasks are started without mpirun: the servers of one node, and the exchange between nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, Final

from phalanx.node.mpi.pmi_server import PmiServer
from phalanx.node.mpi.program_server import PMI
from phalanx.node.mpi.world import MpiWorld

_START_S: Final = 30.0
_SERVER: Final = (sys.executable, "-I", "-m", "phalanx.node.mpi.pmix_main")
Send = Callable[[dict[str, Any]], None]


class WorldFailed(Exception):
    """The server of a world cannot run here."""


class StepWorlds:
    """The MPI worlds of the steps on this node.

    Args:
        send: receives {"step", "fence", "node", "nodes", "data"} and {"step", "abort", "why"}.
        folder: for files of the servers, removed with the job.
    """

    def __init__(self, send: Send, folder: str) -> None:
        self._send, self._folder = send, folder
        self._lock = threading.Lock()
        self._worlds: dict[int, _StepWorld] = {}

    def connect(
        self, step: int, order: Mapping[str, Any], rank: int, env: Mapping[str, str]
    ) -> tuple[dict[str, str], list[socket.socket]]:
        """Return a rank's variables, and the sockets that its process inherits; the first rank of a step starts the servers.

        Raises:
            WorldFailed: a server cannot run here.
        """
        with self._lock:
            world = self._worlds.get(step)
            if world is None:
                folder = os.path.join(self._folder, f"mpi-{step}")
                os.makedirs(folder, mode=0o700, exist_ok=True)
                world = self._worlds[step] = _StepWorld(step, order, rank, folder, env, self._send)
        return world.connect(rank)

    def ended(self, step: int, task: int, code: int) -> None:
        """Note the end of a task. A rank that fails before its MPI_Finalize ends the step: the others would wait for it."""
        world = self._worlds.get(step)
        if world is not None and world.ended(task, code):
            with self._lock:
                self._worlds.pop(step, None)
            world.close()

    def exchanged(self, message: Mapping[str, Any]) -> None:
        """Pass on what another node, or this one, gave to a fence."""
        if (world := self._worlds.get(message["step"])) is not None:
            world.exchanged(message)


class _StepWorld:
    """The servers of one step on this node."""

    def __init__(
        self, step: int, order: Mapping[str, Any], first: int, folder: str, env: Mapping[str, str], send: Send
    ) -> None:
        self._step, self._send = step, send
        self._nodes = list(order["nodes"])
        self._world = MpiWorld(
            name=order["name"],
            namespace=order["namespace"],
            hosts=tuple(order["hosts"]),
            ranks=tuple(tuple(ranks) for ranks in order["ranks"]),
            place=next(place for place, ranks in enumerate(order["ranks"]) if first in ranks),
            uid=os.getuid(),
            gid=os.getgid(),
        )
        self._inside: set[int] = set()
        self._left = set(self._world.local)
        self._parts: dict[str, list[Any]] = {}
        self._server: PmiServer | _PmixProcess
        if order["server"] == PMI:
            self._server = PmiServer(self._world, self._from_server)
        else:
            self._server = _PmixProcess(self._world, folder, env, self._from_server)

    def connect(self, rank: int) -> tuple[dict[str, str], list[socket.socket]]:
        """Return variables and sockets of a rank."""
        return self._server.connect(rank)

    def ended(self, rank: int, code: int) -> bool:
        """Note the end of a rank; return whether it was the last one here."""
        if code and rank in self._inside:
            self._send(
                {"step": self._step, "abort": code, "why": f"rank {rank} of an MPI world ended before MPI_Finalize"}
            )
        self._left.discard(rank)
        return not self._left

    def exchanged(self, message: Mapping[str, Any]) -> None:
        """Add a part of a fence, and end it with the last."""
        fence = str(message["exchanged"])
        parts = self._parts.setdefault(fence, [])
        parts.append(message["part"])
        if len(parts) == message["of"]:
            del self._parts[fence]
            self._server.exchanged(fence, parts)

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def _from_server(self, message: dict[str, Any]) -> None:
        if "initialized" in message:
            self._inside.add(message["initialized"])
        elif "finalized" in message:
            self._inside.discard(message["finalized"])
        elif "fence" in message:
            nodes = [self._nodes[place] for place in message.pop("places")]
            self._send({**message, "step": self._step, "node": self._nodes[self._world.place], "nodes": nodes})
        else:
            self._send({"why": "", **message, "step": self._step})


class _PmixProcess:
    """The process with the PMIx server of a step (`pmix_main`)."""

    def __init__(self, world: MpiWorld, folder: str, env: Mapping[str, str], send: Send) -> None:
        paths = {name: env[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in env}
        self._process = subprocess.Popen(
            _SERVER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **paths},
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._lock = threading.Lock()
        self._write({"world": world.to_json(), "folder": folder, "libraries": _libraries(env)})
        guard = threading.Timer(_START_S, self._process.kill)
        guard.start()
        first = self._process.stdout.readline()
        guard.cancel()
        said: dict[str, Any] = json.loads(first) if first else {"failed": "its server did not start"}
        if "failed" in said:
            self.close()
            raise WorldFailed(f"PMIx: {said['failed']}; install Open MPI's libpmix, or start the program by mpirun")
        self._variables: dict[str, dict[str, str]] = said["variables"]
        threading.Thread(target=self._read, args=(self._process.stdout, send), name="pmix", daemon=True).start()

    def connect(self, rank: int) -> tuple[dict[str, str], list[socket.socket]]:
        """Return the variables of a rank, which finds the server by them."""
        return self._variables[str(rank)], []

    def exchanged(self, fence: str, parts: list[str]) -> None:
        """End a fence."""
        self._write({"fence": fence, "parts": parts})

    def close(self) -> None:
        """End it: its input ends."""
        with contextlib.suppress(OSError):
            self._input.close()
        self._process.wait()

    def _write(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    @staticmethod
    def _read(output: IO[bytes], send: Send) -> None:
        for line in output:
            send(json.loads(line))


def _libraries(env: Mapping[str, str]) -> list[str]:
    """Return where libpmix may be: where the linker finds it, and beside the mpirun in PATH."""
    found = ["libpmix.so.2"]
    launcher = shutil.which("mpirun", path=env.get("PATH"))
    if launcher is not None:
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(launcher)))
        places = (os.path.join(prefix, part, "libpmix.so.2") for part in ("lib", "lib64", "lib/openmpi", "lib/pmix"))
        found += [path for path in places if os.path.exists(path)]
    return found


class FenceCollector:
    """Collects, on the first node of the job, what the nodes of a world give to each fence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, str], dict[int, Any]] = {}
        self._closed: set[int] = set()

    def add(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add one node's part; once it is the last, return the messages for each of the fence's nodes, one for each part: messages are bounded."""
        key = message["step"], message["fence"]
        with self._lock:
            parts = self._parts.setdefault(key, {})
            parts[message["node"]] = message["data"]
            if set(parts) != set(message["nodes"]):
                return []
            del self._parts[key]
        step, fence = key
        return [{"step": step, "exchanged": fence, "part": part, "of": len(parts)} for _, part in sorted(parts.items())]

    def close(self, step: int) -> None:
        """Drop the fences of a step that is ended."""
        with self._lock:
            self._closed.add(step)
            for key in [key for key in self._parts if key[0] == step]:
                del self._parts[key]

    def is_closed(self, step: int) -> bool:
        """Return whether a step was ended before its end."""
        return step in self._closed
