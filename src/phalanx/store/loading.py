"""Builds a world from stored records. The code that updates its indexes also builds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from phalanx.core.fleet.calibration import Calibration
from phalanx.core.fleet.failure_rules import FailureRules
from phalanx.core.fleet.node import Node
from phalanx.core.state.world import Change, Idempotency, World
from phalanx.core.work.attempt import Attempt
from phalanx.core.work.job import Job
from phalanx.core.work.people import Token, User
from phalanx.core.work.queue import Project, Queue, Spent
from phalanx.core.work.reservation import Reservation

ENDED_JOBS_LOADED: Final = 1000  # as documented in ports.store.Store.load
KEYS_LOADED: Final = 100_000  # idempotency keys; as many as the controller holds in memory


def build_world(
    *,
    nodes: Iterable[Node],
    queues: Iterable[Queue],
    spent: Iterable[Spent],
    projects: Iterable[Project],
    users: Iterable[User],
    tokens: Iterable[Token],
    reservations: Iterable[Reservation],
    calibrations: Iterable[Calibration],
    failure_rules: Iterable[FailureRules],
    jobs: Iterable[Job],
    attempts: Iterable[Attempt],
    idempotency: Iterable[Idempotency],
    last_job_seq: int,
    last_story_seq: int,
) -> World:
    """Build the world. `jobs` in submit order; only live attempts and reservations; keys oldest first."""
    world = World(next_job_seq=last_job_seq + 1, next_story_seq=last_story_seq + 1)
    change = Change(world=world)
    documents = (calibrations, failure_rules)
    for records in (nodes, queues, spent, projects, users, tokens, reservations, *documents, jobs, attempts):
        for record in records:
            change.put(record)
    for key in idempotency:  # directly: they have no index, and there may be many
        world.idempotency[key.user, key.key] = key
    return world
