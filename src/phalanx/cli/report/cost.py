"""`phalanx report cost` and `phalanx report invoice`: what the GPUs of the fleet cost, free ones included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import hours_text
from phalanx.cli.tables import Cell, Column

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.cost import BudgetView, CostReportView, CostRowView, InvoiceView, UnpricedView

KEYS: Final = ("project", "user", "queue", "gpu", "pool", "job")  # `core.accounting.cost_report.CostKey`
RULES: Final = ("none", "by-use", "by-quota")  # `core.accounting.cost_report.IdleRule`
NO_POOL: Final = "(no pool)"
_NO_KEY: Final = {"job": "(no job)", "pool": NO_POOL}
_SPREAD: Final = {
    "by-use": "spread over jobs, in each line of the invoice by their GPU time",
    "by-quota": "spread over queues by their quotas of now, and in each queue over its jobs by their GPU time",
}
_UNPRICED_SHOWN: Final = 5


@report_kind("cost", by=KEYS, labels=True)
@click.option(
    "--share-idle", type=click.Choice(RULES), default="none", show_default=True, help="Who bears GPUs that no job held."
)
def cost(head: Client, period: Period, *, by: str, share_idle: str) -> ReportTable:
    """Cost of the GPUs of the fleet. All rows add up to the invoice of the period, to the cent; docs/money.md has the rules.

    USED is what jobs held, IDLE the part of GPUs that no job held. Prices are those of `phalanx prices`.

    \b
    phalanx report cost --by user --month 2026-11
    phalanx report cost --by queue --share-idle by-quota --csv
    """  # noqa: D301 - click reads the backspace character itself
    return cost_table(
        head.cost_report(by=by, since_s=period.since_s, until_s=period.until_s, share_idle=share_idle),
    )


@report_kind("invoice")
def invoice(head: Client, period: Period) -> ReportTable:
    """Cost by month, pool and GPU model, each line rounded once. The reports of cost of the same period add up to it.

    \b
    phalanx report invoice --month 2026-11
    """  # noqa: D301 - click reads the backspace character itself
    return invoice_table(head.invoice(since_s=period.since_s, until_s=period.until_s))


def cost_table(found: CostReportView) -> ReportTable:
    """The report of cost as a table."""
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="GPU-HOURS", right=True),
        Column(title="IDLE HOURS", right=True, hide_empty=True, drop_order=1),
        Column(title="USED", right=True),
        Column(title="IDLE", right=True, hide_empty=True),
        Column(title=f"COST {found.currency}".rstrip(), right=True),
    )
    rows = [_row(_name(row, found.by), row) for row in found.rows]
    return ReportTable(
        title=f"Cost of GPUs by {found.by}",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=[*rows, _row("total", found.total)] if rows else (),
        csv_rows=[
            [found.by, "gpu_hours", "idle_gpu_hours", "used", "idle", "cost", "currency", "unpriced_gpu_hours"],
            *(_csv_row(_name(row, found.by), row, found.currency) for row in found.rows),
            _csv_row("total", found.total, found.currency),
        ],
        notes=[
            *_idle_note(found),
            *unpriced_notes(found.unpriced, found.currency),
            *(budget_text(one) for one in found.budgets if found.currency),
        ],
        bars=(
            found.currency,
            [(_name(row, found.by), {"USED": float(row.used), "IDLE": float(row.idle)}) for row in found.rows],
        )
        if found.currency
        else ("", ()),
        next_command="phalanx report invoice" if found.currency else "phalanx prices apply FILE",
    )


def invoice_table(found: InvoiceView) -> ReportTable:
    """The invoice as a table."""
    columns = (
        Column(title="MONTH"),
        Column(title="POOL", min_width=6),
        Column(title="GPU", min_width=8),
        Column(title="GPU-HOURS", right=True),
        Column(title="PRICE", right=True, drop_order=1),
        Column(title=f"COST {found.currency}".rstrip(), right=True),
    )
    hours = sum(line.gpu_hours for line in found.lines)
    rows: list[list[Cell | str]] = [
        [
            line.month,
            line.pool or NO_POOL,
            Cell(line.gpu, "bold"),
            hours_text(line.gpu_hours),
            _prices(line.prices),
            money_text(line.cost),
        ]
        for line in found.lines
    ]
    return ReportTable(
        title="Invoice of GPUs",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=[*rows, ["total", "", "", hours_text(hours), "", money_text(found.cost)]] if rows else (),
        csv_rows=[
            ["month", "pool", "gpu", "gpu_hours", "prices", "cost", "currency"],
            *(
                [
                    line.month,
                    line.pool,
                    line.gpu,
                    f"{line.gpu_hours:.9f}",
                    " ".join(line.prices),
                    line.cost,
                    found.currency,
                ]
                for line in found.lines
            ),
            ["total", "", "", f"{hours:.9f}", "", found.cost, found.currency],
        ],
        notes=unpriced_notes(found.unpriced, found.currency),
        next_command="phalanx report cost --by project" if found.currency else "phalanx prices apply FILE",
    )


def budget_text(found: BudgetView) -> str:
    """What a project has spent this month, of which budget, and what is expected."""
    spent = f"project {found.project}: {money_text(found.spent)} {found.currency}".rstrip() + f" in {found.month}"
    if found.budget:
        of = f"{found.percent} % of its budget of" if found.percent is not None else "its budget has another currency:"
        spent += f", {of} {found.budget}"
    warning = "" if found.percent is None or found.percent < 80 else "! "
    return f"{warning}{spent}; forecast {money_text(found.forecast)} {found.currency} ({found.method})"


def unpriced_notes(unpriced: list[UnpricedView], currency: str) -> list[str]:
    """The GPUs that have no price: they are never 0 in silence."""
    if not currency:
        return ["no prices are stored, so nothing has a cost"]
    named = [
        f"{one.gpu} in {f'pool {one.pool}' if one.pool else 'no pool'} ({hours_text(one.gpu_hours)} GPU-hours)"
        for one in unpriced
    ]
    if len(named) > _UNPRICED_SHOWN:
        named = [*named[:_UNPRICED_SHOWN], f"{len(named) - _UNPRICED_SHOWN} more"]
    return [f"without a price, and not in these sums: {', '.join(named)}"] if named else []


def _idle_note(found: CostReportView) -> list[str]:
    total = found.total
    if not total.idle_gpu_hours:
        return []
    what = (
        f"{hours_text(total.idle_gpu_hours)} GPU-hours that no job held cost {money_text(total.idle)} {found.currency}"
    )
    if found.by in ("gpu", "pool"):
        return [f"{what.rstrip()}, in the column IDLE of each {'model' if found.by == 'gpu' else 'pool'}"]
    if found.share_idle == "none":
        return [f"{what.rstrip()}: a row of its own (--share-idle none)"]
    left = next((row for row in found.rows if not row.key and not row.merged and row.idle_gpu_hours), None)
    rest = "" if left is None else f"; {money_text(left.idle)} of it has no {found.by} to bear it"
    return [f"{what.rstrip()}: {_SPREAD[found.share_idle]} (--share-idle {found.share_idle}){rest}"]


def _row(name: str, row: CostRowView) -> list[Cell | str]:
    mark = "+?" if row.unpriced_gpu_hours else ""
    return [
        Cell(name, "bold") if name != "total" else name,
        hours_text(row.gpu_hours),
        hours_text(row.idle_gpu_hours),
        money_text(row.used) if row.gpu_hours else "",
        money_text(row.idle) if row.idle_gpu_hours else "",
        money_text(row.cost) + mark,
    ]


def _csv_row(name: str, row: CostRowView, currency: str) -> list[str]:
    hours = (f"{row.gpu_hours:.9f}", f"{row.idle_gpu_hours:.9f}")
    return [name, *hours, row.used, row.idle, row.cost, currency, f"{row.unpriced_gpu_hours:.9f}"]


def _name(row: CostRowView, by: str) -> str:
    return f"{row.merged} more" if row.merged else row.key or _NO_KEY.get(by, f"(no {by})")


def _prices(prices: list[str]) -> str:
    """The price, or from the first to the last one that held."""
    return "?" if not prices else prices[0] if len(prices) == 1 else f"{prices[0]} .. {prices[-1]}"


def money_text(text: str) -> str:
    """An amount with separators of thousands."""
    whole, _, rest = text.partition(".")
    return f"{int(whole):,}.{rest}"
