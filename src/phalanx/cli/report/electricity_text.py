"""Rates of electricity as text, below the list of prices and below the energy report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.report.period import utc_text

if TYPE_CHECKING:
    from phalanx.wire.api.prices import ElectricityView


def rate_text(rate: ElectricityView, currency: str) -> str:
    """One line on a rate of electricity."""
    parts = [
        "" if rate.per_kwh is None else f"{rate.per_kwh} {currency} a kWh",
        "" if rate.gco2_per_kwh is None else f"{rate.gco2_per_kwh:g} g CO2 a kWh",
        f"PUE {rate.pue:g}" + ("" if rate.pue == 1 else " (in cost and CO2)"),
    ]
    since = f"since {utc_text(rate.from_s)}" if rate.from_s else "always"
    return f"electricity {since}: {', '.join(filter(None, parts))}{f' ({rate.source})' if rate.source else ''}"
