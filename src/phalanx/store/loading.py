"""Builds a world from stored records. The code that updates its indexes also builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from phalanx.core.state.records import IDEMPOTENCY, RECORDS, RecordKind
from phalanx.core.state.world import World, WorldChange

ENDED_JOBS_LOADED: Final = 1000  # as documented in ports.store.Store.load
KEYS_LOADED: Final = 100_000  # idempotency keys; as many as the controller holds in memory


def build_world(
    read: Callable[[RecordKind[Any, Any]], Iterable[Any]], *, last_job_seq: int, last_history_seq: int
) -> World:
    """Build the world. `read`: the records of a kind to load: only live attempts and reservations; keys oldest first."""
    world = World(next_job_seq=last_job_seq + 1, next_history_seq=last_history_seq + 1)
    change = WorldChange(world=world)
    for kind in RECORDS:
        if kind is not IDEMPOTENCY and kind.in_world:
            for record in read(kind):
                change.put(record)
    # Directly, since there may be many.
    world.table(IDEMPOTENCY).update((IDEMPOTENCY.key_of(key), key) for key in read(IDEMPOTENCY))
    return world
