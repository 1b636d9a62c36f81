"""The report of the tokens of services and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from phalanx.api.services import HeadServices
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.accounting.cost_report import CENT, HOUR_US, Amount, to_cents
from phalanx.core.accounting.token_report import TokenSum, sum_tokens
from phalanx.core.state.records import PRICE_LISTS, SERVICE_USE_HOURS
from phalanx.core.work.services.service_use import ServiceUseHour
from phalanx.core.work.usage.monthly_budget import cents_text
from phalanx.core.work.usage.price_list import PRICES, PriceBook
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.wire.api.cost import TokenReportView, TokenRowView

ROWS_MAX: Final = 1000  # in one answer


def token_report(services: HeadServices, period: LedgerPeriod) -> TokenReportView:
    """Return the use of services in a period, by service and project, the largest costs first if there are too many rows."""
    found = services.store.record(PRICE_LISTS, PRICES)
    currency, book = ("", PriceBook(())) if found is None else (found.currency, PriceBook(found.prices))
    sums = sum_tokens(_hours(services, period), book)
    total = TokenSum(service="", project="", used=Amount(), idle=Amount())
    for one in sums:
        total.add(one)
    largest = sorted(sums, key=lambda one: -(one.used.exact + one.idle.exact))[:ROWS_MAX]
    shown = sums if len(sums) <= ROWS_MAX else sorted(largest, key=lambda one: (one.service, one.project, one.batch))
    since_s, until_s = period.bounds_s(services.clock.now_s())
    return TokenReportView(
        since_s=since_s,
        until_s=until_s,
        currency=currency,
        rows=[_row(one, currency) for one in shown],
        total=_row(total, currency),
        merged=len(sums) - len(shown),
    )


def _hours(services: HeadServices, period: LedgerPeriod) -> Iterator[tuple[UsageHour, ServiceUseHour]]:
    until_s = inf if period.until_s is None else period.until_s
    for hour in services.unshared_usage_hours(period.since_s, until_s):
        use = services.store.record(SERVICE_USE_HOURS, hour.id) if int(hour.id) < until_s else None
        if use is not None:
            yield hour, use


def _row(one: TokenSum, currency: str) -> TokenRowView:
    tokens = one.prompt_tokens + one.answer_tokens
    return TokenRowView(
        service=one.service,
        project=one.project,
        batch=one.batch,
        requests=one.requests,
        estimated=one.estimated,
        prompt_tokens=one.prompt_tokens,
        answer_tokens=one.answer_tokens,
        stream_s=one.stream_ms / 1000,
        kv_token_s=one.kv_token_ms / 1000,
        gpu_hours=one.used.gpu_us / HOUR_US,
        gpu_us=one.used.gpu_us,
        idle_gpu_hours=one.idle.gpu_us / HOUR_US,
        idle_gpu_us=one.idle.gpu_us,
        cost=cents_text(to_cents(one.used.exact + one.idle.exact)) if currency else "",
        cost_per_1k_tokens=f"{one.used.exact / (100 * CENT) / tokens * 1000:.6f}" if currency and tokens else "",
    )
