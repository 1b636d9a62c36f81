"""Answers questions about history: which level has the span, and rollups of one step for it, from the store and from what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

from phalanx.ports.history import HistoryStore
from phalanx.store.history.levels import DAY_S, LEVELS
from phalanx.store.history.maintenance import readable
from phalanx.store.history.metrics import DEVICE_METRICS, NODE_METRICS
from phalanx.store.history.rollups import Rollups, combined, laid_out

POINTS_MAX: Final = 2000  # of one answer
POINTS_WANTED: Final = 480  # of a curve, if the caller names no step: as many as a chart shows
STEPS_S: Final = (
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10_800,
    21_600,
    43_200,
    DAY_S,
    5 * DAY_S,
    30 * DAY_S,
)
_LAG_S: Final = (0, 7200, 2 * DAY_S)  # as late as a level may have what the finer one had, with room


def choose_step(since_s: float, until_s: float, now_s: float, wanted_s: float | None, points_max: int) -> int:
    """The step of an answer: the wanted one or a finer one that is offered, but as fine as the span allows and is still kept."""
    span_s = max(until_s - since_s, 1.0)
    finest = next((one for one in LEVELS if now_s - since_s <= one.keep_s + one.step_s), LEVELS[-1]).step_s
    least = max(finest, span_s / points_max)
    wanted = least if wanted_s is None else max(wanted_s, least)
    if wanted_s is None:
        wanted = max(wanted, span_s / POINTS_WANTED)
    return next((step for step in STEPS_S if step >= wanted), STEPS_S[-1])


def read_rollups(
    store: HistoryStore,
    held: Callable[[str], list[Rollups]],
    series: str,
    *,
    since_s: float,
    until_s: float,
    now_s: float,
    step_s: int,
) -> Rollups:
    """Rollups of `step_s` over the span, widened to whole steps and cut off now.

    Raises:
        HistoryUnavailable: the store cannot be read now.
    """
    begin_s = int(max(since_s, now_s - LEVELS[-1].keep_s)) // step_s * step_s
    end_s = max(-(-int(min(until_s, now_s)) // step_s) * step_s, begin_s + step_s)
    level = max(number for number, one in enumerate(LEVELS) if step_s % one.step_s == 0)
    # One chunk at a time, of which every step is a part: three years of a large node would be hundreds of megabytes at once.
    chunk_s = max(LEVELS[level].chunk_s, step_s)
    edges = [begin_s, *range(begin_s // chunk_s * chunk_s + chunk_s, end_s, chunk_s), end_s]
    parts = [
        combined(_gather(store, held, series, level, first, last, int(now_s)), step_s)
        for first, last in pairwise(edges)
    ]
    return laid_out(parts, begin_s, end_s, step_s)


def points_max(devices: int) -> int:
    """How many points an answer about a node with this many devices may have: less than a megabyte of JSON."""
    columns = 3 * (len(NODE_METRICS) + devices * len(DEVICE_METRICS))
    return max(24, min(POINTS_MAX, 60_000 // columns))


def _gather(
    store: HistoryStore,
    held: Callable[[str], list[Rollups]],
    series: str,
    level: int,
    begin_s: int,
    end_s: int,
    now_s: int,
) -> Rollups:
    """Rollups of a level over [begin_s, end_s), whose newest are made of the finer level."""
    own = LEVELS[level]
    newer = held(series) if level == 0 else []  # before the store is read, to which they may move meanwhile
    parts = readable(store.read(own.kind, series, begin_s - own.chunk_s + 1, end_s)) + newer
    if level > 0:
        finer = LEVELS[level - 1]
        recent_s = max(begin_s, (now_s - _LAG_S[level]) // finer.chunk_s * finer.chunk_s)
        known_s = min(end_s, -(-now_s // own.step_s) * own.step_s)  # nothing is known of the future
        if recent_s < known_s:
            newest = _gather(store, held, series, level - 1, recent_s, known_s, now_s)
            parts.append(combined(newest, own.step_s))
    return laid_out([part for part in parts if part.step_s == own.step_s], begin_s, end_s, own.step_s)
