"""Leases of supervisors: kept in memory, answered without the store, judged by the controller.

The API's thread renews, the controller's thread lets leases end; both go through one guard, so that a renewal is either before the end
or refused. The head counts from when it answered, plus a margin; the supervisor counts from when it asked: the head is always the later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from phalanx.core.errors import Conflict
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId

LEASE_DEFAULT_S: Final = (
    6.0  # with 4 renewals in it, a silent node is declared dead within 8 s: half of the 15 s promised
)
RENEWALS_PER_LEASE: Final = 4
# Of the whole fleet; past that the interval grows with it. A fifth of the head's one thread (docs/scale.md).
RENEWALS_PER_S_MAX: Final = 400.0
NOBODY: Final = SupervisorId("")  # holds the lease of a seat until the supervisor that an engine brings says hello
# The same after a start of the head: a supervisor may sit there, with whatever lease it was granted.
SOMEBODY: Final = SupervisorId("?")
MARGIN_S: Final = 1.0  # for the answer's way and for clocks that tick apart


class SayHello(Conflict):
    """The head does not know this supervisor (any more); it must present itself."""

    code = "say_hello"
    retry_helps = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The answer to one renewal."""

    lease_s: float
    renew_in_s: float
    superseded: list[tuple[JobId, Epoch]]


@dataclass(slots=True)
class _Lease:
    supervisor_id: SupervisorId
    ends_s: float
    heard_s: float
    over: bool = False
    current: dict[JobId, Epoch] = field(default_factory=dict)
    renewed_long: bool = False
    presumed: int = 0  # how often every lease was presumed live, when its end was last brought up to that


