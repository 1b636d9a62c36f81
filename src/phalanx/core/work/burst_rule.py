"""The rule of a queue that decides when its jobs order nodes of a pool with a price, and how it is written.

RULE      = "always" | "never" | "when" CONDITION ["and" CONDITION]
CONDITION = "wait" ">" DURATION | "price" "<" AMOUNT ["/GPU-h"]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.units import exact_duration, parse_duration_s

EXAMPLE: Final = "when wait > 2h and price < 40"
_ALWAYS, _NEVER = "always", "never"
_WAIT: Final = re.compile(r"wait\s*>\s*([0-9][0-9a-z.:]*)", re.ASCII)
_PRICE: Final = re.compile(r"price\s*<\s*\$?([0-9]{1,9}(?:\.[0-9]{1,4})?)\s*(/\s*gpu-?h)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRule:
    """When a job orders nodes that cost money.

    Attributes:
        wait_s: it must start by more than so many seconds sooner there; None: any time.
        price: its run there must cost less than so many US dollars; None: any price.
        per_gpu_h: the price is for each GPU-hour of its run.
        never: it orders none.
    """

    wait_s: float | None = None
    price: float | None = None
    per_gpu_h: bool = False
    never: bool = False

    def __str__(self) -> str:
        """The rule as it is written."""
        if self.never:
            return _NEVER
        conditions = [part for part in (self._wait_text, self._price_text) if part]
        return f"when {' and '.join(conditions)}" if conditions else _ALWAYS

    @property
    def _wait_text(self) -> str:
        return "" if self.wait_s is None else f"wait > {exact_duration(self.wait_s)}"

    @property
    def _price_text(self) -> str:
        if self.price is None:
            return ""
        return f"price < {f'{self.price:.4f}'.rstrip('0').rstrip('.')}{'/GPU-h' if self.per_gpu_h else ''}"

    def refusal(self, sooner_s: float, price: float | None, gpu_h: float) -> str:
        """Why it refuses an order; empty if it admits it.

        Args:
            sooner_s: by how much sooner the job starts there; infinite if it starts nowhere else.
            price: of its run there, in US dollars; None if its run time is unknown.
            gpu_h: GPU-hours of that run.
        """
        if self.never:
            return _NEVER
        if self.wait_s is not None and sooner_s <= self.wait_s:
            return self._wait_text
        if self.price is None:
            return ""
        if price is None:
            return self._price_text
        if price < (self.price * gpu_h if self.per_gpu_h else self.price):
            return ""
        return self._price_text


def parse_burst_rule(text: str) -> BurstRule:
    """Parse a rule, such as `when wait > 2h and price < 40`.

    Raises:
        BadRequest: it is not a rule, or a condition is there twice.
    """
    words = " ".join(text.split())
    if words in (_ALWAYS, _NEVER):
        return BurstRule(never=words == _NEVER)
    begin, _, rest = words.partition(" ")
    if begin != "when" or not rest:
        raise _wrong(text)
    wait_s = price = None
    per_gpu_h = False
    for condition in rest.split(" and "):
        waits, costs = _WAIT.fullmatch(condition.strip()), _PRICE.fullmatch(condition.strip())
        if waits is not None and wait_s is None:
            wait_s = parse_duration_s(waits[1], what="burst: wait")
        elif costs is not None and price is None:
            price, per_gpu_h = float(costs[1]), costs[2] is not None
        else:
            raise _wrong(text)
    return BurstRule(wait_s=wait_s, price=price, per_gpu_h=per_gpu_h)


def _wrong(text: str) -> BadRequest:
    return BadRequest(f"burst: {text[:80]!r} is not a rule", hint=f'write "{EXAMPLE}", "always" or "never"')
