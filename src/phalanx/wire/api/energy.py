"""Records of the energy report."""

from __future__ import annotations

import msgspec

from phalanx.wire.api.prices import ElectricityView


class EnergyRowView(msgspec.Struct, frozen=True, kw_only=True):
    """The energy of one project, user, queue, GPU model or job.

    Attributes:
        key: "" for devices that no job held, and for the rest of a long list.
        kwh: of the GPUs, without the overhead of the building.
        counter_mj, integrated_mj: the same in millijoules, as integers that add up exactly: counted by devices, and added up from samples of power.
        mean_w: mean power of a GPU while its energy was counted; None if it never was.
        gpu_hours: all time; `unknown_gpu_hours`: of which nothing counted the energy.
        throttled: GPU-hours in which the clocks were held down, by cause: "thermal", "power" or "hardware".
        cost: as a decimal number in the currency, with the overhead; None without a price.
        gco2: grams of CO2, with the overhead; None without a figure of the grid.
        merged: number of rows that are added up in this one; 0 for a row of its own.
    """

    key: str
    kwh: float
    counter_mj: int
    integrated_mj: int
    mean_w: float | None
    gpu_hours: float
    unknown_gpu_hours: float
    cost: str | None = None
    gco2: float | None = None
    merged: int = 0
    throttled: dict[str, float] = {}


class EnergyReportView(msgspec.Struct, frozen=True, kw_only=True):
    """An energy report.

    Attributes:
        since_s, until_s: Unix times; full hours, except for now.
        total: the sum of all rows.
        metered_mj: what the meters of all devices counted, stored beside the rows; equal to the millijoules of the total.
        currency: of costs; empty without prices.
        rates: that held in the period, by time.
        unpriced_kwh, unrated_kwh: energy without a price, and without a figure of CO2.
    """

    by: str
    since_s: float
    until_s: float
    rows: list[EnergyRowView]
    total: EnergyRowView
    metered_mj: int
    currency: str = ""
    rates: list[ElectricityView] = []
    unpriced_kwh: float = 0.0
    unrated_kwh: float = 0.0
