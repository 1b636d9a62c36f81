"""The controller's working state: all live records, their indexes, and changes that can be undone.

Each step of the controller puts records through one `Change`; the driver commits the records that it lists. If the store refuses them, the
change is undone: nothing is acknowledged that is not durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from phalanx.core.fleet.capacity import fleet_resources
from phalanx.core.fleet.node import NO_FOREIGN_USAGE, Node
from phalanx.core.fleet.node_pool import NodePool, PoolNode
from phalanx.core.ids import Epoch, JobId, NodeId, PoolId, QueueId, ReservationId
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import (
    KIND_OF,
    LICENCES,
    NODE_POOLS,
    NODES,
    POOL_NODES,
    QUEUE_USAGE,
    QUEUES,
    RECORDS,
    Record,
    RecordKind,
)
from phalanx.core.state.relations import JobRelations
from phalanx.core.state.snapshot import EMPTY_USAGE, Snapshot, Usage
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.extras import Licence, seats_of
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, QueueUsage, add_usage
from phalanx.core.work.quotas.quota_tree import QuotaTree
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.states import JobState

K = TypeVar("K")
V = TypeVar("V")
_MISSING: Final[Any] = object()  # no such key: None may be a value


@dataclass(slots=True)
class World:
    """All records that the controller uses. Ended jobs are dropped from it once nothing refers to them; the store has them.

    Records with indexes have a field of their own; all others are in `tables`, by the name of their kind's table.
    """

    version: int = 0
    next_job_seq: int = 1
    next_history_seq: int = 1
    jobs: dict[JobId, Job] = field(default_factory=dict)
    attempts: dict[JobId, Attempt] = field(default_factory=dict)  # the live one of each job
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    queues: dict[QueueId, Queue] = field(default_factory=dict)
    # Without ended ones. Replaced as a whole at each change, so that caches detect a change by identity.
    reservations: Mapping[ReservationId, Reservation] = field(default_factory=dict)
    tables: dict[str, dict[Any, Any]] = field(
        default_factory=lambda: {kind.table: {} for kind in RECORDS if kind.in_world and kind.record not in _INDEXED}
    )
    pending: dict[JobId, Job] = field(default_factory=dict)
    relations: JobRelations = field(default_factory=JobRelations)
    usage: dict[NodeId, Usage] = field(default_factory=dict)
    attempts_by_node: dict[NodeId, dict[JobId, Attempt]] = field(default_factory=dict)
    licence_usage: dict[str, int] = field(default_factory=dict)  # seats held by live attempts; none of 0
    holdings_cache: QuotaTree | None = field(default=None, compare=False, repr=False)  # cache of `holdings`
    # Nodes that are not known yet, in words: "n2 has not registered yet"; empty if all are. Set by the head, never stored.
    awaited_nodes: str = field(default="", compare=False)
    # Changes with queues, reservations, and with what nodes have and whether they accept work: for caches of what could run.
    capacity_version: int = field(default=0, compare=False)

    def table(self, kind: RecordKind[K, V]) -> dict[K, V]:
        """All records of a kind without indexes, by key."""
        return self.tables[kind.table]

    @property
    def queue_usage(self) -> dict[QueueId, QueueUsage]:
        """Usage of each queue by ended attempts."""
        return self.table(QUEUE_USAGE)

    @property
    def node_pools(self) -> dict[PoolId, NodePool]:
        """The node pools."""
        return self.table(NODE_POOLS)

    @property
    def pool_nodes(self) -> dict[NodeId, PoolNode]:
        """The nodes of pools, from their request to their release."""
        return self.table(POOL_NODES)

    @property
    def licences(self) -> dict[str, Licence]:
        """The licences."""
        return self.table(LICENCES)

    def holdings(self) -> QuotaTree:
        """The queue tree with what live attempts hold: updated by changes, rebuilt when queues or capacity change."""
        if self.holdings_cache is None:
            self.holdings_cache = QuotaTree(self.queues.values(), fleet_resources(self.nodes, seats_of(self.licences)))
            for attempt in self.attempts.values():
                job = self.jobs[attempt.job_id]
                if job.queue in self.queues:
                    self.holdings_cache.add_running(
                        self.holdings_cache.job_node(job.queue), job.user, attempt.allocation.resources
                    )
        return self.holdings_cache

    def set_awaited_nodes(self, text: str) -> None:
        """Record which nodes are not known yet."""
        if text != self.awaited_nodes:
            self.awaited_nodes = text
            self.capacity_version += 1

    def snapshot(self, now_s: float) -> Snapshot:
        """Snapshot for the scheduler. Shares the mappings: valid until the next change."""
        return Snapshot(
            version=self.version,
            now_s=now_s,
            nodes=self.nodes,
            usage=self.usage,
            pending=tuple(self.pending.values()),
            queues=self.queues,
            reservations=self.reservations,
            awaited_nodes=self.awaited_nodes,
            node_pools=self.node_pools,
            pool_nodes=self.pool_nodes,
            licences=self.licences,
            licence_usage=self.licence_usage,
        )

    def attempts_on(self, node_id: NodeId) -> list[Attempt]:
        """Live attempts with a grant on the node, in submit order of their jobs."""
        return sorted(
            self.attempts_by_node.get(node_id, {}).values(), key=lambda attempt: self.jobs[attempt.job_id].seq
        )


@dataclass(slots=True)
class WorldChange:
    """All changes of one step, in order. The store checks `epochs` again against its own rows.

    Attributes:
        removed: kinds and keys of removed records. A store applies removals after records.
        archived: ended jobs that leave the store with all their records.
    """

    world: World
    records: list[Record] = field(default_factory=list)
    removed: dict[tuple[RecordKind[Any, Any], Any], None] = field(default_factory=dict)
    history: list[HistoryLine] = field(default_factory=list)
    epochs: dict[JobId, Epoch] = field(default_factory=dict)
    archived: list[JobId] = field(default_factory=list)
    _undo: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)  # table, key, previous value
    _reservations: Mapping[ReservationId, Reservation] | None = None  # before the step
    _job_seqs: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not self.records and not self.history and not self.removed and not self.archived

    def add_history(self, line: HistoryLine) -> None:
        """Add a history line and assign its seq."""
        seq = self.world.next_history_seq
        self.world.next_history_seq = seq + 1
        self.history.append(replace(line, seq=seq))

    def put(self, record: Record) -> None:
        """Add a record, or replace the one with the same id."""
        kind = KIND_OF[type(record)]
        put_indexed = _INDEXED.get(kind.record)
        if put_indexed is not None:
            put_indexed(self, record)
        elif kind.in_world:
            self._set(self.world.tables[kind.table], kind.key_of(record), record)
            self._note_capacity(kind)
        if self.removed:  # removed and put again in one step
            self.removed.pop((kind, kind.key_of(record)), None)
        self.records.append(record)
        self.world.version += 1

    def remove(self, kind: RecordKind[K, V], key: K) -> None:
        """Remove a record of a kind without indexes, if it exists."""
        self._drop(self.world.table(kind), key)
        self._note_capacity(kind)
        self._add_removed(kind, key)

    def _note_capacity(self, kind: RecordKind[Any, Any]) -> None:
        """A record of this kind changes."""
        self.world.capacity_version += kind in _CAPACITY_KINDS
        if kind is LICENCES:
            self.world.holdings_cache = None

    def remove_node(self, node: Node) -> None:
        """Remove a node from the fleet."""
        self.world.holdings_cache = None
        self.world.capacity_version += 1
        self._drop(self.world.nodes, node.id)
        self._drop(self.world.usage, node.id)  # it has no attempt; use by others is no longer known
        self._add_removed(NODES, node.id)

    def remove_queue(self, queue_id: QueueId) -> None:
        """Remove a queue without live jobs, and its usage."""
        self.world.holdings_cache = None
        self.world.capacity_version += 1
        self._drop(self.world.queues, queue_id)
        self._add_removed(QUEUES, queue_id)
        self.remove(QUEUE_USAGE, queue_id)

    def archive_jobs(self, job_ids: Iterable[JobId]) -> None:
        """Remove jobs that the world no longer holds from the store, with all their records."""
        self.archived += job_ids
        self.world.version += 1

    def _add_removed(self, kind: RecordKind[K, V], key: K) -> None:
        self.removed[kind, key] = None
        self.world.version += 1

    def new_job_seq(self) -> int:
        """The next submit number, dense."""
        seq = self.world.next_job_seq
        self.world.next_job_seq = seq + 1
        self._job_seqs += 1
        return seq

    def undo(self) -> None:
        """Restore the world as it was before the step, including its sequence numbers."""
        for table, key, before in reversed(self._undo):
            if before is _MISSING:
                del table[key]
            else:
                table[key] = before
        if self._reservations is not None:
            self.world.reservations = self._reservations
            self._reservations = None
        self.world.holdings_cache = None
        self.world.capacity_version += 1
        self.world.next_history_seq -= len(self.history)
        self.world.next_job_seq -= self._job_seqs
        self.world.version += 1
        self.records.clear()
        self.history.clear()
        self.removed.clear()
        self.epochs.clear()
        self.archived.clear()
        self._undo.clear()
        self._job_seqs = 0

    def _put_job(self, job: Job) -> None:
        world = self.world
        world.relations.update(world.jobs.get(job.id), job, self._enter, self._leave)
        self._set(world.jobs, job.id, job)
        if job.state is JobState.PENDING:
            self._set(world.pending, job.id, job)
        else:
            self._drop(world.pending, job.id)

    def _put_node(self, node: Node) -> None:
        before = self.world.nodes.get(node.id)
        if before is None or len(before.devices) != len(node.devices) or before.host != node.host:
            self.world.holdings_cache = None
        if before is None or _capacity(before) != _capacity(node):
            self.world.capacity_version += 1
        self._count_others(before, node)
        self._set(self.world.nodes, node.id, node)

    def _put_queue(self, queue: Queue) -> None:
        self.world.holdings_cache = None
        self.world.capacity_version += 1
        self._set(self.world.queues, queue.id, queue)

    def _put_attempt(self, attempt: Attempt) -> None:
        world = self.world
        before = world.attempts.get(attempt.job_id)
        held_before = before is not None and before.holds_allocation
        if held_before != attempt.holds_allocation:
            self._count_in_queue(attempt, before)
            self._count_licences(attempt)
        elif before is not None and before.allocation != attempt.allocation:  # its devices were given back or regained
            self._count_change(before, attempt)
        if attempt.holds_allocation:
            self._set(world.attempts, attempt.job_id, attempt)
        elif before is not None:
            self._drop(world.attempts, attempt.job_id)
        for grant in attempt.allocation.grants:
            if grant.node_id not in world.attempts_by_node:
                self._set(world.attempts_by_node, grant.node_id, {})
            on_node = world.attempts_by_node[grant.node_id]
            if attempt.holds_allocation:
                self._set(on_node, attempt.job_id, attempt)
            else:
                self._drop(on_node, attempt.job_id)
            old = None if before is None or not held_before else before.allocation.grant_on(grant.node_id)
            new = grant if attempt.holds_allocation else None
            if old != new:
                usage = world.usage.get(grant.node_id, EMPTY_USAGE)
                usage = usage if old is None else usage.minus(old)
                usage = usage if new is None else usage.plus(new)
                node = world.nodes.get(grant.node_id)
                if node is not None and node.foreign_usage.devices:
                    # The engine may have assigned our devices to others meanwhile.
                    usage = replace(usage, devices=usage.devices | set(node.foreign_usage.devices))
                self._set(world.usage, grant.node_id, usage)
        self.epochs[attempt.job_id] = attempt.epoch

    def _count_change(self, before: Attempt, attempt: Attempt) -> None:
        """Update what is held in the queue of a live attempt whose allocation changed."""
        world, job = self.world, self.world.jobs[attempt.job_id]
        if world.holdings_cache is not None and job.queue in world.queues:
            number = world.holdings_cache.job_node(job.queue)
            world.holdings_cache.remove_running(number, job.user, before.allocation.resources)
            world.holdings_cache.add_running(number, job.user, attempt.allocation.resources)

    def _count_in_queue(self, attempt: Attempt, before: Attempt | None) -> None:
        """Update what is held in the queue of an attempt that was placed or ended; at its end, record the usage."""
        world, held = self.world, attempt.allocation.resources
        job = world.jobs.get(attempt.job_id)
        if job is None:
            return
        if world.holdings_cache is not None and job.queue in world.queues:
            count = (
                world.holdings_cache.add_running if attempt.holds_allocation else world.holdings_cache.remove_running
            )
            last = attempt if attempt.holds_allocation or before is None else before
            count(world.holdings_cache.job_node(job.queue), job.user, last.allocation.resources)
        if not held:
            return
        if not attempt.holds_allocation and attempt.ended_s is not None:
            for record in add_usage(
                world.queues,
                world.queue_usage,
                job.queue,
                held,
                attempt.placed_s,
                attempt.ended_s,
                attempt.speed,
                attempt.asleep_s,
                job.user,
            ):
                self.put(record)

    def _count_licences(self, attempt: Attempt) -> None:
        """Update the seats in use, for an attempt that was placed or ended."""
        usage = self.world.licence_usage
        for name, seats in attempt.allocation.licences:
            used = usage.get(name, 0) + (seats if attempt.holds_allocation else -seats)
            if used:
                self._set(usage, name, used)
            else:
                self._drop(usage, name)

    def _count_others(self, before: Node | None, node: Node) -> None:
        """Count resources that are held outside Phalanx as used, in addition to those of our attempts."""
        old = NO_FOREIGN_USAGE if before is None else before.foreign_usage
        new = node.foreign_usage
        if new == old:
            return
        world, held = self.world, self.world.usage.get(node.id, EMPTY_USAGE)
        ours = {
            i
            for attempt in world.attempts_by_node.get(node.id, {}).values()
            for g in attempt.allocation.grants
            if g.node_id == node.id
            for i in g.devices
        }
        usage = replace(
            held,
            devices=frozenset(ours | set(new.devices)),
            host=held.host - old.host + new.host,
        )
        self._set(world.usage, node.id, usage)

    def _put_reservation(self, reservation: Reservation) -> None:
        self.world.capacity_version += 1
        before = self.world.reservations
        others = {name: one for name, one in before.items() if name != reservation.id}
        self.world.reservations = others if reservation.ended else {**others, reservation.id: reservation}
        if self._reservations is None:
            self._reservations = before

    def _enter(self, table: dict[K, dict[JobId, None]], key: K, job_id: JobId) -> None:
        if key not in table:
            self._set(table, key, {})
        self._set(table[key], job_id, None)

    def _leave(self, table: dict[K, dict[JobId, None]], key: K, job_id: JobId) -> None:
        self._drop(table[key], job_id)
        if not table[key]:
            self._drop(table, key)

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        self._undo.append((table, key, table.get(key, _MISSING)))
        table[key] = value

    def _drop(self, table: dict[K, V], key: K) -> None:
        before = table.pop(key, _MISSING)
        if before is not _MISSING:
            self._undo.append((table, key, before))


def _capacity(node: Node) -> tuple[object, ...]:
    """The fields of a node that decide what it could run, and from when on."""
    return node.devices, node.host, node.labels, node.state, node.cordon, node.changed_s


_CAPACITY_KINDS: Final = frozenset({NODE_POOLS, POOL_NODES, LICENCES})  # decide what could run, and have no index
# Kinds whose changes also update indexes of the world, and what puts one.
_INDEXED: Final[Mapping[type, Callable[[WorldChange, Any], None]]] = {
    Job: WorldChange._put_job,  # noqa: SLF001  # a table of this module
    Attempt: WorldChange._put_attempt,  # noqa: SLF001
    Node: WorldChange._put_node,  # noqa: SLF001
    Queue: WorldChange._put_queue,  # noqa: SLF001
    Reservation: WorldChange._put_reservation,  # noqa: SLF001
}
