"""The operators' own failure rules, as the head stores them. `core.recovery.rules` parses and applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.core.ids import UserId

OPERATORS: Final = "operators"
"""The id of the only document: operators replace it whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRules:
    """Rules as JSON text, validated before they are stored; who stored them, and when (Unix seconds)."""

    rules: str
    by: UserId
    at_s: float
    id: str = OPERATORS
