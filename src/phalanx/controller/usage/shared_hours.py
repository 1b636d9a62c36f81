"""Hours of the ledger with the time of services' replicas at the projects that used them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf

from phalanx.core.accounting.service_sharing import share_out
from phalanx.core.state.records import SERVICE_USE_HOURS
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.ports.store import Store


def shared_hour(store: Store, hour: UsageHour) -> UsageHour:
    """Return the hour, shared out by the stored use of services."""
    use = store.record(SERVICE_USE_HOURS, hour.id)
    return hour if use is None else share_out(hour, use)


def shared_hours(
    store: Store, hours: Callable[[float, float], Iterable[UsageHour]], since_s: float, until_s: float = inf
) -> Iterator[UsageHour]:
    """The hours of a span (`UsageRecorder.hours`), shared out, each read as it is needed."""
    return (shared_hour(store, hour) for hour in hours(since_s, until_s))
