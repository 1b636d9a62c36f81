"""Seats: a seat is one node's part of an attempt whose engine starts a supervisor for each attempt. Its name addresses that supervisor's
lease, mailbox and token.

A supervisor of a whole node uses the node's name. Callers get either name from `supervisor_of`, and need not know which kind it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId

_NAME: Final = re.compile(r"([^@]+)@([0-9]{1,18}(?:_[0-9]{1,9})?)\.([0-9]{1,18})")  # no host name contains an @


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A node's part of one attempt."""

    node_id: NodeId
    job_id: JobId
    epoch: Epoch

    @property
    def name(self) -> NodeId:
        """`gpu7@17.2`, used where a node's name would address the node's own supervisor."""
        return NodeId(f"{self.node_id}@{self.job_id}.{self.epoch}")


def parse_seat(name: str) -> Seat | None:
    """The seat of that name; None if it is a node's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Seat(node_id=NodeId(match[1]), job_id=JobId(match[2]), epoch=Epoch(int(match[3])))


def node_of_supervisor(name: NodeId) -> NodeId:
    """The node of a supervisor by its name."""
    seat = parse_seat(name)
    return name if seat is None else seat.node_id


def supervisor_name_of(nodes: Mapping[NodeId, Node], node_id: NodeId, job_id: JobId, epoch: Epoch) -> NodeId:
    """The name of the supervisor that runs this node's part of an attempt."""
    node = nodes.get(node_id)
    if node is None or not node.per_attempt:
        return node_id
    return Seat(node_id=node_id, job_id=job_id, epoch=epoch).name
