"""The state that a plan is made from: nodes, their usage, and pending jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, QueueUsage
from phalanx.core.work.reservation import Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that live allocations hold on one node. Jobs without GPUs hold only CPUs and memory."""

    devices: frozenset[int] = frozenset()
    cpus: int = 0
    memory_bytes: int = 0


EMPTY_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version of the state. Its mappings do not change while a plan is made.

    Attributes:
        pending: pending jobs, in any order; the scheduler sorts them.
        jobs: pending and running jobs; if empty, only `pending` exist.
        attempts: the live attempt of each running job.
        queue_usage: usage of the queues so far.
    """

    version: int
    now_s: float
    nodes: Mapping[NodeId, Node]
    usage: Mapping[NodeId, Usage] = field(default_factory=dict)
    pending: tuple[Job, ...] = ()
    queues: Mapping[QueueId, Queue] = field(default_factory=dict)
    reservations: Mapping[ReservationId, Reservation] = field(default_factory=dict)
    attempts: Mapping[JobId, Attempt] = field(default_factory=dict)
    jobs: Mapping[JobId, Job] = field(default_factory=dict)
    queue_usage: Mapping[QueueId, QueueUsage] = field(default_factory=dict)

    def usage_of(self, node_id: NodeId) -> Usage:
        """Usage of a node; empty without allocations."""
        return self.usage.get(node_id, EMPTY_USAGE)
