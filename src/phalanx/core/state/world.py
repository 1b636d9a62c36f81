"""The controller's working state: all live records, their indexes, and changes that can be undone.

Each step of the controller puts records through one `Change`; the driver commits the records that it lists. If the store refuses them, the
change is undone: nothing is acknowledged that is not durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.node import NO_FOREIGN_USAGE, Node
from phalanx.core.fleet.summary import FleetSummary, node_kind, summary_of
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, ReservationId, TokenId, UserId
from phalanx.core.state.fast_replace import replace
from phalanx.core.state.relations import JobRelations
from phalanx.core.state.snapshot import EMPTY_USAGE, Snapshot, Usage
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.queue import (
    Project,
    Queue,
    QueueUsage,
    add_usage,
)
from phalanx.core.work.quotas import Holdings
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.users import Token, User

K = TypeVar("K")
V = TypeVar("V")
_MISSING: Final[Any] = object()  # no such key: None may be a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A caller's idempotency key, the SHA-256 of its request body, and the job that it created."""

    user: UserId
    key: str
    body_sha256: str
    job_id: JobId
    at_s: float


Record = (
    Job
    | Attempt
    | Node
    | Queue
    | Project
    | User
    | Token
    | Idempotency
    | Reservation
    | QueueUsage
    | FleetDocument
    | FailureRules
)


@dataclass(slots=True)
class World:
    """All records that the controller uses. Ended jobs are dropped from it once nothing refers to them; the store has them."""

    version: int = 0
    next_job_seq: int = 1
    next_story_seq: int = 1
    jobs: dict[JobId, Job] = field(default_factory=dict)
    attempts: dict[JobId, Attempt] = field(default_factory=dict)  # the live one of each job
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    queues: dict[QueueId, Queue] = field(default_factory=dict)
    queue_usage: dict[QueueId, QueueUsage] = field(default_factory=dict)
    queue_gpus: dict[QueueId, int] = field(default_factory=dict)  # held by the queue's own jobs; 0: absent
    projects: dict[ProjectId, Project] = field(default_factory=dict)
    users: dict[UserId, User] = field(default_factory=dict)
    tokens: dict[TokenId, Token] = field(default_factory=dict)
    # Without ended ones. Replaced as a whole at each change, so that caches detect a change by identity.
    reservations: Mapping[ReservationId, Reservation] = field(default_factory=dict)
    idempotency: dict[tuple[UserId, str], Idempotency] = field(default_factory=dict)
    calibrations: dict[str, FleetDocument] = field(default_factory=dict)
    failure_rules: dict[str, FailureRules] = field(default_factory=dict)
    pending: dict[JobId, Job] = field(default_factory=dict)
    relations: JobRelations = field(default_factory=JobRelations)
    usage: dict[NodeId, Usage] = field(default_factory=dict)
    attempts_by_node: dict[NodeId, dict[JobId, Attempt]] = field(default_factory=dict)
    holdings_cache: Holdings | None = field(default=None, compare=False, repr=False)  # cache of `holdings`
    fleet_cache: FleetSummary | None = field(default=None, compare=False, repr=False)  # cache of `fleet`

    def holdings(self) -> Holdings:
        """The queue tree with the GPUs held by live attempts: updated by changes, rebuilt when queues or devices change."""
        if self.holdings_cache is None:
            fleet_gpus = sum(len(node.devices) for node in self.nodes.values())
            self.holdings_cache = Holdings(self.queues.values(), fleet_gpus)
            for attempt in self.attempts.values():
                job = self.jobs[attempt.job_id]
                if job.queue in self.queues:
                    self.holdings_cache.take(self.holdings_cache.number(job.queue), job.user, attempt.allocation.gpus)
        return self.holdings_cache

    def fleet(self) -> FleetSummary:
        """All nodes in any state, counted by kind; cached until a node joins, leaves or changes its devices."""
        if self.fleet_cache is None:
            self.fleet_cache = summary_of(self.nodes.values())
        return self.fleet_cache

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
        )

    def attempts_on(self, node_id: NodeId) -> list[Attempt]:
        """Live attempts with a grant on the node, in submit order of their jobs."""
        return sorted(
            self.attempts_by_node.get(node_id, {}).values(), key=lambda attempt: self.jobs[attempt.job_id].seq
        )


