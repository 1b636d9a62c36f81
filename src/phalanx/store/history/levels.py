"""The levels of rollups: how long each covers, how many make a chunk, and how long they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phalanx.ports.history import ChunkKind

DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Level:
    """One level. `step_s`: of a rollup; `chunk_s`: of a chunk, a multiple of the next level's step; `keep_s`: least time that it is kept."""

    kind: ChunkKind
    step_s: int
    chunk_s: int
    keep_s: int


LEVELS: Final = (
    Level(ChunkKind.TEN_SECONDS, 10, 3600, DAY_S),
    Level(ChunkKind.FIVE_MINUTES, 300, DAY_S, 60 * DAY_S),
    Level(ChunkKind.HOURS, 3600, 30 * DAY_S, 3 * 365 * DAY_S),
)
STEP_S: Final = LEVELS[0].step_s
HOUR_S: Final = LEVELS[0].chunk_s
JOBS_KEEP_S: Final = LEVELS[-1].keep_s
JOBS_MAX: Final = 100_000  # curves of jobs that are kept, of at most 15 KB each
