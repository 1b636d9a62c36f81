"""Rolls complete chunks up into the next level, and drops those that are too old. Idempotent: a crash in between is repaired by the next turn."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

from phalanx.ports.history import ChunkKind, HistoryStore, StoredChunk
from phalanx.store.history.levels import JOBS_KEEP_S, JOBS_MAX, LEVELS, Level
from phalanx.store.history.packing import DamagedChunk, pack, unpack
from phalanx.store.history.rollups import Rollups, combined, laid_out

_log = logging.getLogger("phalanx.history")


def roll_up(store: HistoryStore, now_s: float, limit: int) -> int:
    """Roll at most `limit` complete chunks of the finest level that has some up into the next; return their number.

    Raises:
        HistoryUnavailable: the store cannot be read or written now.
    """
    for level, coarser in pairwise(LEVELS):
        found = store.pending(level.kind, int(now_s) - level.chunk_s + 1, limit)
        for chunk in found:
            store.put(_rolled_up(store, chunk, coarser))
        if found:
            return len(found)
    return 0


def drop_old(store: HistoryStore, now_s: float) -> int:
    """Drop what is older than its level keeps; return the number of chunks.

    Raises:
        HistoryUnavailable: the store cannot be written now.
    """
    dropped = sum(store.drop(level.kind, int(now_s) - level.keep_s - level.chunk_s) for level in LEVELS)
    dropped += store.drop(ChunkKind.JOB_CURVE, int(now_s) - JOBS_KEEP_S)
    return dropped + store.keep_newest(ChunkKind.JOB_CURVE, JOBS_MAX)


def _rolled_up(store: HistoryStore, chunk: StoredChunk, coarser: Level) -> list[StoredChunk]:
    """What to write: the next level's chunk with this one in it, and this one, no longer pending."""
    done = replace(chunk, pending=False)
    try:
        part = combined(unpack(chunk.data), coarser.step_s)
    except DamagedChunk as error:
        _log.warning(
            "history of %s from %d is damaged and skipped: %s", chunk.series or "the fleet", chunk.begin_s, error
        )
        return [done]
    begin_s = chunk.begin_s - chunk.begin_s % coarser.chunk_s
    before = readable(store.read(coarser.kind, chunk.series, begin_s, begin_s + 1))
    whole = laid_out([*before, part], begin_s, begin_s + coarser.chunk_s, coarser.step_s)
    pending = coarser is not LEVELS[-1]
    return [
        StoredChunk(series=chunk.series, kind=coarser.kind, begin_s=begin_s, data=pack(whole), pending=pending),
        done,
    ]


def readable(chunks: list[StoredChunk]) -> list[Rollups]:
    """The chunks that can be unpacked; a damaged one is a hole."""
    found = []
    for chunk in chunks:
        try:
            found.append(unpack(chunk.data))
        except DamagedChunk as error:
            _log.warning("history of %s from %d is damaged: %s", chunk.series or "the fleet", chunk.begin_s, error)
    return found
