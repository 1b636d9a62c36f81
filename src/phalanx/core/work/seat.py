"""Where a supervisor sits that an engine brought for one attempt: one node's part of it. Its lease, its mailbox and its token go by that name.

A supervisor of a node goes by the node's name; so whoever addresses one asks `supervisor_of`, and need not know which kind it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId

_NAME: Final = re.compile(r"([^@]+)@([0-9]{1,18}(?:_[0-9]{1,9})?)\.([0-9]{1,18})")  # no host name holds an @


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A node's part of one attempt."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch

    @property
    def name(self) -> NodeId:
        """`gpu7@17.2`; where a node's name would stand for its own supervisor."""
        return NodeId(f"{self.node_id}@{self.job_id}.{self.epoch}")


def read_seat(name: str) -> Seat | None:
    """The seat of that name; None for a node's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Seat(node_id=NodeId(match[1]), job_id=JobId(match[2]), epoch=Epoch(int(match[3])))


def node_of_supervisor(name: NodeId) -> NodeId:
    """The node that a supervisor of this name is on."""
    seat = read_seat(name)
    return name if seat is None else seat.node_id


def supervisor_of(nodes: Mapping[NodeId, Node], node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
    """The name of the supervisor that carries this node's part of an attempt."""
    node = nodes.get(node_id)
    if node is None or not node.per_attempt:
        return node_id
    return Seat(node_id=node_id, job_id=job_id, epoch=epoch).name
