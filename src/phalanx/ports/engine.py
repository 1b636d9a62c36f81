"""What runs processes. An engine brings a supervisor to each node and watches that it lives; everything else goes by the supervisors' channel."""

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
    """How engines differ, as values; nobody asks for an engine's type.

    Attributes:
        picks_devices: Phalanx names device indices; elsewhere the UUIDs are bound at ready.
        shares_files: nodes see the head's file system.
        revives_nodes: a dead node's supervisor is brought back by the engine.
        per_attempt: it brings a supervisor for each attempt and node (`follow`), not one for each node (`start`, `stop`).
    """

    picks_devices: bool
    shares_files: bool
    revives_nodes: bool
    per_attempt: bool = False


class Engine(Protocol):
    """Few verbs. `observe` and `follow` never block; the others may take as long as a process start."""

    @property
    def name(self) -> str:
        """The engine's word, as nodes carry it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        ...

    def nodes(self) -> list[NodeId]:
        """Nodes that this engine brings supervisors to."""
        ...

    def start(self, node_id: NodeId) -> None:
        """Bring a supervisor to the node, unless one lives there."""
        ...

    def stop(self, node_id: NodeId) -> None:
        """End the node's supervisor and everything under it; nothing is left when this returns."""
        ...

    def follow(self, job: Job, attempt: Attempt) -> None:
        """An attempt's newest record is durable. Asked only of an engine that works `per_attempt`: it brings supervisors to the nodes of
        one that was placed, and takes away what is left of one that ended. An attempt that is not its own means nothing to it.
        """
        ...

    def observe(self) -> Sequence[Event]:
        """What was seen since the last call: deaths; of an engine that works `per_attempt` also its inventory and what it took back."""
        ...
