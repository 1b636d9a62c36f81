"""Limits on requests to services: how many requests and tokens a minute a project or an API token gets, and how several gateways share them.

Gateways enforce them. They report how much was asked of each limit, and each gets a share that follows its part of the demand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

PER_MINUTE_MAX: Final = 10**12
WEIGHT_MIN: Final = 0.01
WEIGHT_MAX: Final = 1000.0
EVEN_PART: Final = 0.1
"""The part of a limit that is divided evenly, so that a gateway without requests can take its first ones."""
_COUNT: Final = re.compile(r"(\d{1,13})([kM]?)", re.ASCII)
_FACTOR: Final = {"": 1, "k": 1000, "M": 1_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How much a project or an API token may ask of services in a minute; 0 for no limit. Tokens are those of prompts and answers together."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def __str__(self) -> str:
        """`60 requests/min, 200000 tokens/min`; empty without limits."""
        parts = ((self.requests_per_minute, "requests"), (self.tokens_per_minute, "tokens"))
        return ", ".join(f"{number} {what}/min" for number, what in parts if number)


NO_REQUEST_LIMITS: Final = RequestLimits()


def parse_per_minute(text: str, what: str = "limit") -> int:
    """Parse `600`, `200k` or `2M`; `none` is 0, no limit.

    Raises:
        BadRequest: it has another form, or is too large.
    """
    if text == "none":
        return 0
    found = _COUNT.fullmatch(text)
    number = 0 if found is None else int(found[1]) * _FACTOR[found[2]]
    if not 0 < number <= PER_MINUTE_MAX:
        raise BadRequest(f"{what}: {text[:60]!r} is not a number for each minute", hint='write "600", "200k" or "none"')
    return number


def parse_weight(text: str, what: str = "weight") -> float:
    """Parse the weight of a project.

    Raises:
        BadRequest: it is not a number from 0.01 to 1000.
    """
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise BadRequest(f"{what}: {text[:60]!r} is not a weight", hint=f"write a number from {WEIGHT_MIN} to 1000")
    return weight


def demand_share(asked: float, whole: float, gateways: int) -> float:
    """Return the share of a limit that a gateway gets, of which `asked` was asked there and `whole` at all gateways. The shares sum to 1.

    A tenth is divided evenly and the rest by demand; all of it evenly where nothing was asked.
    """
    return EVEN_PART / gateways + (1.0 - EVEN_PART) * asked / whole if whole > 0.0 else 1.0 / gateways
