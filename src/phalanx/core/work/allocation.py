"""Granted resources: tasks on devices of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGrant:
    """One node's part of a gang.

    Attributes:
        node_rank: this node's number in the job, from 0.
        devices: indices on the node, ascending; empty for CPU-only work.
        tasks: processes started here: ranks `first_rank .. first_rank + tasks - 1`.
    """

    node_id: NodeId
    node_rank: int
    devices: tuple[int, ...]
    cpus: int
    memory_bytes: int
    tasks: int
    first_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """All grants of one attempt, by node rank. Granted and released as a whole."""

    grants: tuple[NodeGrant, ...]

    @property
    def gpus(self) -> int:
        """Devices held, over all nodes."""
        return sum(len(grant.devices) for grant in self.grants)

    @property
    def world_size(self) -> int:
        """Tasks over all nodes."""
        return sum(grant.tasks for grant in self.grants)

    def grant_on(self, node_id: NodeId) -> NodeGrant | None:
        """The grant on one node, or None."""
        return next((grant for grant in self.grants if grant.node_id == node_id), None)
