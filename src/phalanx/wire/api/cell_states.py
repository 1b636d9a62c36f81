"""States of GPUs on screens and pages: a letter, a word and a colour each, so that colour is never the only sign of one."""

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

    ACTIVE = "active", "A", "held, computing"
    LOW = "low", "L", "held, low activity"
    WAITING = "waiting", "W", "held, waiting for data or other ranks"
    CHECKPOINTING = "checkpointing", "K", "held, saving a checkpoint"
    STARTING = "starting", "S", "held, starting"
    HELD = "held", "H", "held, activity unknown"
    PREEMPTED = "preempted", "P", "held, stopping for other jobs"
    IDLE = "idle", "I", "held, idle"
    UNOCCUPIED = "unoccupied", "U", "held without a process"
    HUNG = "hung", "G", "held, hung"
    LOST = "lost", "T", "held by a job that failed"
    FREE = "free", "F", "free"
    RESERVED = "reserved", "R", "reserved"
    OUTSIDE = "outside", "O", "used outside Phalanx"
    CORDONED = "cordoned", "C", "cordoned: no new jobs"
    DRAINING = "draining", "D", "draining: no new jobs, jobs leave"
    BROKEN = "broken", "B", "broken"
    DOWN = "down", "X", "node is down"


HELD_STATES: Final = (
    CellState.ACTIVE,
    CellState.LOW,
    CellState.WAITING,
    CellState.CHECKPOINTING,
    CellState.STARTING,
    CellState.HELD,
    CellState.PREEMPTED,
    CellState.IDLE,
    CellState.UNOCCUPIED,
    CellState.HUNG,
    CellState.LOST,
)
