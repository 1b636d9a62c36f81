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


class PricesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices that replace all earlier ones. With `dry_run` they are only compared with them."""

    currency: str
    prices: list[PriceBody]
    dry_run: bool = False


class PriceView(msgspec.Struct, frozen=True, kw_only=True):
    """One price. `from_s`: Unix seconds, a full hour."""

    gpu: str
    pool: str
    from_s: int
    per_gpu_hour: str
    source: str = ""


class PricesReply(msgspec.Struct, frozen=True, kw_only=True):
    """All prices by model, pool and time; who stored them, and when. Without any, the currency is empty."""

    currency: str
    prices: list[PriceView]
    by: str = ""
    stored_s: float | None = None


class PricesChanged(msgspec.Struct, frozen=True, kw_only=True):
    """What new prices change.

    Attributes:
        past_from_s: reports change from this Unix time on; None if no past hour gets another price.
    """

    currency: str
    added: list[PriceView]
    changed: list[PriceView]
    removed: list[PriceView]
    unchanged: int
    past_from_s: int | None = None
