"""Shares the GPU time of the replicas of services out to the projects that used them. The time of a batch is its own project's. Pure.

While a replica has requests, its time belongs to the users of the service, in proportion to their tokens of that hour, or to their requests if there
are no tokens. The rest of its time belongs to the owner of the service. Amounts are integers and add up to the time of the replica exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.core.work.services.service_use import ServiceUse, ServiceUseHour
from phalanx.core.work.usage.usage_hour import UsageHour, UsageRow


class Payer(NamedTuple):
    """Who bears a part of a replica's time. `idle`: of the time without requests."""

    project: str
    user: str
    idle: bool


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A part of a row of the ledger. `service`: of the replica or `batch`; "" for any other job. Only rows of replicas are divided."""

    service: str
    payer: Payer
    row: UsageRow
    batch: bool = False


def share_rows(hour: UsageHour, use: ServiceUseHour) -> Iterator[SharedRow]:
    """Yield the rows of an hour, those of replicas in parts, one for each payer."""
    spans: dict[str, int] = {}
    for row in hour.rows:
        spans[row.job] = spans.get(row.job, 0) + sum(amount for _, _, amount in row.amounts)
    services = {str(one.job): str(one.service) for one in use.replicas}
    busy = {str(one.job): one.busy for one in use.replicas}
    batches = {str(one.job): str(one.service) for one in use.batches}
    weights = {service: _weights(use.uses, service) for service in set(services.values())}
    for row in hour.rows:
        service = services.get(row.job, "")
        if row.job in batches:
            yield SharedRow(batches[row.job], Payer(row.project, row.user, idle=False), row, batch=True)
            continue
        if not service:
            yield SharedRow("", Payer(row.project, row.user, idle=not row.job), row)
            continue
        span, used = spans[row.job], min(spans[row.job], busy[row.job])
        by_user = weights[service]
        whole = sum(by_user.values())
        parts = {Payer(project, user, idle=False): weight * used for (project, user), weight in by_user.items()}
        idle = (span - used) * whole if whole and span else 1  # a row without time may have energy
        parts[Payer(row.project, row.user, idle=True)] = idle
        yield from (SharedRow(service, payer, part) for payer, part in _split_row(row, parts))


def share_out(hour: UsageHour, use: ServiceUseHour) -> UsageHour:
    """Return the hour with the time of replicas at those who used them; its sums are the same."""
    rows: dict[tuple[str, ...], UsageRow] = {}
    for part in share_rows(hour, use):
        key = (part.row.model, part.row.pool, part.row.project, part.row.user, part.row.queue, part.row.job)
        rows[key] = _plus(rows[key], part.row) if key in rows else part.row
    return UsageHour(id=hour.id, fleet=hour.fleet, rows=tuple(rows.values()), millijoules=hour.millijoules)


def _weights(uses: Sequence[ServiceUse], service: str) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    of_service = [one for one in uses if one.service == service]
    by_tokens = any(one.prompt_tokens + one.answer_tokens for one in of_service)
    for one in sorted(of_service, key=lambda one: (one.project, one.user)):
        weight = one.prompt_tokens + one.answer_tokens if by_tokens else one.requests
        if weight:
            found[one.project, one.user] = weight
    return found


def _split_row(row: UsageRow, parts: dict[Payer, int]) -> Iterator[tuple[Payer, UsageRow]]:
    total, done = sum(parts.values()), 0
    for payer, weight in parts.items():
        if not weight:
            continue
        begin, done = done, done + weight

        def part(amount: int, begin: int = begin, end: int = done) -> int:
            return amount * end // total - amount * begin // total

        yield (
            payer,
            UsageRow(
                model=row.model,
                pool=row.pool,
                project=payer.project,
                user=payer.user,
                queue=row.queue,
                job=row.job,
                amounts=tuple((state, note, part(amount)) for state, note, amount in row.amounts),
                energy=tuple((source, part(energy), part(covered)) for source, energy, covered in row.energy),
                throttled=tuple((cause, part(amount)) for cause, amount in row.throttled),
            ),
        )


def _plus(one: UsageRow, other: UsageRow) -> UsageRow:
    """Both together; of one account."""
    amounts = {(state, note): amount for state, note, amount in one.amounts}
    for state, note, amount in other.amounts:
        amounts[state, note] = amounts.get((state, note), 0) + amount
    energy = {source: (found, covered) for source, found, covered in one.energy}
    for source, found, covered in other.energy:
        known = energy.get(source, (0, 0))
        energy[source] = (known[0] + found, known[1] + covered)
    throttled = dict(one.throttled)
    for cause, amount in other.throttled:
        throttled[cause] = throttled.get(cause, 0) + amount
    return UsageRow(
        model=one.model,
        pool=one.pool,
        project=one.project,
        user=one.user,
        queue=one.queue,
        job=one.job,
        amounts=tuple((state, note, amount) for (state, note), amount in amounts.items()),
        energy=tuple((source, found, covered) for source, (found, covered) in energy.items()),
        throttled=tuple(throttled.items()),
    )
