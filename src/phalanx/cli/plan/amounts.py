"""Amounts as people write and read them in plans: tokens, Gbit/s, dollars, bytes, seconds. Pure; the type of each option is here."""

from __future__ import annotations

import math
import re
from typing import Final

from phalanx.cli.words import Checked
from phalanx.core.errors import BadRequest

_TOKENS: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmbt])?", re.IGNORECASE)
_TIMES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_USD: Final = re.compile(r"\$?\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)")
TOKENS_MAX: Final = 1e16  # a thousand times what any model was trained on; bounds a typo
COUNT_MAX: Final = 1 << 30  # of positions or sequences; bounds a typo
_DAY_S: Final = 86_400.0


def parse_tokens(text: object) -> float:
    """`300B`, `1.5T`, `20000000`.

    Raises:
        BadRequest: no number of tokens, none at all, or more than there are.
    """
    match = _TOKENS.fullmatch(str(text).strip())
    count = float(match[1]) * _TIMES[(match[2] or "").lower()] if match else 0.0
    if not 1 <= count <= TOKENS_MAX:
        raise BadRequest(f"tokens: {text!r} is no number of tokens", hint="write 300B or 1.5T")
    return count


def parse_count(text: object, *, what: str) -> int:
    """A number of positions or sequences.

    Raises:
        BadRequest: no whole number from 1 on.
    """
    words = str(text).strip()
    if not re.fullmatch(r"[0-9]{1,10}", words) or not 1 <= int(words) <= COUNT_MAX:
        raise BadRequest(f"{what}: {words[:40]!r} is no whole number from 1 on")
    return int(words)


def parse_usd(text: object) -> float:
    """US dollars for one GPU and hour.

    Raises:
        BadRequest: no amount.
    """
    match = _USD.fullmatch(str(text).strip())
    if match is None:
        raise BadRequest(f"price: {text!r} is no amount in US dollars", hint="write 2.69, for one GPU and hour")
    return float(match[1])


TOKENS: Final = Checked("TOKENS", parse_tokens)
SEQ: Final = Checked("N", lambda text: parse_count(text, what="seq"))
BATCH: Final = Checked("N", lambda text: parse_count(text, what="global-batch"))
USD: Final = Checked("USD", parse_usd)


# ---- shown ----------------------------------------------------------------------------------------------------------


def tokens_shown(count: float) -> str:
    """`300B`, `1.5T`."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def seconds_shown(seconds: float) -> str:
    """Of a step or a part of it: `1.92 s`, `34.1 ms`, `90 µs`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def gb_shown(count: float) -> str:
    """In decimal units, as model makers and this planner's sources count: `1.12 TB`, `74.3 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if abs(count) >= size:
            return f"{_three(count / size)} {unit}"
    return f"{_three(count / 1e6)} MB"


def span_shown(seconds: float, like_s: float | None = None) -> str:
    """A training: `23 days`, `5.2 days`, `3.1 hours`, `12 minutes`; in the unit that `like_s` would have."""
    for unit, size in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if (seconds if like_s is None else like_s) >= 2 * size:
            return f"{round_shown(seconds / size)} {unit}"
    return f"{seconds:.3g} seconds"


def usd_shown(usd: float) -> str:
    """`$49,000`, `$3.20`: two figures are all that an estimate has."""
    return f"${usd:.2f}" if usd < 10 else f"${round_shown(usd)}"


def round_shown(value: float) -> str:
    """Two or three figures: `540`, `12,300`, `3.4M`; millions and billions by their letters."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    for letter, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{_rounded(value / size)}{letter}"
    return _rounded(value)


def parameters_shown(count: float) -> str:
    """`124M`, `70.6B`, `1.01T`."""
    return tokens_shown(count)


def _rounded(value: float) -> str:
    digits = 1 - math.floor(math.log10(value))
    if value >= 100 and str(value)[0] == "1":
        digits += 1  # 1,240 rather than 1,200: the first figure 1 says little
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def _three(value: float) -> str:
    """Three figures, noughts at the end too: `7.20`, `12.5`, `1,240`."""
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
