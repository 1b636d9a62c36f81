"""Engines start a supervisor on each node and watch it; everything else goes through the supervisors' channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.core.ids import NodeId
from phalanx.core.state.events import Event
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """How engines differ, as values: no code checks an engine's type.

    Attributes:
        picks_devices: Phalanx chooses device indices; otherwise the UUIDs are bound when the member is ready.
        shares_files: nodes share the head's file system.
        revives_nodes: the engine restarts a dead node's supervisor.
        per_attempt: it starts a supervisor for each attempt and node (`follow`), not one for each node (`start`, `stop`).
    """

    picks_devices: bool
    shares_files: bool
    revives_nodes: bool
    per_attempt: bool = False


class Engine(Protocol):
    """Starts and watches supervisors. `observe` and `follow` never block; the others may take as long as a process start."""

    @property
    def name(self) -> str:
        """The engine's name, as in `Node.engine`."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Features of this engine."""
        ...

    def nodes(self) -> list[NodeId]:
        """Nodes on which this engine starts supervisors."""
        ...

    def start(self, node_id: NodeId) -> None:
        """Start a supervisor on the node, unless one runs there."""
        ...

    def stop(self, node_id: NodeId) -> None:
        """End the node's supervisor and everything under it; no process is left when this returns."""
        ...

    def follow(self, job: Job, attempt: Attempt) -> None:
        """Handle an attempt whose newest record became durable. Only called with `per_attempt`.

        The engine starts supervisors on the nodes of a placed attempt and cleans up after an ended one. It ignores attempts on other
        engines' nodes.
        """
        ...

    def observe(self) -> Sequence[Event]:
        """Events since the last call: dead nodes; with `per_attempt` also the inventory and withdrawn attempts."""
        ...
