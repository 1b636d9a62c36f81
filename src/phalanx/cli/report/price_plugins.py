"""Plug-ins that refresh prices: installed packages declare functions as entry points of the group `phalanx.prices`.

Such a function takes the prices of now in the form of a price file, as {"currency": "EUR", "prices": [{"gpu": ..., "pool": ..., "from_s": ...,
"per_gpu_hour": "2.49", "source": ...}]}, and returns the text of a price file (YAML). It runs in this command, with the rights of the caller.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Final

from phalanx.cli.report.price_file import Prices, parse_price_file
from phalanx.core.errors import BadRequest

ENTRY_POINTS: Final = "phalanx.prices"
PricePlugin = Callable[[Mapping[str, object]], str]


def refreshed_prices(name: str, known: Mapping[str, object]) -> Prices:
    """Return the prices that a plug-in gives.

    Raises:
        BadRequest: it is not installed, cannot be imported, failed, or returned no text.
        BadFile: its text is no price file.
    """
    points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in points:
        installed = ", ".join(sorted(points)) or "none"
        raise BadRequest(f"no plug-in {name!r} for prices is installed here", hint=f"installed: {installed}")
    try:
        plugin: PricePlugin = points[name].load()
        text = plugin(known)
    except Exception as error:  # the plug-in is not ours: it may raise anything
        raise BadRequest(f"the plug-in {name} failed: {error}", hint=f"see {points[name].value}") from error
    if not isinstance(text, str):
        raise BadRequest(f"the plug-in {name} returned {type(text).__name__}, not the text of a price file")
    return parse_price_file(text, path=name)
