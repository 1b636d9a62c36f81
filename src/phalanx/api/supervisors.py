"""Which supervisor speaks for which node in this life of the head, what of it was heard already, and which jobs it may speak of."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from phalanx.controller.leases import SayHello
from phalanx.core.errors import NotPermitted
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId
from phalanx.core.work.allocation import Grant
from phalanx.ports.store import Store

GRANTS_MAX: Final = 50_000  # kept, some 1 KB each; older ones are read from the store again


@dataclass(slots=True)
class Known:
    """One supervisor. `acked`: its events up to this number are durable, or refused for good. The locks keep its own order."""

    supervisor_id: SupervisorId
    acked: int = 0
    events: asyncio.Lock = field(default_factory=asyncio.Lock)
    streams: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisors:
    """All that said hello in this life of the head. Used on the event loop alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[NodeId, Known] = {}
        self._grants: OrderedDict[tuple[JobId, Epoch], dict[NodeId, Grant]] = OrderedDict()
        self._grants_kept = 0  # a gang has one for each of its nodes

    def greet(self, node_id: NodeId, supervisor_id: SupervisorId) -> None:
        """A supervisor said hello; what it sent before under the same name stays heard."""
        known = self._known.get(node_id)
        if known is None or known.supervisor_id != supervisor_id:
            self._known[node_id] = Known(supervisor_id=supervisor_id)

    def speaking(self, node_id: NodeId, supervisor_id: SupervisorId | None = None) -> Known:
        """The node's supervisor.

        Raises:
            SayHello: none said hello in this life of the head, or another one did.
        """
        known = self._known.get(node_id)
        if known is None or supervisor_id not in (None, known.supervisor_id):
            raise SayHello(
                f"node {node_id}: supervisor {supervisor_id or ''} is not known here", hint="say hello first"
            )
        return known

    def forget(self, node_id: NodeId) -> None:
        """The node left the fleet."""
        self._known.pop(node_id, None)

    def grant(self, node_id: NodeId, job_id: JobId, epoch: Epoch) -> Grant:
        """The node's part of an attempt.

        Raises:
            NotPermitted: it has none: it must not speak of this job and epoch.
        """
        grant = self._grants.get((job_id, epoch), {}).get(node_id) or self._look_up(job_id, epoch).get(node_id)
        if grant is None:
            raise NotPermitted(f"node {node_id} carries no part of job {job_id} epoch {epoch}")
        return grant

    def _look_up(self, job_id: JobId, epoch: Epoch) -> dict[NodeId, Grant]:
        for attempt in self._store.attempts(job_id):
            if attempt.epoch == epoch:
                grants = {grant.node_id: grant for grant in attempt.allocation.grants}
                self._keep((job_id, epoch), grants)
                return grants
        return {}

    def _keep(self, attempt: tuple[JobId, Epoch], grants: dict[NodeId, Grant]) -> None:
        self._grants_kept += len(grants) - len(self._grants.pop(attempt, {}))
        self._grants[attempt] = grants
        while self._grants_kept > GRANTS_MAX and len(self._grants) > 1:
            self._grants_kept -= len(self._grants.popitem(last=False)[1])
