"""The state of a cluster against which requests are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from phalanx.core.fleet.node import Node
from phalanx.core.fleet.node_pool import NodePool, PoolNode
from phalanx.core.ids import NodeId, PoolId, QueueId, ReservationId
from phalanx.core.work.extras import Licence
from phalanx.core.work.queue import Queue
from phalanx.core.work.reservation import Reservation


class ClusterLimits(Protocol):
    """The state that requests are judged against: a world, or a snapshot of one."""

    @property
    def nodes(self) -> Mapping[NodeId, Node]: ...  # noqa: D102
    @property
    def queues(self) -> Mapping[QueueId, Queue]: ...  # noqa: D102
    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]: ...  # noqa: D102
    @property
    def awaited_nodes(self) -> str: ...  # noqa: D102
    @property
    def node_pools(self) -> Mapping[PoolId, NodePool]: ...  # noqa: D102
    @property
    def pool_nodes(self) -> Mapping[NodeId, PoolNode]: ...  # noqa: D102
    @property
    def licences(self) -> Mapping[str, Licence]: ...  # noqa: D102
    @property
    def capacity_version(self) -> int | None: ...  # noqa: D102
