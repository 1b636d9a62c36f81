"""Power limits of GPUs, and the cap that an operator sets on those of a node. Milliwatts, as NVML counts them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

MW_PER_W: Final = 1000
_WATTS: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s?(k?)w?", re.IGNORECASE | re.ASCII)
_MILLIWATTS_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimits:
    """The limits of one device.

    Attributes:
        index: of the device.
        min_mw, max_mw: the range in which its limit can be set.
        default_mw: its limit after the driver is loaded.
        limit_mw: its limit now, as its supervisor last saw it.
        original_mw: its limit before Phalanx changed it; None if it did not.
    """

    index: int
    min_mw: int
    max_mw: int
    default_mw: int
    limit_mw: int
    original_mw: int | None = None

    @property
    def valid(self) -> bool:
        """Whether a supervisor can have seen these."""
        original = self.min_mw if self.original_mw is None else self.original_mw
        return all(
            0 <= one <= _MILLIWATTS_MAX for one in (self.min_mw, self.max_mw, self.default_mw, self.limit_mw, original)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCap:
    """A cap on each GPU of a node. Times are Unix seconds.

    Attributes:
        until_s: when the node restores the limits of before; None for no end.
        applied: its supervisor has set the limits.
    """

    milliwatts: int
    by: str
    since_s: float
    until_s: float | None = None
    applied: bool = False

    def is_over(self, now_s: float) -> bool:
        """Whether its time is over."""
        return self.until_s is not None and now_s >= self.until_s


def parse_power_mw(text: str) -> int:
    """Milliwatts of text such as `300W`, `300` or `0.3kW`.

    Raises:
        BadRequest: it is not one of these, or no power.
    """
    found = _WATTS.fullmatch(text.strip())
    milliwatts = 0 if found is None else round(float(found[1]) * (MW_PER_W**2 if found[2] else MW_PER_W))
    if milliwatts <= 0:
        raise BadRequest(f"{text[:40]!r} is not a power limit", hint="write watts for each GPU, such as 300W")
    return milliwatts


def watts_text(milliwatts: int) -> str:
    """`300 W`, `287.5 W`."""
    return f"{milliwatts / MW_PER_W:.10g} W"


def common_range_mw(limits: Sequence[PowerLimits]) -> tuple[int, int]:
    """The lowest and the highest limit that can be set on every device."""
    return max(one.min_mw for one in limits), min(one.max_mw for one in limits)
