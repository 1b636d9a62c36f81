"""The controller's working state: every record that lives, its indexes, and changes that can be undone.

One step of the controller opens one `Change`, puts records through it, and the shell commits what it lists. If the store refuses, the
change is undone and the world is as before: nothing is acknowledged that is not durable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from phalanx.core.fleet.node import Node
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, TokenId, UserId
from phalanx.core.state.snapshot import EMPTY_USAGE, Snapshot, Usage
from phalanx.core.state.story import StoryLine
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job, JobState
from phalanx.core.work.people import Token, User
from phalanx.core.work.queue import Project, Queue

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A caller's key, the SHA-256 of the body it came with, and the job it made."""

    user: UserId
    key: str
    body_sha256: str
    job_id: JobId
    at_s: float


Record = Job | Attempt | Node | Queue | Project | User | Token | Idempotency


@dataclass(slots=True)
class World:
    """All records the controller works with. Jobs that ended leave it once nothing refers to them; the store keeps them."""

    version: int = 0
    next_job_seq: int = 1
    next_story_seq: int = 1
    jobs: dict[JobId, Job] = field(default_factory=dict)
    attempts: dict[JobId, Attempt] = field(default_factory=dict)  # the live one of each job
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    queues: dict[QueueId, Queue] = field(default_factory=dict)
    projects: dict[ProjectId, Project] = field(default_factory=dict)
    users: dict[UserId, User] = field(default_factory=dict)
    tokens: dict[TokenId, Token] = field(default_factory=dict)
    idempotency: dict[tuple[UserId, str], Idempotency] = field(default_factory=dict)
    pending: dict[JobId, Job] = field(default_factory=dict)
    usage: dict[NodeId, Usage] = field(default_factory=dict)
    on_node: dict[NodeId, dict[JobId, Attempt]] = field(default_factory=dict)

    def snapshot(self, now_s: float) -> Snapshot:
        """The state as the scheduler sees it. Shares the mappings: valid until the next change."""
        return Snapshot(
            version=self.version, now_s=now_s, nodes=self.nodes, usage=self.usage, pending=tuple(self.pending.values()),
            queues=self.queues,
        )  # fmt: skip

    def attempts_on(self, node_id: NodeId) -> list[Attempt]:
        """Live attempts with a grant on the node, by job in submit order."""
        return sorted(self.on_node.get(node_id, {}).values(), key=lambda attempt: self.jobs[attempt.job_id].seq)


@dataclass(slots=True)
class Change:
    """Everything one step did to the world, in order. `epochs` are checked again by the store against its own rows."""

    world: World
    records: list[Record] = field(default_factory=list)
    removed: list[Node] = field(default_factory=list)
    story: list[StoryLine] = field(default_factory=list)
    epochs: dict[JobId, Epoch] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _job_seqs: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not self.records and not self.story and not self.removed

    def tell(self, line: StoryLine) -> None:
        """Add a story line; its seq is given here."""
        seq = self.world.next_story_seq
        self.world.next_story_seq = seq + 1
        self.story.append(replace(line, seq=seq))

    def put(self, record: Record) -> None:
        """Set a record, replacing the one of the same id."""
        world = self.world
        match record:
            case Job():
                self._set(world.jobs, record.id, record)
                self._index_pending(record)
            case Attempt():
                self._put_attempt(record)
            case Node():
                self._set(world.nodes, record.id, record)
                # A store applies removals last: a node that is back within the step must not be removed by it.
                self.removed[:] = [node for node in self.removed if node.id != record.id]
                self.removed = [gone for gone in self.removed if gone.id != record.id]  # it came back within the step
            case Queue():
                self._set(world.queues, record.id, record)
            case Project():
                self._set(world.projects, record.id, record)
            case User():
                self._set(world.users, record.id, record)
            case Token():
                self._set(world.tokens, record.id, record)
            case Idempotency():
                self._set(world.idempotency, (record.user, record.key), record)
        self.records.append(record)
        world.version += 1

    def remove_node(self, node: Node) -> None:
        """Take a node out of the fleet."""
        self._drop(self.world.nodes, node.id)
        self.removed.append(node)
        self.world.version += 1

    def new_job_seq(self) -> int:
        """The next submit number, dense."""
        seq = self.world.next_job_seq
        self.world.next_job_seq = seq + 1
        self._job_seqs += 1
        return seq

    def undo(self) -> None:
        """Put the world back to where the step found it. Numbers handed out stay used only if committed, so they go back too."""
        for back in reversed(self._undo):
            back()
        self.world.next_story_seq -= len(self.story)
        self.world.next_job_seq -= self._job_seqs
        self.world.version += 1
        self.records.clear()
        self.story.clear()
        self.removed.clear()
        self.epochs.clear()
        self._undo.clear()
        self._job_seqs = 0

    def _put_attempt(self, attempt: Attempt) -> None:
        world = self.world
        before = world.attempts.get(attempt.job_id)
        held_before = before is not None and before.live
        if attempt.live:
            self._set(world.attempts, attempt.job_id, attempt)
        elif before is not None:
            self._drop(world.attempts, attempt.job_id)
        for grant in attempt.allocation.grants:
            if grant.node_id not in world.on_node:
                self._set(world.on_node, grant.node_id, {})
            on_node = world.on_node[grant.node_id]
            if attempt.live:
                self._set(on_node, attempt.job_id, attempt)
            else:
                self._drop(on_node, attempt.job_id)
            if held_before != attempt.live:
                held = world.usage.get(grant.node_id, EMPTY_USAGE)
                sign = 1 if attempt.live else -1
                devices = held.devices | set(grant.devices) if attempt.live else held.devices - set(grant.devices)
                usage = Usage(
                    devices=frozenset(devices), cpus=held.cpus + sign * grant.cpus,
                    memory_bytes=held.memory_bytes + sign * grant.memory_bytes,
                )  # fmt: skip
                self._set(world.usage, grant.node_id, usage)
        self.epochs[attempt.job_id] = attempt.epoch

    def _index_pending(self, job: Job) -> None:
        if job.state is JobState.PENDING:
            self._set(self.world.pending, job.id, job)
        else:
            self._drop(self.world.pending, job.id)

    def _set(self, table: dict[K, V], key: K, value: V) -> None:
        if key in table:
            before = table[key]
            self._undo.append(lambda: table.__setitem__(key, before))
        else:
            self._undo.append(lambda: table.__delitem__(key))
        table[key] = value

    def _drop(self, table: dict[K, V], key: K) -> None:
        if key in table:
            before = table.pop(key)
            self._undo.append(lambda: table.__setitem__(key, before))
