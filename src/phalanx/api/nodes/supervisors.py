"""The supervisors that registered with this process of the head, their acknowledged events, and the jobs that they may report on."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.leases import UnknownSupervisor
from phalanx.core.errors import NotPermitted
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.work.allocation import NodeGrant
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.seats import parse_seat
from phalanx.ports.store import Store

CACHED_GRANTS_MAX: Final = 50_000  # cached, about 1 KB each; older ones are read from the store again


@dataclass(slots=True)
class RegisteredSupervisor:
    """One supervisor. `acked`: its events up to this seq are durable, or were refused. The locks preserve the order of its requests."""

    supervisor_id: SupervisorId
    acked: int = 0
    events: asyncio.Lock = field(default_factory=asyncio.Lock)
    streams: asyncio.Lock = field(default_factory=asyncio.Lock)


class SupervisorRegistry:
    """All supervisors that registered with this process of the head. Use it on the event loop only.

    `committed` returns an attempt that was placed lately, as it is stored; None: the store must be asked.
    """

    def __init__(
        self, store: Store, committed: Callable[[JobId, Epoch], Attempt | None] = lambda _job_id, _epoch: None
    ) -> None:
        self._store, self._committed = store, committed
        self._registered: dict[NodeId, RegisteredSupervisor] = {}
        self._grants: OrderedDict[tuple[JobId, Epoch], dict[NodeId, tuple[NodeGrant, str]]] = OrderedDict()
        self._grant_count = 0  # a gang has one per node

    def register(self, node_id: NodeId, supervisor_id: SupervisorId) -> None:
        """Register a supervisor; events that it sent before under the same id stay acknowledged."""
        known = self._registered.get(node_id)
        if known is None or known.supervisor_id != supervisor_id:
            self._registered[node_id] = RegisteredSupervisor(supervisor_id=supervisor_id)

    def require(self, node_id: NodeId, supervisor_id: SupervisorId | None = None) -> RegisteredSupervisor:
        """Return the node's supervisor.

        Raises:
            UnknownSupervisor: no supervisor has registered with this process of the head, or another one has.
        """
        known = self._registered.get(node_id)
        if known is None or supervisor_id not in (None, known.supervisor_id):
            raise UnknownSupervisor(
                f"node {node_id}: supervisor {supervisor_id or ''} is not registered",
                hint="register with a hello first",
            )
        return known

    def is_registered(self, node_id: NodeId, supervisor_id: SupervisorId) -> bool:
        """Whether this supervisor is the registered one of its node."""
        known = self._registered.get(node_id)
        return known is not None and known.supervisor_id == supervisor_id

    def remove(self, node_id: NodeId) -> None:
        """Remove the supervisor of a node that left the fleet."""
        self._registered.pop(node_id, None)

    def require_grant(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> tuple[NodeGrant, str]:
        """Return the node's part of an attempt, and the attempt's folder.

        Raises:
            NotPermitted: it has none, so it may not report on this job and epoch.
        """
        grant = self._grants.get((job_id, epoch), {}).get(node_id) or self._look_up(job_id, epoch).get(node_id)
        if grant is None:
            raise NotPermitted(f"node {node_id} runs no part of job {job_id} epoch {epoch}")
        return grant

    def _look_up(self, job_id: JobId, epoch: Epoch) -> dict[NodeId, tuple[NodeGrant, str]]:
        committed = self._committed(job_id, epoch)
        for attempt in self._store.attempts(job_id) if committed is None else (committed,):
            if attempt.epoch == epoch:
                grants = {grant.node_id: (grant, attempt.folder) for grant in attempt.allocation.grants}
                self._cache((job_id, epoch), grants)
                return grants
        return {}

    def _cache(self, attempt: tuple[JobId, Epoch], grants: dict[NodeId, tuple[NodeGrant, str]]) -> None:
        self._grant_count += len(grants) - len(self._grants.pop(attempt, {}))
        self._grants[attempt] = grants
        while self._grant_count > CACHED_GRANTS_MAX and len(self._grants) > 1:
            self._grant_count -= len(self._grants.popitem(last=False)[1])


def require_own_seat(name: NodeId, job_id: JobId, epoch: Epoch) -> None:
    """Check that a supervisor that runs for one attempt reports on that attempt.

    Raises:
        NotPermitted: it runs for another attempt.
    """
    seat = parse_seat(name)
    if seat is not None and (seat.job_id, seat.epoch) != (job_id, epoch):
        raise NotPermitted(
            f"supervisor {name} was started for another attempt and may not act for epoch {epoch} of job {job_id}"
        )
