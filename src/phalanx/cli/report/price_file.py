"""Parses price files (YAML 1.2) into the prices sent to the head. Errors name the line.

currency: EUR
prices:
  - gpu: h100                     # the model, or words of it
    pool: cloud                   # only nodes of this pool; without it, all nodes
    from: 2026-11-01              # a date (UTC), or a date and time with its zone; a full hour
    per_gpu_hour: 2.49
    source: offer of 12 October
electricity:                      # optional; without it the rates that the head has stay
  - from: 2026-01-01
    per_kwh: 0.18
    pue: 1.25                     # energy of the building for that of its machines
    gco2_per_kwh: 344             # of the grid
    source: contract, and the grid operator's mean of 2025
"""

from __future__ import annotations

from typing import Final

from phalanx.cli.yaml_file import read_yaml_file
from phalanx.core.errors import BadRequest
from phalanx.core.work.usage.electricity import RATES_MAX
from phalanx.core.work.usage.price_list import PRICES_MAX, parse_currency, parse_price, parse_rate
from phalanx.user_files.yaml_document import FileKind, YamlValue, parse_yaml

KEYS: Final = ("gpu", "pool", "from", "per_gpu_hour", "source")
RATE_KEYS: Final = ("from", "per_kwh", "pue", "gco2_per_kwh", "source")
PRICE_FILE: Final = FileKind(
    name="price file",
    example="write currency: EUR, and prices: with a list below it",
    bytes_max=4 << 20,
    depth_max=3,  # the mapping, the list, a price
    events_max=(PRICES_MAX + RATES_MAX) * 16,  # five keys with their values
)
Prices = tuple[str, list[dict[str, str]], list[dict[str, str]] | None]
"""Currency, prices, and rates of electricity; None for a file without that section."""


def read_price_file(path: str) -> Prices:
    """Return the currency, the checked prices and the checked rates of electricity of the file at `path`; `-` reads standard input.

    Raises:
        BadFile: the file cannot be read, is not YAML, or has a wrong key or value; the message names the line.
        TooLarge: the file is larger than 4 MiB.
    """
    return _prices(read_yaml_file(path, PRICE_FILE))


def parse_price_file(text: str, *, path: str) -> Prices:
    """Return the same of a text; `path` is for messages.

    Raises:
        BadFile: as for `read_price_file`.
    """
    return _prices(parse_yaml(text, PRICE_FILE, path=path))


def _prices(root: YamlValue) -> Prices:
    found = root.mapping("price file", ("currency", "prices", "electricity"))
    for key in ("currency", "prices"):
        if key not in found:
            raise root.error(f"{key} is missing", PRICE_FILE.example)
    currency, listed = found["currency"], found["prices"]
    try:
        parse_currency(currency.text("currency"))
    except BadRequest as error:
        raise currency.error(error.message, error.hint) from None
    if not isinstance(listed.content, list):
        raise listed.error("prices: expected a list", f"each with some of {', '.join(KEYS)}")
    prices: list[dict[str, str]] = []
    lines: dict[tuple[str, str, int], int] = {}
    for value in listed.content:
        price = {key: one.text(key) for key, one in value.mapping("price", KEYS).items() if not one.is_null}
        try:
            identity = parse_price(
                price.get("gpu", ""),
                price.get("from", ""),
                price.get("per_gpu_hour", ""),
                pool=price.get("pool", ""),
                source=price.get("source", ""),
            ).key
        except BadRequest as error:
            raise value.error(error.message, error.hint) from None
        if identity in lines:
            raise value.error(f"the same model, pool and time have a price on line {lines[identity]} already")
        lines[identity] = value.line
        prices.append(price)
    return currency.text("currency"), prices, _rates(found["electricity"]) if "electricity" in found else None


def _rates(listed: YamlValue) -> list[dict[str, str]]:
    """The checked rates of electricity."""
    if not isinstance(listed.content, list):
        raise listed.error("electricity: expected a list", f"each with some of {', '.join(RATE_KEYS)}")
    rates: list[dict[str, str]] = []
    lines: dict[int, int] = {}
    for value in listed.content:
        rate = {key: one.text(key) for key, one in value.mapping("rate", RATE_KEYS).items() if not one.is_null}
        figures = {key: text for key, text in rate.items() if key != "from"}
        try:
            from_s = parse_rate(rate.get("from", ""), **figures).from_s
        except BadRequest as error:
            raise value.error(error.message, error.hint) from None
        if from_s in lines:
            raise value.error(f"the same time has a rate on line {lines[from_s]} already")
        lines[from_s] = value.line
        rates.append(rate)
    return rates
