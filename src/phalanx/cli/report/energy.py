"""`phalanx report energy`: the energy of GPUs by project, user, queue, GPU model or job, its cost and its CO2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.cli.report.electricity_text import rate_text
from phalanx.cli.report.period import Period
from phalanx.cli.report.report_kind import report_kind
from phalanx.cli.report.report_table import ReportTable
from phalanx.cli.report.usage import KEYS, NO_JOB, hours_text
from phalanx.cli.tables import Cell, Column

if TYPE_CHECKING:
    from phalanx.client import Client
    from phalanx.wire.api.energy import EnergyReportView, EnergyRowView

_RATES_SHOWN: Final = 5
_GRAMS_PER_KG: Final = 1000
CAUSES: Final = ("thermal", "power", "hardware")  # `core.accounting.energy_ledger.ThrottleCause`, which loads more


@report_kind("energy", by=KEYS)
def energy(head: Client, period: Period, *, by: str) -> ReportTable:
    """Energy of GPUs in kWh, their mean power, and with rates of electricity the cost and the CO2.

    The rows add up to what the devices counted; devices that no job held have a row of their own. The report begins with the full hour.
    docs/energy.md explains the figures.

    \b
    phalanx report energy --by user --since 7d
    phalanx report energy --by job --month 2026-11 --csv
    """  # noqa: D301 - click reads the backspace character itself
    return energy_table(head.energy_report(by=by, since_s=period.since_s, until_s=period.until_s))


def energy_table(found: EnergyReportView) -> ReportTable:
    """The report as a table."""
    columns = (
        Column(title=found.by.upper(), min_width=8),
        Column(title="KWH", right=True),
        Column(title="MEAN W", right=True),
        Column(title=found.currency or "COST", right=True, hide_empty=True),
        Column(title="KG CO2", right=True, hide_empty=True),
        Column(title="GPU-HOURS", right=True, drop_order=2),
        *(Column(title=f"{cause.upper()} LIMIT", right=True, hide_empty=True, drop_order=3) for cause in CAUSES),
        Column(title="UNKNOWN", right=True, hide_empty=True, drop_order=1),
    )
    rows: list[list[Cell | str]] = [[Cell(_name(row), "bold"), *_cells(row)] for row in found.rows]
    rows.append(["total", *_cells(found.total)])
    return ReportTable(
        title=f"Energy of GPUs by {found.by}",
        since_s=found.since_s,
        until_s=found.until_s,
        value=found,
        columns=columns,
        rows=rows if found.total.gpu_hours else (),
        csv_rows=[
            [
                found.by,
                "kwh",
                "counter_mj",
                "integrated_mj",
                "mean_w",
                "cost",
                "gco2",
                "gpu_hours",
                "unknown_gpu_hours",
                *(f"{cause}_gpu_hours" for cause in CAUSES),
            ],
            *(_csv_row(_name(row), row) for row in found.rows),
            _csv_row("total", found.total),
        ],
        notes=_notes(found),
        next_command="" if found.by == "job" else "phalanx report energy --by job",
    )


def _name(row: EnergyRowView) -> str:
    return f"{row.merged} more" if row.merged else row.key or NO_JOB


def _cells(row: EnergyRowView) -> list[str]:
    return [
        hours_text(row.kwh),
        "" if row.mean_w is None else f"{row.mean_w:.0f}",
        "" if row.cost is None else f"{float(row.cost):,.2f}",
        "" if row.gco2 is None else hours_text(row.gco2 / _GRAMS_PER_KG),
        hours_text(row.gpu_hours),
        *(hours_text(row.throttled.get(cause, 0.0)) for cause in CAUSES),
        hours_text(row.unknown_gpu_hours),
    ]


def _csv_row(name: str, row: EnergyRowView) -> list[str]:
    return [
        name,
        f"{row.kwh:.9f}",
        str(row.counter_mj),
        str(row.integrated_mj),
        "" if row.mean_w is None else f"{row.mean_w:.3f}",
        row.cost or "",
        "" if row.gco2 is None else f"{row.gco2:.6f}",
        f"{row.gpu_hours:.9f}",
        f"{row.unknown_gpu_hours:.9f}",
        *(f"{row.throttled.get(cause, 0.0):.9f}" for cause in CAUSES),
    ]


def _notes(found: EnergyReportView) -> tuple[str, ...]:
    lines, total = [], found.total
    if total.integrated_mj:
        share = total.integrated_mj / (total.integrated_mj + total.counter_mj)
        lines.append(f"{share:.0%} of the energy is integrated from samples of power: those devices have no counter")
    if total.throttled:
        named = ", ".join(f"{cause} {hours_text(hours)}" for cause, hours in total.throttled.items())
        lines.append(f"clocks were held down in {hours_text(sum(total.throttled.values()))} GPU-hours: {named}")
    if total.unknown_gpu_hours:
        lines.append(
            f"of {hours_text(total.unknown_gpu_hours)} GPU-hours the energy is unknown: virtual devices, or no meter was read"
        )
    lines += [rate_text(rate, found.currency) for rate in found.rates[:_RATES_SHOWN]]
    if len(found.rates) > _RATES_SHOWN:
        lines.append(f"{len(found.rates) - _RATES_SHOWN} more rates of electricity held later in the period")
    if total.kwh and found.unpriced_kwh and found.rates:
        lines.append(f"{hours_text(found.unpriced_kwh)} kWh have no price")
    if total.kwh and found.unrated_kwh and total.gco2 is not None:
        lines.append(f"{hours_text(found.unrated_kwh)} kWh have no figure of CO2")
    return tuple(lines)
