"""What the GPUs cost: by project, user, queue, model, pool or job; the invoice; what projects spend; what failures cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from phalanx.api.http.bodies import json_response
from phalanx.api.http.routing import RouteTable
from phalanx.api.runtime import caller_of, run_in_thread, runtime_of
from phalanx.api.services import HeadServices
from phalanx.api.views.failures import failed_attempts
from phalanx.api.views.ledger_period import LedgerPeriod
from phalanx.core.access.caller import Caller
from phalanx.core.accounting.cost_report import (
    HOUR_US,
    Amount,
    CostKey,
    CostRow,
    IdleRule,
    Metered,
    cost_rows,
    invoice,
    meter,
)
from phalanx.core.accounting.failure_report import FailureKey, FailureSum, sum_failures
from phalanx.core.accounting.project_spending import (
    ForecastMethod,
    ProjectSpending,
    RunningUse,
    first_hour_s,
    project_spending,
)
from phalanx.core.errors import BadRequest, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.core.ids import ProjectId
from phalanx.core.months import month_of
from phalanx.core.state.records import POOL_NODES, PRICE_LISTS
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.quotas.queue_validation import rights_of
from phalanx.core.work.share import MILLI_PER_DEVICE
from phalanx.core.work.usage.monthly_budget import cents_text
from phalanx.core.work.usage.price_list import PRICES, PriceBook, micro_text
from phalanx.core.work.usage.usage_hour import UsageHour
from phalanx.core.work.users import Action
from phalanx.wire.api.cost import (
    BudgetView,
    CostReportView,
    CostRowView,
    FailureRowView,
    FailuresReportView,
    InvoiceLineView,
    InvoiceView,
    UnpricedView,
)

ROWS_MAX: Final = 1000  # in one answer: at most half a megabyte
LINES_MAX: Final = 4000  # of an invoice, in one answer
BUDGETS_MAX: Final = 100  # in a report: those of which most is spent
Since = Annotated[float, Query(ge=0, le=1e11)]
Until = Annotated[float | None, Query(ge=0, le=1e11)]
Limit = Annotated[int, Query(ge=1, le=ROWS_MAX)]
routes = RouteTable()


@routes.get("/v1/cost", Action.VIEW, reply=CostReportView)
async def cost_report(
    request: Request,
    since_s: Since,
    until_s: Until = None,
    by: CostKey = CostKey.PROJECT,
    label: str = "",
    share_idle: IdleRule = IdleRule.NONE,
    limit: Limit = ROWS_MAX,
) -> Response:
    """Report what the GPUs of the fleet cost in a period; the rows add up to its invoice, to the hundredth.

    With `label`, the jobs are grouped by their value of that label.
    """
    services, period = runtime_of(request).services, LedgerPeriod(since_s, until_s, label)
    by = CostKey.JOB if label else by
    return json_response(await run_in_thread(_cost_report, services, caller_of(request), period, by, share_idle, limit))


@routes.get("/v1/invoice", Action.VIEW, reply=InvoiceView)
async def show_invoice(request: Request, since_s: Since, until_s: Until = None) -> Response:
    """Report the cost of a period by month, pool and GPU model, each line rounded once."""
    return json_response(await run_in_thread(_invoice, runtime_of(request).services, LedgerPeriod(since_s, until_s)))


@routes.get("/v1/projects/{project_id}/spending", Action.VIEW, reply=BudgetView)
async def show_spending(request: Request, project_id: ProjectId) -> Response:
    """Show what a project has spent this month (UTC), its budget, and a forecast of the month's end."""
    services = runtime_of(request).services
    project = next((one for one in await run_in_thread(services.store.projects) if one.id == project_id), None)
    if project is None:
        raise NotFound(f"no project {project_id!r}", hint=Hint(HintCode.LIST_PROJECTS))
    (found,) = await run_in_thread(_budgets, services, [project])
    return json_response(found)


