"""Records of the prices of GPUs. Amounts are decimal numbers as text, so that no float rounds them."""

from __future__ import annotations

import msgspec


class PriceBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One price, as in a price file.

    Attributes:
        gpu: the model, or words of it.
        since: `from` in JSON: a date (UTC), or a date and time with its zone, on a full hour; "" for always.
        per_gpu_hour: "2.49"; at most six decimals.
        pool: "" for all nodes.
        source: where the price comes from.
    """

    gpu: str
    since: str = msgspec.field(name="from", default="")
    per_gpu_hour: str
    pool: str = ""
    source: str = ""


class ElectricityBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate of electricity, as in a price file. It needs `per_kwh` or `gco2_per_kwh`.

    Attributes:
        since: `from` in JSON, the same form as in a price.
        per_kwh: the price of a kWh: "0.18".
        pue: energy of the building for that of its machines, from 1 to 5; "" for 1.
        gco2_per_kwh: grams of CO2 for a kWh from the grid.
        source: where the figures come from.
    """

    since: str = msgspec.field(name="from", default="")
    per_kwh: str = ""
    pue: str = ""
    gco2_per_kwh: str = ""
    source: str = ""


class PricesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices that replace all earlier ones. With `dry_run` they are only compared with them. `electricity`: None keeps the stored rates."""

    currency: str
    prices: list[PriceBody]
    dry_run: bool = False
    electricity: list[ElectricityBody] | None = None


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """One price. `from_s`: Unix seconds, a full hour."""

    gpu: str
    pool: str
    from_s: int
    per_gpu_hour: str
    source: str = ""


class ElectricityView(msgspec.Struct, frozen=True, kw_only=True):
    """A rate of electricity from a Unix time on. `pue`: energy of the building for that of its machines, 1 for no overhead."""

    from_s: int
    per_kwh: str | None = None
    pue: float = 1.0
    gco2_per_kwh: float | None = None
    source: str = ""


class PricesReply(msgspec.Struct, frozen=True, kw_only=True):
    """All prices by model, pool and time; who stored them, and when. Without any, the currency is empty."""

    currency: str
    prices: list[PriceView]
    by: str = ""
    stored_s: float | None = None
    electricity: list[ElectricityView] = []


class PricesChanged(msgspec.Struct, frozen=True, kw_only=True):
    """What new prices change.

    Attributes:
        past_from_s: reports change from this Unix time on; None if no past hour gets another price.
        electricity_rates: rates of electricity after the change; `electricity_changed`: they are others than before.
    """

    currency: str
    added: list[PriceView]
    changed: list[PriceView]
    removed: list[PriceView]
    unchanged: int
    past_from_s: int | None = None
    electricity_rates: int = 0
    electricity_changed: bool = False
