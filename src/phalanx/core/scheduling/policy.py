"""The scheduler's configuration, and the state that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.core.fleet.node import Node
from phalanx.core.ids import JobId, NodeId, QueueId, ReservationId
from phalanx.core.scheduling.policies import Knobs
from phalanx.core.state.snapshot import Usage
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Queue, Spent
from phalanx.core.work.reservation import Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The configuration of a scheduler.

    Attributes:
        name: one of `policies.POLICIES`.
        knobs: of the default policy.
        placements_max: most placements per cycle; the rest follows in the next.
        restart_cost_s: the cost of a preemption or move for a job that saves when asked: its restart.
        size_of: what `sjf`, `srtf` and `backfill` may know of a job's total run time, in seconds; None: its time limit.
    """

    name: str = "default"
    knobs: Knobs = field(default_factory=Knobs)
    placements_max: int = 512
    restart_cost_s: float = 60.0
    size_of: Callable[[Job], float] | None = None


class Seen(Protocol):
    """The state as the scheduler reads it: a world, or a snapshot of one. Never modified here."""

    @property
    def version(self) -> int: ...  # noqa: D102
    @property
    def nodes(self) -> Mapping[NodeId, Node]: ...  # noqa: D102
    @property
    def usage(self) -> Mapping[NodeId, Usage]: ...  # noqa: D102
    @property
    def jobs(self) -> Mapping[JobId, Job]: ...  # noqa: D102
    @property
    def attempts(self) -> Mapping[JobId, Attempt]: ...  # noqa: D102
    @property
    def queues(self) -> Mapping[QueueId, Queue]: ...  # noqa: D102
    @property
    def reservations(self) -> Mapping[ReservationId, Reservation]: ...  # noqa: D102
    @property
    def spent(self) -> Mapping[QueueId, Spent]: ...  # noqa: D102
