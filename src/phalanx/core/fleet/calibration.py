"""What the last calibration found, as the head keeps it: one document of the whole fleet. What is in it, `core.performance` knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import UserId

FLEET: Final = "fleet"
"""The id of the one document there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A profile as JSON text, which was checked when it came; who stored it, and when."""

    profile: str
    by: UserId
    at_s: float
    id: str = FLEET
