"""States of GPUs in pages: a letter, a word and a colour each, so that none is told by colour alone."""

from __future__ import annotations

import enum
from typing import Final, Self


class CellState(enum.Enum):
    """A state: its letter in a cell, its key in scripts and styles, and its words. In the order of the legend."""

    letter: str
    words: str

    def __new__(cls, key: str, letter: str, words: str) -> Self:
        """A member whose value is the key."""
        member = object.__new__(cls)
        member._value_ = key
        member.letter = letter
        member.words = words
        return member

    ACTIVE = "active", "A", "held by a job, active"
    HELD = "held", "H", "held by a job, activity unknown"
    IDLE = "idle", "I", "held by a job, idle"
    FREE = "free", "F", "free"
    RESERVED = "reserved", "R", "reserved"
    OUTSIDE = "outside", "O", "used outside Phalanx"
    CORDONED = "cordoned", "C", "cordoned: no new jobs"
    DRAINING = "draining", "D", "draining: no new jobs, jobs leave"
    BROKEN = "broken", "B", "broken"
    DOWN = "down", "X", "node is down"


HELD_STATES: Final = (CellState.ACTIVE, CellState.HELD, CellState.IDLE)