@routes.get("/v1/failures", Action.VIEW, reply=FailuresReportView)
async def failures_report(
    request: Request,
    since_s: Since,
    until_s: Until = None,
    by: FailureKey = FailureKey.CAUSE,
    limit: Limit = ROWS_MAX,
) -> Response:
    """Report failed attempts of a period, the GPU-hours that they lost, and an estimate of what these cost."""
    runtime, period = runtime_of(request), LedgerPeriod(since_s, until_s)
    begin_s, end_s = period.bounds_s(runtime.services.clock.now_s())
    currency, metered = await run_in_thread(_metered, runtime.services, period)
    attempts, unread = await failed_attempts(runtime, begin_s, end_s, metered)
    rows, total = sum_failures(attempts, by, rows_max=limit)
    found = FailuresReportView(
        by=by.value,
        since_s=begin_s,
        until_s=end_s,
        currency=currency,
        rows=list(map(_failure_row, rows)),
        total=_failure_row(total),
        unread_jobs=unread,
    )
    return json_response(found)


def queue_quotas(queues: list[Queue]) -> dict[str, int]:
    """What each queue has beyond the queues below it, in thousandths of GPUs."""
    rights = rights_of(queues)
    own = dict(rights)
    for queue in queues:
        if queue.parent is not None:
            own[queue.parent] -= rights[queue.id]
    return {str(queue_id): right for queue_id, right in own.items()}


def running_uses(services: HeadServices) -> Iterator[RunningUse]:
    """What running jobs hold, by GPU model and pool."""
    models = {node.id: {device.index: device.model for device in node.devices} for node in services.store.nodes()}
    pools = {member.id: str(member.pool) for member in services.store.records(POOL_NODES)}
    for job, attempt in services.controller.live_attempts():
        limit_s = job.spec.time_limit_s
        for grant in attempt.allocation.grants:
            for index in grant.devices:
                milli = MILLI_PER_DEVICE if grant.share is None else grant.share.milli_on(index)
                yield RunningUse(
                    project=job.project,
                    model=models.get(grant.node_id, {}).get(index, ""),
                    pool=pools.get(grant.node_id, ""),
                    milli=milli,
                    until_s=None if limit_s is None else attempt.placed_s + limit_s,
                )


def price_book(services: HeadServices) -> tuple[str, PriceBook]:
    """Return the currency and the prices that are stored; "" and none without a price list."""
    found = services.store.record(PRICE_LISTS, PRICES)
    return ("", PriceBook(())) if found is None else (found.currency, PriceBook(found.prices))


def _metered(services: HeadServices, period: LedgerPeriod) -> tuple[str, Metered]:
    currency, book = price_book(services)
    return currency, meter(period.hours(services), book)


def _cost_report(
    services: HeadServices, caller: Caller, period: LedgerPeriod, by: CostKey, rule: IdleRule, limit: int
) -> CostReportView:
    currency, book = price_book(services)
    metered = meter(period.hours_by(services, caller), book)
    quotas = queue_quotas(services.store.queues()) if rule is IdleRule.BY_QUOTA else {}
    rows = cost_rows(metered, by, rule, quotas=quotas, rows_max=limit)
    total = CostRow(key="", used=Amount(), idle=Amount(), used_cents=0, idle_cents=0)
    for row in rows:
        total = total.plus(row)
    budgeted = [one for one in services.store.projects() if one.budget is not None] if by is CostKey.PROJECT else []
    since_s, until_s = period.bounds_s(services.clock.now_s())
    return CostReportView(
        by=period.grouping(by.value),
        since_s=since_s,
        until_s=until_s,
        currency=currency,
        share_idle=rule.value,
        rows=list(map(_cost_row, rows)),
        total=_cost_row(total),
        unpriced=_unpriced(metered),
        budgets=sorted(_budgets(services, budgeted), key=lambda one: -(one.percent or 0))[:BUDGETS_MAX]
        if budgeted
        else [],
    )


