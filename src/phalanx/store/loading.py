"""Builds a world from stored records. The code that updates its indexes also builds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.fleet.documents import FleetDocument
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.state.world import Idempotency, World, WorldChange
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.queue import Project, Queue, QueueUsage
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.users import Token, User

ENDED_JOBS_LOADED: Final = 1000  # as documented in ports.store.Store.load
KEYS_LOADED: Final = 100_000  # idempotency keys; as many as the controller holds in memory


def build_world(
    *,
    nodes: Iterable[Node],
    queues: Iterable[Queue],
    queue_usage: Iterable[QueueUsage],
    projects: Iterable[Project],
    users: Iterable[User],
    tokens: Iterable[Token],
    reservations: Iterable[Reservation],
    calibrations: Iterable[FleetDocument],
    failure_rules: Iterable[FailureRules],
    jobs: Iterable[Job],
    attempts: Iterable[Attempt],
    idempotency: Iterable[Idempotency],
    last_job_seq: int,
    last_story_seq: int,
) -> World:
    """Build the world. `jobs` in submit order; only live attempts and reservations; keys oldest first."""
    world = World(next_job_seq=last_job_seq + 1, next_story_seq=last_story_seq + 1)
    change = WorldChange(world=world)
    documents = (calibrations, failure_rules)
    for records in (nodes, queues, queue_usage, projects, users, tokens, reservations, *documents, jobs, attempts):
        for record in records:
            change.put(record)
    for key in idempotency:  # directly: they have no index, and there may be many
        world.idempotency[key.user, key.key] = key
    return world
