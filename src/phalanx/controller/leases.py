"""Leases of supervisors: in memory only; renewed without the store.

The API's thread renews leases and the controller's thread expires them. One guard covers both, so a renewal comes before the expiry or is
refused. The head counts from its answer, plus a margin; the supervisor counts from sending. So the supervisor's lease always ends first.

In a large fleet another process answers renewals (`RenewalDelegate`), each of which needs no decision. What it answered is fetched before a
lease expires, and it answers for no lease that has expired: the fetch that revokes the lease returns the last answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol

from phalanx.core.errors import Conflict
from phalanx.core.ids import Epoch, JobId, NodeId, SupervisorId

# With 4 renewals per lease, a silent node is declared dead within 8 s: half of the 15 s that are promised.
LEASE_DEFAULT_S: Final = 6.0
RENEWALS_PER_LEASE: Final = 4
# Of the whole fleet; above that, the interval grows. A fifth of the head's one thread (docs/scale.md).
RENEWALS_PER_S_MAX: Final = 400.0
# Of those that the other process answers: a third of a core (docs/scale.md).
DELEGATED_PER_S_MAX: Final = 4000.0
UNCLAIMED: Final = SupervisorId("")  # holds a seat's lease until the supervisor that an engine starts registers
# The same after a restart of the head: a supervisor may hold the seat, with any lease that was granted before.
PRESUMED_HOLDER: Final = SupervisorId("?")
MARGIN_S: Final = 1.0  # for network delay and clock drift
LONG_LEASES_GRANTED_WITHIN_S: Final = 10.0  # a stopping head grants long leases for at most this long


class UnknownSupervisor(Conflict):
    """The head does not know this supervisor, or no longer; it must register."""

    code = "say_hello"
    retry_helps = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """The answer to one renewal."""

    lease_s: float
    renew_in_s: float
    superseded: list[tuple[JobId, Epoch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegatedAnswer:
    """The newest renewal of a lease that the delegate answered; times as in `LeaseBook`."""

    node_id: NodeId
    supervisor_id: SupervisorId
    renewed_s: float
    ends_s: float


class DelegateLost(Exception):
    """The delegate is gone: it answers nothing any more, and what it answered since the last fetch is unknown."""


class RenewalDelegate(Protocol):
    """Another process that answers renewals. It acts on calls in their order, and on all earlier ones before it answers a renewal.

    Every method may raise `DelegateLost`.
    """

    def set_terms(self, lease_s: float, renew_in_s: float) -> None:
        """Answer with these from now on."""
        ...

    def answer_for(
        self, connection: int, node_id: NodeId, supervisor_id: SupervisorId, ends_s: float, current: dict[JobId, Epoch]
    ) -> None:
        """Answer renewals of this lease on that connection, while all of their epochs are current."""
        ...

    def set_current(self, node_id: NodeId, job_id: JobId, epoch: Epoch | None) -> None:
        """Set the current epoch of a job on a node; None: no epoch is current."""
        ...

    def fetch(self, revoked: Iterable[NodeId] | None) -> list[DelegatedAnswer]:
        """Return the newest answers since the last fetch, and answer for none of `revoked` any more; None: for no lease."""
        ...


@dataclass(slots=True)
class _Lease:
    supervisor_id: SupervisorId
    ends_s: float
    renewed_s: float
    over: bool = False
    current: dict[JobId, Epoch] = field(default_factory=dict)
    renewed_long: bool = False
    delegated: bool = False
    told_s: float = 0.0  # the ordinary lease when it was last renewed, by which the supervisor paces its renewals
    presumed: int = 0  # value of `_presumed` when `ends_s` was last updated


@dataclass(slots=True)
class LeaseBook:
    """One lease per node. Times are seconds of CLOCK_BOOTTIME, passed in.

    A step must not scan every lease: `_earliest_s` is a lower bound of the first end, and only when it has passed are all leases scanned.
    `presume_live`, which extends all leases, is recorded once and applied to each lease when it is next used.

    A long lease, from a planned stop, protects what runs under it. A node where no attempt is current is lost after an ordinary lease without
    a renewal, so that jobs do not wait for a server that left while the head was down. Its supervisor may believe in the long lease for
    longer, so a registration counts as holding one, `long_until_s` at most, until its first renewal tells.
    """

    lease_s: float = LEASE_DEFAULT_S
    guard: AbstractContextManager[object] = field(default_factory=nullcontext)
    long_until_s: float = 0.0
    delegate: RenewalDelegate | None = None
    _delegated: int = 0
    _delegate_lost: bool = False
    _delegated_terms: tuple[float, float] = (0.0, 0.0)
    _delegated_lease_max_s: float = 0.0
    _leases: dict[NodeId, _Lease] = field(default_factory=dict)
    _long_s: float | None = None
    _long_granted_until_s: float = math.inf
    _earliest_s: float = math.inf
    _over: set[NodeId] = field(default_factory=set)
    _floor_s: float = 0.0
    _presumed: int = 0

    @property
    def terms(self) -> tuple[float, float]:
        """Lease and renewal interval for the fleet's present size, in seconds."""
        return self.terms_for(len(self._leases), self._delegated)

    @property
    def crowded(self) -> bool:
        """Whether the renewals of this fleet are too many for the API's thread alone, so that leases would be longer than they should."""
        return len(self._leases) / RENEWALS_PER_S_MAX > self.lease_s / RENEWALS_PER_LEASE

    def terms_for(self, nodes: int, delegated: int = 0) -> tuple[float, float]:
        """Lease and renewal interval for a fleet of so many nodes, in seconds. `delegated`: those whose renewals another process answers."""
        needed_s = (nodes - delegated) / RENEWALS_PER_S_MAX + delegated / DELEGATED_PER_S_MAX
        interval = max(self.lease_s / RENEWALS_PER_LEASE, needed_s)
        lease = interval * RENEWALS_PER_LEASE
        return (lease if self._long_s is None else max(lease, self._long_s)), interval

    def grant(self, node_id: NodeId, supervisor_id: SupervisorId, now_s: float, *, until_s: float = 0.0) -> None:
        """Begin a lease that ends at `until_s` or later: at registration, and for every node that is up when a head starts.

        A supervisor that registers again keeps a longer lease and its current epochs. So does the first supervisor that registers for a
        seat whose lease SOMEBODY holds.
        """
        with self.guard:
            self._settle_loss(now_s)
            self._end_long(now_s)
            self._recall([node_id])
            self._settle_loss(now_s)
            ends_s = max(now_s + self.terms[0] + MARGIN_S, until_s, self.long_until_s)
            held = self._leases.get(node_id)
            if held is not None and held.supervisor_id in (supervisor_id, PRESUMED_HOLDER) and not held.over:
                held.supervisor_id, held.renewed_s = supervisor_id, now_s
                held.told_s = self.terms[1] * RENEWALS_PER_LEASE
                held.ends_s = max(self._touched(held).ends_s, ends_s)
            else:
                self._leases[node_id] = _Lease(
                    supervisor_id=supervisor_id,
                    ends_s=ends_s,
                    renewed_s=now_s,
                    told_s=self.terms[1] * RENEWALS_PER_LEASE,
                    presumed=self._presumed,
                )
                self._over.discard(node_id)
            self._earliest_s = min(self._earliest_s, self._end_of(self._leases[node_id]))
            self._pass_terms()

    def renew(
        self,
        node_id: NodeId,
        supervisor_id: SupervisorId,
        epochs: list[tuple[JobId, Epoch]],
        now_s: float,
        *,
        held_s: float | None = None,
    ) -> Renewal:
        """Renew a lease; return which of the supervisor's epochs are superseded.

        Args:
            node_id: the node.
            supervisor_id: the supervisor that renews.
            epochs: the attempts it runs, as (job, epoch).
            now_s: when the head answers.
            held_s: remaining time of the lease that the supervisor holds. A long lease (from a planned stop) counts as held until the
                supervisor reports a shorter one, since an answer may be lost. None if the supervisor does not report it: then all that
                was granted counts as held.

        Raises:
            UnknownSupervisor: another supervisor or none holds this node's lease, or it has expired.
        """
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None or lease.over or lease.supervisor_id != supervisor_id:
                raise UnknownSupervisor(
                    f"supervisor {supervisor_id} holds no lease for {node_id}", hint="register again"
                )
            self._end_long(now_s)
            if lease.delegated:
                self._collect([])
            self._settle_loss(now_s)
            lease_s, renew_in_s = self.terms
            lease.renewed_s, lease.told_s = now_s, renew_in_s * RENEWALS_PER_LEASE
            granted_s = self._touched(lease).ends_s - now_s - MARGIN_S
            lease.ends_s = now_s + max(lease_s, granted_s if held_s is None else min(held_s, granted_s)) + MARGIN_S
            self._earliest_s = min(self._earliest_s, self._end_of(lease))  # a long lease may have become shorter
            lease.renewed_long = self._long_s is not None
            superseded = [(job, epoch) for job, epoch in epochs if lease.current.get(job) != epoch]
        return Renewal(lease_s=lease_s, renew_in_s=renew_in_s, superseded=superseded)

    def renewed_recently(self, node_id: NodeId, supervisor_id: SupervisorId, now_s: float) -> bool:
        """Whether this supervisor can still renew, and renewed or was presumed live less than one ordinary lease ago."""
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None or lease.over or lease.supervisor_id != supervisor_id:
                return False
            if lease.delegated and now_s >= self._silent_s(lease):
                self._collect([])
            self._settle_loss(now_s)
            return now_s < self._silent_s(lease)

    def belongs_to_other(self, node_id: NodeId, supervisor_id: SupervisorId) -> bool:
        """Whether another supervisor has registered for this node; its registration may not be answered yet."""
        with self.guard:
            lease = self._leases.get(node_id)
            return lease is not None and lease.supervisor_id not in (supervisor_id, PRESUMED_HOLDER, UNCLAIMED)

    def set_current(self, node_id: NodeId, job_id: JobId, epoch: Epoch | None) -> None:
        """Set the current epoch of a job on a node; None: no epoch is current."""
        with self.guard:
            lease = self._leases.get(node_id)
            if lease is None:
                return
            if epoch is None:
                lease.current.pop(job_id, None)
                self._earliest_s = min(self._earliest_s, self._end_of(lease))
            else:
                lease.current[job_id] = epoch
            if lease.delegated and self.delegate is not None:
                try:
                    self.delegate.set_current(node_id, job_id, epoch)
                except DelegateLost:
                    self._lose_delegate()

    def attach_delegate(self, delegate: RenewalDelegate) -> None:
        """Use a process that has just started, in place of one that ended."""
        with self.guard:
            if self.delegate is not None:
                self._lose_delegate()
            self.delegate, self._delegated_terms = delegate, (0.0, 0.0)

    def delegate_renewals(self, node_id: NodeId, supervisor_id: SupervisorId, connection: int, now_s: float) -> None:
        """Let the delegate answer the renewals of a lease that was just renewed on that connection.

        Not while it is a long one: the head would notice late that its supervisor holds a shorter one since, and is silent.
        """
        with self.guard:
            lease, delegate = self._leases.get(node_id), self.delegate
            if delegate is None or lease is None or lease.over or lease.supervisor_id != supervisor_id:
                return
            self._end_long(now_s)
            ordinary_s = max(self.terms[0], lease.told_s) + MARGIN_S
            if self._long_s is not None or self._touched(lease).ends_s > now_s + ordinary_s:
                return
            self._recall([node_id])
            self._settle_loss(now_s)
            if self.delegate is not delegate:
                return
            lease.delegated = True
            self._delegated += 1
            self._pass_terms()  # first: the lease is answered with them
            if self._delegate_lost:
                return
            try:
                delegate.answer_for(
                    connection, node_id, supervisor_id, self._touched(lease).ends_s, dict(lease.current)
                )
            except DelegateLost:
                self._lose_delegate()

    def expire(self, now_s: float) -> list[NodeId]:
        """Expire leases; return the nodes whose lease has expired, again at each call until `drop`. Their renewals are refused."""
        with self.guard:
            if now_s >= self._earliest_s:
                self._fetch_before_expiry(now_s)
                self._settle_loss(now_s)
                self._earliest_s = math.inf
                for node_id, lease in self._leases.items():
                    if lease.over or self._end_of(lease) <= now_s:
                        lease.over = True
                        self._over.add(node_id)
                    else:
                        self._earliest_s = min(self._earliest_s, self._end_of(lease))
            return sorted(self._over)

    def presume_live(self, now_s: float) -> None:
        """Extend every lease to one full lease from now: the head itself was suspended, so no supervisor could renew."""
        with self.guard:
            self._floor_s = max(self._floor_s, now_s + self.terms[0] + MARGIN_S)
            self._presumed += 1
            self._earliest_s = max(self._earliest_s, self._floor_s)

    def drop(self, node_ids: Iterable[NodeId]) -> None:
        """Remove leases: the loss of these nodes is committed."""
        with self.guard:
            node_ids = list(node_ids)
            self._recall(node_ids)
            for node_id in node_ids:
                self._leases.pop(node_id, None)
                self._over.discard(node_id)

    def next_check_s(self) -> float:
        """When to call `expire` next: at or before the first end; infinite without leases. O(1)."""
        with self.guard:
            return 0.0 if self._over else self._earliest_s

    def grant_long(self, lease_s: float, until_s: float) -> None:
        """Grant `lease_s` at every renewal until `until_s`: the head will stop as planned. If it does not, leases are normal from then on."""
        with self.guard:
            self._recall(None)
            self._long_s, self._long_granted_until_s = lease_s, until_s
            self.long_until_s = max(self.long_until_s, until_s + lease_s + MARGIN_S)

    def all_long(self) -> bool:
        """Whether every supervisor holds a long lease."""
        with self.guard:
            return all(lease.renewed_long or lease.over for lease in self._leases.values())

    def _fetch_before_expiry(self, now_s: float) -> None:
        """Fetch what the delegate answered for leases that seem to be over, and revoke those that are."""
        for revoke in (False, True):
            over = [one for one, lease in self._leases.items() if lease.delegated and self._end_of(lease) <= now_s]
            if not over:
                return
            if revoke:
                self._recall(over)
            else:
                self._collect([])

    def _recall(self, node_ids: list[NodeId] | None) -> None:
        """Answer the renewals of these leases here again; None: of all."""
        if self._delegated == 0:
            return
        recalled = list(self._leases) if node_ids is None else node_ids
        held = [one for one in recalled if one in self._leases and self._leases[one].delegated]
        if not held:
            return
        self._collect(None if node_ids is None else held)
        if self._delegate_lost:
            return  # they are presumed live first
        for node_id in held:
            if self._leases[node_id].delegated:
                self._leases[node_id].delegated = False
                self._delegated -= 1

    def _lose_delegate(self) -> None:
        """The delegate is gone. Its leases are presumed live as soon as the time is known."""
        self.delegate, self._delegate_lost = None, True

    def _settle_loss(self, now_s: float) -> None:
        """Presume every lease live that a lost delegate answered for: it may have renewed each just before its end."""
        if not self._delegate_lost:
            return
        self._delegate_lost, self._delegated = False, 0
        self._delegated_terms = (0.0, 0.0)
        for lease in self._leases.values():
            if lease.delegated:
                lease.delegated, lease.renewed_s = False, now_s
                lease.ends_s = max(self._touched(lease).ends_s, now_s + self._delegated_lease_max_s + MARGIN_S)

    def _collect(self, revoked: list[NodeId] | None) -> None:
        """Apply what the delegate answered since the last time; `revoked` as in `RenewalDelegate.fetch`."""
        if self.delegate is None:
            return
        try:
            found = self.delegate.fetch(revoked)
        except DelegateLost:
            self._lose_delegate()
            return
        for one in found:
            lease = self._leases.get(one.node_id)
            if lease is not None and lease.supervisor_id == one.supervisor_id and one.renewed_s > lease.renewed_s:
                self._touched(lease)
                lease.told_s = one.ends_s - one.renewed_s - MARGIN_S
                lease.renewed_s, lease.ends_s = one.renewed_s, max(one.ends_s, self._floor_s)
                self._earliest_s = min(self._earliest_s, self._end_of(lease))

    def _pass_terms(self) -> None:
        """Tell the delegate the terms if they changed."""
        if self._delegated == 0 or self.delegate is None or self._delegated_terms == self.terms:
            return
        try:
            self.delegate.set_terms(*self.terms)
        except DelegateLost:
            self._lose_delegate()
            return
        self._delegated_terms = self.terms
        self._delegated_lease_max_s = max(self._delegated_lease_max_s, self.terms[0])

    def _end_of(self, lease: _Lease) -> float:
        """Return when the head may take the node for lost."""
        ends_s = self._touched(lease).ends_s
        if lease.current or lease.supervisor_id in (UNCLAIMED, PRESUMED_HOLDER):
            return ends_s
        return min(ends_s, self._silent_s(lease))

    def _silent_s(self, lease: _Lease) -> float:
        """Return when the supervisor will have renewed nothing for one ordinary lease."""
        ordinary_s = max(self.terms[1] * RENEWALS_PER_LEASE, lease.told_s)
        return max(lease.renewed_s + ordinary_s + MARGIN_S, self._floor_s)

    def _end_long(self, now_s: float) -> None:
        if now_s >= self._long_granted_until_s:
            self._long_s = None

    def _touched(self, lease: _Lease) -> _Lease:
        """Apply the last `presume_live` to the lease and return it."""
        if lease.presumed != self._presumed:
            lease.presumed = self._presumed
            lease.ends_s = max(lease.ends_s, self._floor_s)
        return lease
