"""Reports of the use of services, added to what is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.state.records import SERVICE_USE_HOURS
from phalanx.core.work.services.service_use import COUNTS, LATE_S, BatchUse, ServiceUseHour
from phalanx.ports.store import Store

HOUR_S: Final = 3600
_NAME_MAX: Final = 200  # characters


def is_countable(hour_id: str, now_s: float) -> bool:
    """Return whether use of this hour may still be added: it has begun, and is not so old that it could be counted twice.

    Raises:
        BadRequest: it is not the beginning of an hour.
    """
    if not hour_id.isascii() or not hour_id.isdigit() or len(hour_id) > 12 or int(hour_id) % HOUR_S:
        raise BadRequest(f"{hour_id[:40]!r} is not the beginning of an hour", hint="send its Unix seconds as text")
    return now_s - LATE_S <= int(hour_id) <= now_s + HOUR_S


def added_hour(store: Store, reported: ServiceUseHour, uses_max: int) -> ServiceUseHour:
    """Return the stored hour with the reported use. Times of replicas become those of their devices.

    Raises:
        BadRequest: a number is negative, a name too long, or there are too many rows.
    """
    replicas = []
    for one in reported.replicas:
        job = store.job(one.job)
        replicas.append(replace(one, busy=min(one.busy, HOUR_S * 1000) * (0 if job is None else job.gpu_milli)))
    least = min((getattr(use, name) for use in reported.uses for name in COUNTS), default=0)
    names: list[str] = [name for use in reported.uses for name in (use.service, use.project, use.user)]
    names += [name for one in reported.replicas for name in (one.service, one.job)]
    if min(least, *(one.busy for one in replicas), 0) < 0 or max(map(len, names), default=0) > _NAME_MAX:
        raise BadRequest("a number is negative, or a name too long", hint="report counts of requests and tokens")
    # Only the jobs of batches report these.
    found = _stored(store, reported.id).plus(replace(reported, replicas=tuple(replicas), batches=()))
    if len(found.uses) + len(found.replicas) > uses_max:
        raise BadRequest(f"an hour has at most {uses_max} rows", hint="report fewer users of services")
    return found


def with_batches(store: Store, hour_id: str, batches: Iterable[BatchUse], batches_max: int) -> ServiceUseHour | None:
    """Return the stored hour with what batches report of it; None if it has that already, or as many batches as it may."""
    before = _stored(store, hour_id)
    found = before.plus(ServiceUseHour(id=hour_id, batches=tuple(batches)))
    return None if found.batches == before.batches or len(found.batches) > batches_max else found


def _stored(store: Store, hour_id: str) -> ServiceUseHour:
    return store.record(SERVICE_USE_HOURS, hour_id) or ServiceUseHour(id=hour_id)
