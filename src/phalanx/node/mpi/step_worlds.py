"""MPI worlds of steps whose tasks are started without mpirun: the servers of one node, and the exchange between nodes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.node.mpi.pmi_server import PMI_FENCE, PMI_VARIABLES, PmiServer
from phalanx.node.mpi.pmix_process import PMIX_VARIABLES, PmixProcess
from phalanx.node.mpi.world import MpiWorld

WORLD_VARIABLES: Final = frozenset({*PMI_VARIABLES, *PMIX_VARIABLES})
"""What a task of another step must not take for its own."""
Send = Callable[[dict[str, Any]], None]


class StepWorlds:
    """The MPI worlds of the steps on this node.

    Args:
        send: receives {"step", "fence", "node", "nodes", "data"}, {"step", "abort", "why"}, {"step", "initialized": the first rank here} and
            {"step", "absent": a rank that ended without MPI_Init}.
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
            OSError: no port or folder can be had.
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
    """The servers of one step on this node: of PMI-1 and of PMIx, since only a rank knows which of them it will ask.

    Both cost a port until then. Reading it from the program failed for programs behind something else: each task was a world of size 1, with exit
    code 0.
    """

    def __init__(
        self, step: int, order: Mapping[str, Any], first: int, folder: str, env: Mapping[str, str], send: Send
    ) -> None:
        self._step, self._send = step, send
        self._inherited = bool(order["inherited"])
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
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self._came: set[int] = set()
        self._left = set(self._world.local)
        self._parts: dict[str, list[Any]] = {}
        self._pmi = PmiServer(self._world, self._from_server)
        self._pmix = PmixProcess(self._world, folder, env, self._from_server)

    def connect(self, rank: int) -> tuple[dict[str, str], list[socket.socket]]:
        """Return variables and sockets of a rank."""
        variables, sockets = self._pmi.connect(rank) if self._inherited else (self._pmi.variables(rank), [])
        return variables | self._pmix.variables(rank), sockets

    def ended(self, rank: int, code: int) -> bool:
        """Note the end of a rank; return whether it was the last one here."""
        if code and rank in self._inside:
            self._send(
                {"step": self._step, "abort": code, "why": f"rank {rank} of an MPI world ended before MPI_Finalize"}
            )
        elif rank not in self._came and self._world.size > 1:
            self._send({"step": self._step, "absent": rank})
        self._left.discard(rank)
        return not self._left

    def exchanged(self, message: Mapping[str, Any]) -> None:
        """Add a part of a fence, and end it with the last."""
        fence = str(message["exchanged"])
        parts = self._parts.setdefault(fence, [])
        parts.append(message["part"])
        if len(parts) == message["of"]:
            del self._parts[fence]
            (self._pmi if fence == PMI_FENCE else self._pmix).exchanged(fence, parts)

    def close(self) -> None:
        """End the servers."""
        self._pmi.close()
        self._pmix.close()

    def _from_server(self, message: dict[str, Any]) -> None:
        if "initialized" in message:
            rank = message["initialized"]
            with self._lock:
                first = not self._came
                self._came.add(rank)
                self._inside.add(rank)
            if first:
                self._send({"step": self._step, "initialized": rank})
        elif "finalized" in message:
            self._inside.discard(message["finalized"])
        elif "fence" in message:
            nodes = [self._nodes[place] for place in message.pop("places")]
            self._send({**message, "step": self._step, "node": self._nodes[self._world.place], "nodes": nodes})
        else:
            self._send({"why": "", **message, "step": self._step})


class FenceCollector:
    """Collects, on the first node of the job, what the nodes of a world give to each fence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, str], dict[int, Any]] = {}
        self._closed: set[int] = set()
        self._begun: set[int] = set()
        self._absent: dict[int, int] = {}

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

    def absent(self, message: Mapping[str, Any]) -> int | None:
        """Note that ranks of a step are in MPI_Init, or that one ended without it. Return this one if others wait for it."""
        step = message["step"]
        with self._lock:
            if "absent" in message:
                self._absent[step] = message["absent"]
            else:
                self._begun.add(step)
            return self._absent.get(step) if step in self._begun else None

    def close(self, step: int) -> bool:
        """Drop the fences of a step that is ended before its end. Return whether it was not yet."""
        with self._lock:
            if step in self._closed:
                return False
            self._closed.add(step)
            for key in [key for key in self._parts if key[0] == step]:
                del self._parts[key]
            return True
