"""Documents of the whole fleet, as the head keeps them: what the last calibration found, and the operators' failure rules.

What is in the first, `core.performance` knows; what is in the second, `core.recovery.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import UserId

FLEET: Final = "fleet"
"""The id of the fleet's profile."""
RULES: Final = "failure-rules"
"""The id of the operators' failure rules: a document of the fleet too, as JSON text, kept beside its profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A document as JSON text, which was checked when it came; who stored it, and when."""

    profile: str
    by: UserId
    at_s: float
    id: str = FLEET
