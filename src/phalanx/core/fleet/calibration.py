"""Fleet-wide documents that the head stores: the last calibration profile and the operators' failure rules.

`core.performance` defines the content of the profile, `core.recovery.rules` that of the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import UserId

FLEET: Final = "fleet"
"""The id of the fleet's profile."""
RULES: Final = "failure-rules"
"""The id of the operators' failure rules, also a document as JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A document as JSON text, validated when it was stored, with its author and time."""

    profile: str
    by: UserId
    at_s: float
    id: str = FLEET