def _invoice(services: HeadServices, period: LedgerPeriod) -> InvoiceView:
    currency, metered = _metered(services, period)
    lines = invoice(metered)
    if len(lines) > LINES_MAX:
        raise BadRequest(
            f"the invoice has {len(lines)} lines; at most {LINES_MAX} are in one answer", hint="ask for a month"
        )
    since_s, until_s = period.bounds_s(services.clock.now_s())
    cents = sum(line.cents for line in lines)
    return InvoiceView(
        since_s=since_s,
        until_s=until_s,
        currency=currency,
        lines=[
            InvoiceLineView(
                month=line.key.month,
                pool=line.key.pool,
                gpu=line.key.model,
                gpu_hours=line.amount.gpu_us / HOUR_US,
                gpu_us=line.amount.gpu_us,
                idle_gpu_hours=line.idle_us / HOUR_US,
                prices=list(map(micro_text, line.prices)),
                cost=cents_text(line.cents),
                cost_cents=line.cents,
            )
            for line in lines
        ],
        cost=cents_text(cents),
        cost_cents=cents,
        unpriced=_unpriced(metered),
    )


def _budgets(services: HeadServices, projects: list[Project]) -> list[BudgetView]:
    """The spending of these projects in the month of now."""
    return project_budgets(services, projects, services.usage_hours(first_hour_s(services.clock.now_s())))


def project_budgets(services: HeadServices, projects: list[Project], hours: Iterable[UsageHour]) -> list[BudgetView]:
    """The spending of these projects in the month of now. `hours`: of the ledger from `first_hour_s` on, in the order of time."""
    now_s = services.clock.now_s()
    currency, book = price_book(services)
    spending = project_spending(hours, book, running_uses(services), now_s=now_s)
    none = ProjectSpending(
        project="", month=month_of(now_s), spent_cents=0, forecast_cents=0, method=ForecastMethod.RUN_RATE
    )
    return [_budget(project, spending.get(project.id, none), currency) for project in projects]


def _budget(project: Project, found: ProjectSpending, currency: str) -> BudgetView:
    budget = project.budget
    comparable = budget is not None and budget.currency == currency
    return BudgetView(
        project=project.id,
        month=found.month,
        currency=currency,
        spent=cents_text(found.spent_cents),
        spent_cents=found.spent_cents,
        forecast=cents_text(found.forecast_cents),
        forecast_cents=found.forecast_cents,
        method=found.method.value,
        budget="" if budget is None else str(budget),
        percent=found.spent_cents * 100 // budget.cents if budget is not None and comparable else None,
    )


def _unpriced(metered: Metered) -> list[UnpricedView]:
    found: dict[tuple[str, str], int] = {}
    for key, line in metered.items():
        gpu_us = line.total().unpriced_us
        if gpu_us:
            found[key.pool, key.model] = found.get((key.pool, key.model), 0) + gpu_us
    return [
        UnpricedView(pool=pool, gpu=gpu, gpu_hours=us / HOUR_US) for (pool, gpu), us in sorted(found.items())[:ROWS_MAX]
    ]


def _cost_row(row: CostRow) -> CostRowView:
    return CostRowView(
        key=row.key,
        gpu_hours=row.used.gpu_us / HOUR_US,
        idle_gpu_hours=row.idle.gpu_us / HOUR_US,
        used=cents_text(row.used_cents),
        idle=cents_text(row.idle_cents),
        cost=cents_text(row.cents),
        cost_cents=row.cents,
        unpriced_gpu_hours=(row.used.unpriced_us + row.idle.unpriced_us) / HOUR_US,
        merged=row.merged,
    )


def _failure_row(row: FailureSum) -> FailureRowView:
    return FailureRowView(
        key=row.key,
        failures=row.failures,
        jobs=row.jobs,
        held_gpu_hours=row.held_us / HOUR_US,
        lost_gpu_hours=row.lost_us / HOUR_US,
        cost=cents_text(row.cents),
        cost_cents=row.cents,
        merged=row.merged,
    )