@dataclass(slots=True)
class LeaseBook:
    """One lease per node. Times are seconds of CLOCK_BOOTTIME, passed in.

    A step must not look at every lease: `_earliest_s` is never after the first end, and only once it has passed are all looked at. What
    concerns every lease at once (`presume_live`) is noted once, and each lease brought up to it when it is touched.
    """

    lease_s: float = LEASE_DEFAULT_S
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    _leases: dict[NodeId, _Lease] = field(default_factory=dict)
    _long_s: float | None = None
    _earliest_s: float = math.inf
    _over: set[NodeId] = field(default_factory=set)
    _floor_s: float = 0.0
    _presumed: int = 0

    @property
    def terms(self) -> tuple[float, float]:
        """Lease and renewal interval for the fleet's present size, in seconds."""
        return self.terms_for(len(self._leases))

    def terms_for(self, nodes: int) -> tuple[float, float]:
        """The same for a fleet of so many nodes."""
        interval = max(self.lease_s / RENEWALS_PER_LEASE, nodes / RENEWALS_PER_S_MAX)
        lease = interval * RENEWALS_PER_LEASE
        return (lease if self._long_s is None else max(lease, self._long_s)), interval

    def grant(self, node_id: NodeId, supervisor_id: SupervisorId, now_s: float, *, until_s: float = 0.0) -> None:
        """Begin a lease: at hello, and for every node believed up when a head starts; it ends no sooner than `until_s`.

        A supervisor that says hello again keeps what it holds: a lease longer than today's, and the epochs that count. So does the first
        that comes where SOMEBODY was presumed.
        """
        with self.guard:
            ends_s = max(now_s + self.terms[0] + MARGIN_S, until_s)
            held = self._leases.get(node_id)
            if held is not None and held.supervisor_id in (supervisor_id, SOMEBODY) and not held.over:
                held.supervisor_id, held.heard_s = supervisor_id, now_s
                held.ends_s = max(self._touched(held).ends_s, ends_s)
            else:
                self._leases[node_id] = _Lease(
                    supervisor_id=supervisor_id, ends_s=ends_s, heard_s=now_s, presumed=self._presumed
                )
                self._over.discard(node_id)
                self._earliest_s = min(self._earliest_s, ends_s)

    def renew(
        self,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        epochs: list[tuple[JobId, Epoch]],
        now_s: float,
        *,
        held_s: float | None = None,
    ) -> Renewal:
        """Renew, and name what the supervisor carries that no longer counts.

        Args:
            node_id: whose lease.
            supervisor_id: who asks.
            epochs: what it carries, as (job, epoch).
            now_s: when it is answered.
            held_s: how long the lease that the supervisor holds still lasts. A long one (from a planned stop) is only believed over
                once the supervisor has shown that it took the shorter one: an answer may be lost. None, from one that does not say:
                whatever was granted may still be held.

        Raises:
            SayHello: another supervisor, or none, holds this node's lease, or it is over.
        """
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None or lease.over or lease.supervisor_id != supervisor_id:
                raise SayHello(f"supervisor {supervisor_id} holds no lease for {node_id}", hint="say hello again")
            lease_s, renew_in_s = self.terms
            lease.heard_s = now_s
            granted_s = self._touched(lease).ends_s - now_s - MARGIN_S
            lease.ends_s = now_s + max(lease_s, granted_s if held_s is None else min(held_s, granted_s)) + MARGIN_S
            self._earliest_s = min(self._earliest_s, lease.ends_s)  # a long lease may have been given back
            lease.renewed_long = self._long_s is not None
            superseded = [(job, epoch) for job, epoch in epochs if lease.current.get(job) != epoch]
        return Renewal(lease_s=lease_s, renew_in_s=renew_in_s, superseded=superseded)

    def heard(self, node_id: NodeId, supervisor_id: SupervisorId, now_s: float) -> bool:
        """Whether this supervisor may still renew and was heard, or presumed live, less than an ordinary lease ago: no long one."""
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None or lease.over or lease.supervisor_id != supervisor_id:
                return False
            ordinary_s = self.terms[1] * RENEWALS_PER_LEASE
            return now_s < max(lease.heard_s + ordinary_s + MARGIN_S, self._floor_s)

    def is_anothers(self, node_id: NodeId, supervisor_id: SupervisorId) -> bool:
        """Whether another supervisor's hello was heard for this node, which may not have been answered yet."""
        with self.guard:
            lease = self._leases.get(node_id)
            return lease is not None and lease.supervisor_id not in (supervisor_id, SOMEBODY, NOBODY)

    def set_current(self, node_id: NodeId, job_id: JobId, epoch: Epoch | None) -> None:
        """Say which epoch of a job counts on a node; None: none does."""
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None:
                return
            if epoch is None:
                lease.current.pop(job_id, None)
            else:
                lease.current[job_id] = epoch

    def close_ended(self, now_s: float) -> list[NodeId]:
        """Nodes whose lease is over; from now on their renewals are refused. Named again until `drop` confirms."""
        with self.guard:
            if now_s >= self._earliest_s:
                self._earliest_s = math.inf
                for node_id, lease in self._leases.items():
                    if lease.over or self._touched(lease).ends_s <= now_s:
                        lease.over = True
                        self._over.add(node_id)
                    else:
                        self._earliest_s = min(self._earliest_s, lease.ends_s)
            return sorted(self._over)

    def presume_live(self, now_s: float) -> None:
        """The head itself was away (stopped, suspended): nobody could renew, so every lease lasts one full lease from now."""
        with self.guard:
            self._floor_s = max(self._floor_s, now_s + self.terms[0] + MARGIN_S)
            self._presumed += 1
            self._earliest_s = max(self._earliest_s, self._floor_s)

    def drop(self, node_ids: Iterable[NodeId]) -> None:
        """Forget leases: the loss of these nodes is committed."""
        with self.guard:
            for node_id in node_ids:
                self._leases.pop(node_id, None)
                self._over.discard(node_id)

    def look_again_s(self) -> float:
        """When `close_ended` may have something new to say; never after the first end. Infinite without leases; costs nothing."""
        with self.guard:
            return 0.0 if self._over else self._earliest_s

    def lengthen(self, lease_s: float) -> None:
        """A planned stop: every renewal from now on is granted `lease_s`."""
        with self.guard:
            self._long_s = lease_s

    def all_lengthened(self) -> bool:
        """Whether every supervisor holds a long lease."""
        with self.guard:
            return all(lease.renewed_long or lease.over for lease in self._leases.values())

    def _touched(self, lease: _Lease) -> _Lease:
        """The lease with its end brought up to the last time that all were presumed live."""
        if lease.presumed != self._presumed:
            lease.presumed = self._presumed
            lease.ends_s = max(lease.ends_s, self._floor_s)
        return lease