@dataclass(slots=True)
class WorldChange:
    """All changes of one step, in order. The store checks `epochs` again against its own rows."""

    world: World
    records: list[Record] = field(default_factory=list)
    removed_nodes: list[Node] = field(default_factory=list)
    removed_queues: list[QueueId] = field(default_factory=list)
    story: list[StoryLine] = field(default_factory=list)
    epochs: dict[JobId, Epoch] = field(default_factory=dict)
    _undo: list[tuple[dict[Any, Any], Any, Any]] = field(default_factory=list)  # table, key, previous value
    _reservations: Mapping[ReservationId, Reservation] | None = None  # before the step
    _job_seqs: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not self.records and not self.story and not self.removed_nodes and not self.removed_queues

    def add_story(self, line: StoryLine) -> None:
        """Add a story line and assign its seq."""
        seq = self.world.next_story_seq
        self.world.next_story_seq = seq + 1
        self.story.append(replace(line, seq=seq))

    def put(self, record: Record) -> None:
        """Add a record, or replace the one with the same id."""
        world = self.world
        match record:
            case Job():
                world.relations.update(world.jobs.get(record.id), record, self._enter, self._leave)
                self._set(world.jobs, record.id, record)
                self._index_pending(record)
            case Attempt():
                self._put_attempt(record)
            case Node():
                self._invalidate_holdings_unless_equal(world.nodes.get(record.id), record)
                self._invalidate_kinds_unless_equal(world.nodes.get(record.id), record)
                self._count_others(world.nodes.get(record.id), record)
                self._set(world.nodes, record.id, record)
                # A store applies removals last: it must not remove a node that came back within the step.
                self.removed_nodes = [gone for gone in self.removed_nodes if gone.id != record.id]
            case Queue():
                world.holdings_cache = None
                self._set(world.queues, record.id, record)
                # Added again within the step: the store must not remove the queue, only its usage.
                if record.id in self.removed_queues:
                    self.removed_queues.remove(record.id)
                    self.put(QueueUsage(queue=record.id, at_s=0.0))
            case QueueUsage():
                self._set(world.queue_usage, record.queue, record)
            case Project():
                self._set(world.projects, record.id, record)
            case User():
                self._set(world.users, record.id, record)
            case Token():
                self._set(world.tokens, record.id, record)
            case Reservation():
                self._put_reservation(record)
            case FleetDocument():
                self._set(world.calibrations, record.id, record)
            case FailureRules():
                self._set(world.failure_rules, record.id, record)
            case Idempotency():
                self._set(world.idempotency, (record.user, record.key), record)
        self.records.append(record)
        world.version += 1

    def remove_node(self, node: Node) -> None:
        """Remove a node from the fleet."""
        self.world.holdings_cache = None
        self.world.fleet_cache = None
        self._drop(self.world.nodes, node.id)
        self._drop(self.world.usage, node.id)  # it has no attempt; use by others is no longer known
        self.removed_nodes.append(node)
        self.world.version += 1

    def remove_queue(self, queue_id: QueueId) -> None:
        """Remove a queue without live jobs, and its usage."""
        self.world.holdings_cache = None
        self._drop(self.world.queues, queue_id)
        self._drop(self.world.queue_usage, queue_id)
        # A store applies removals last.
        self.records[:] = [one for one in self.records if not (isinstance(one, QueueUsage) and one.queue == queue_id)]
        self.removed_queues.append(queue_id)
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
        self.world.fleet_cache = None
        self.world.next_story_seq -= len(self.story)
        self.world.next_job_seq -= self._job_seqs
        self.world.version += 1
        self.records.clear()
        self.story.clear()
        self.removed_nodes.clear()
        self.removed_queues.clear()
        self.epochs.clear()
        self._undo.clear()
        self._job_seqs = 0

    def _put_attempt(self, attempt: Attempt) -> None:
        world = self.world
        before = world.attempts.get(attempt.job_id)
        held_before = before is not None and before.holds_allocation
        if held_before != attempt.holds_allocation:
            self._count_in_queue(attempt)
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
            if held_before != attempt.holds_allocation:
                held = world.usage.get(grant.node_id, EMPTY_USAGE)
                sign = 1 if attempt.holds_allocation else -1
                devices = (
                    held.devices | set(grant.devices) if attempt.holds_allocation else held.devices - set(grant.devices)
                )
                node = world.nodes.get(grant.node_id)
                if (
                    node is not None and node.foreign_usage.devices
                ):  # the engine may have assigned our devices to others meanwhile
                    devices = devices | set(node.foreign_usage.devices)
                usage = Usage(
                    devices=frozenset(devices),
                    cpus=held.cpus + sign * grant.cpus,
                    memory_bytes=held.memory_bytes + sign * grant.memory_bytes,
                )
                self._set(world.usage, grant.node_id, usage)
        self.epochs[attempt.job_id] = attempt.epoch

    def _count_in_queue(self, attempt: Attempt) -> None:
        """Update the GPUs held in the queue of an attempt that was placed or ended; at its end, record the usage."""
        world, gpus = self.world, attempt.allocation.gpus
        job = world.jobs.get(attempt.job_id)
        if job is None:
            return
        if world.holdings_cache is not None and job.queue in world.queues:
            count = world.holdings_cache.take if attempt.holds_allocation else world.holdings_cache.give
            count(world.holdings_cache.number(job.queue), job.user, gpus)
        if not gpus:
            return
        held = world.queue_gpus.get(job.queue, 0) + (gpus if attempt.holds_allocation else -gpus)
        if held:
            self._set(world.queue_gpus, job.queue, held)
        else:
            self._drop(world.queue_gpus, job.queue)
        if not attempt.holds_allocation and attempt.ended_s is not None:
            for record in add_usage(
                world.queues, world.queue_usage, job.queue, gpus, attempt.placed_s, attempt.ended_s
            ):
                self.put(record)

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
        usage = Usage(
            devices=frozenset(ours | set(new.devices)),
            cpus=held.cpus - old.cpus + new.cpus,
            memory_bytes=held.memory_bytes - old.memory_bytes + new.memory_bytes,
        )
        self._set(world.usage, node.id, usage)

    def _invalidate_kinds_unless_equal(self, before: Node | None, node: Node) -> None:
        if before is None or node_kind(before) != node_kind(node):
            self.world.fleet_cache = None

    def _invalidate_holdings_unless_equal(self, before: Node | None, node: Node) -> None:
        if before is None or len(before.devices) != len(node.devices):
            self.world.holdings_cache = None

    def _put_reservation(self, reservation: Reservation) -> None:
        before = self.world.reservations
        others = {name: one for name, one in before.items() if name != reservation.id}
        self.world.reservations = others if reservation.ended else {**others, reservation.id: reservation}
        if self._reservations is None:
            self._reservations = before

    def _index_pending(self, job: Job) -> None:
        if job.state is JobState.PENDING:
            self._set(self.world.pending, job.id, job)
        else:
            self._drop(self.world.pending, job.id)

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
