"""`phalanx report tokens`: what services were used for, and what their tokens cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import hours_text
from phalanx.cli.tables import Cell, Column

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.cost import TokenReportView, TokenRowView

_CSV = (
    "service",
    "project",
    "batch",
    "requests",
    "prompt_tokens",
    "answer_tokens",
    "stream_s",
    "kv_token_s",
    "gpu_hours",
    "idle_gpu_hours",
    "cost",
    "cost_per_1k_tokens",
    "currency",
)


@report_kind("tokens")
def tokens(head: Client, period: Period) -> ReportTable:
    """Requests, tokens and cost of services by project, as gateways and batches count them. The GPU time of all rows is that of replicas and batches.

    GPU-HOURS are those in which replicas had requests, divided by tokens, and all those of batches; IDLE HOURS are borne by the service's own project.

    \b
    phalanx report tokens --month 2026-11
    """  # noqa: D301  # \b is a click marker
    return _table(head.token_report(since_s=period.since_s, until_s=period.until_s))


def _table(found: TokenReportView) -> ReportTable:
    columns = (
        Column(title="SERVICE", min_width=8),
        Column(title="PROJECT", min_width=8),
        Column(title="REQUESTS", right=True),
        Column(title="TOKENS IN", right=True),
        Column(title="TOKENS OUT", right=True),
        Column(title="GPU-HOURS", right=True),
        Column(title="IDLE HOURS", right=True, drop_order=1),
        Column(title=f"COST {found.currency}".rstrip(), right=True, hide_empty=True),
        Column(title="PER 1K TOKENS", right=True, hide_empty=True),
    )
    estimated = found.total.estimated
    return ReportTable(
        title="Tokens of services",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=[*(_row(_name(one), one) for one in found.rows), _row("total", found.total)] if found.rows else (),
        csv_rows=[list(_CSV), *(_csv_row(one, found.currency) for one in (*found.rows, found.total))],
        notes=[
            *([f"{found.merged} more rows are only in the total"] if found.merged else []),
            *(
                [
                    f"{estimated} {'request' if estimated == 1 else 'requests'} without a count of prompt tokens: estimated by bytes"
                ]
                if estimated
                else []
            ),
        ],
        bars=("tokens", [(f"{_name(one)} {one.project}", _bars(one)) for one in found.rows]),
        empty="no requests to services in this period",
        next_command="phalanx report cost --by project",
    )


def _name(row: TokenRowView) -> str:
    return f"{row.service} (batches)" if row.batch else row.service


def _bars(row: TokenRowView) -> dict[str, float]:
    return {"IN": float(row.prompt_tokens), "OUT": float(row.answer_tokens)}


def _row(name: str, row: TokenRowView) -> list[Cell | str]:
    return [
        Cell(name, "bold"),
        row.project,
        f"{row.requests:,}",
        f"{row.prompt_tokens:,}",
        f"{row.answer_tokens:,}",
        hours_text(row.gpu_hours),
        hours_text(row.idle_gpu_hours),
        row.cost,
        row.cost_per_1k_tokens,
    ]


def _csv_row(row: TokenRowView, currency: str) -> list[str]:
    names = _CSV[3:-1]
    return [
        row.service or "total",
        row.project,
        "yes" if row.batch else "",
        *(str(getattr(row, name)) for name in names),
        currency,
    ]
