"""The hours of the ledger of states that a report adds up."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final, NamedTuple

from phalanx.api.services import HeadServices
from phalanx.core.work.usage_hour import UsageHour

HOUR_S: Final = 3600


class LedgerPeriod(NamedTuple):
    """The hours that a period touches, in Unix seconds. `until_s`: None for now."""

    since_s: float
    until_s: float | None

    def hours(self, services: HeadServices) -> Iterator[UsageHour]:
        """The hours of the ledger, oldest first, each read as it is needed."""
        until_s = inf if self.until_s is None else self.until_s
        return (hour for hour in services.usage_hours(self.since_s, until_s) if int(hour.id) < until_s)

    def bounds_s(self, now_s: float) -> tuple[float, float]:
        """Its beginning, and its end, which is never later than now."""
        end_s = now_s if self.until_s is None else min(now_s, self.until_s + -self.until_s % HOUR_S)
        return self.since_s - self.since_s % HOUR_S, end_s
