"""The fleet's profile as the head stores it: the result of the last calibration. `core.performance` defines its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import UserId

CALIBRATION_ID: Final = "fleet"
"""The id of the only document: the profile of the whole fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDocument:
    """A profile as JSON text, validated before it is stored; who stored it, and when (Unix seconds)."""

    text: str
    by: UserId
    at_s: float
    id: str = CALIBRATION_ID
