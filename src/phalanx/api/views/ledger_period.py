"""The hours of the ledger of states that a report adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from phalanx.api.auth.authenticator import viewer_of
from phalanx.api.services import HeadServices
from phalanx.core.access.caller import Caller
from phalanx.core.ids import JobId
from phalanx.core.work.usage.usage_hour import UsageHour

HOUR_S: Final = 3600


class LedgerPeriod(NamedTuple):
    """The hours that a period touches, in Unix seconds. `until_s`: None for now. `label`: by which jobs are grouped; "" for none."""

    since_s: float
    until_s: float | None
    label: str = ""

    def hours(self, services: HeadServices) -> Iterator[UsageHour]:
        """The hours of the ledger, oldest first, each read as it is needed."""
        until_s = inf if self.until_s is None else self.until_s
        return (hour for hour in services.usage_hours(self.since_s, until_s) if int(hour.id) < until_s)

    def hours_by(self, services: HeadServices, caller: Caller) -> Iterator[UsageHour]:
        """The hours, with a label the value of each job in place of its id: "" for jobs without it, and for those whose labels the caller may not see."""
        if not self.label:
            yield from self.hours(services)
            return
        values = services.store.label_values(self.label, ended_since_s=self.since_s, visible_to=viewer_of(caller))
        for hour in self.hours(services):
            yield replace(hour, rows=tuple(replace(row, job=values.get(JobId(row.job), "")) for row in hour.rows))

    def grouping(self, by: str) -> str:
        """What the rows of a report stand for."""
        return f"label:{self.label}" if self.label else by

    def bounds_s(self, now_s: float) -> tuple[float, float]:
        """Its beginning, and its end, which is never later than now."""
        end_s = now_s if self.until_s is None else min(now_s, self.until_s + -self.until_s % HOUR_S)
        return self.since_s - self.since_s % HOUR_S, end_s
