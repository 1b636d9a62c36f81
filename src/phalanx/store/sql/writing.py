"""Converts a batch, or the records of a backup, to rows of named statements. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from phalanx.core.state.records import ATTEMPTS, RECORDS
from phalanx.ports.store import Batch
from phalanx.store.commit_checks import BatchRows
from phalanx.store.sql.documents import Row, key_values, row_of
from phalanx.store.sql.kinds import AUDIT, HISTORY, KINDS_OF_JOBS

_LOT: Final = 1000  # records of a backup written at once


def statements(batch: Batch, rows: BatchRows) -> list[tuple[str, list[Row]]]:
    """Named statements and their rows, sorted so that each row comes after those that it refers to. Removals come after records: a node
    that is put and removed is gone.
    """
    plan: list[tuple[str, list[Row]]] = []
    for kind in RECORDS:
        if kind not in rows.by_kind:
            continue
        records: Iterable[Any] = rows.of(kind).values()
        if kind is ATTEMPTS:  # ended ones first, so that no job has two live attempts in between
            records = sorted(records, key=lambda attempt: attempt.holds_allocation)
        plan.append((f"put {kind.table}", [row_of(kind, record) for record in records]))
    plan.append((f"put {HISTORY.table}", [row_of(HISTORY, line) for line in batch.history]))
    plan.append((f"put {AUDIT.table}", [row_of(AUDIT, line) for line in batch.audit]))
    plan += [(f"delete {kind.table}", [key_values(key)]) for kind, key in batch.removed]
    if batch.archived:
        plan += [(f"archive {kind.table}", [(job_id,) for job_id in batch.archived]) for kind in KINDS_OF_JOBS]
    return [(name, values) for name, values in plan if values]


def grouped(records: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Group consecutive records of one kind, at most _LOT in a group."""
    rest = iter(records)
    word, lot = "", list[Any]()
    while chunk := list(islice(rest, _LOT)):
        for kind, record in chunk:
            if kind != word or len(lot) >= _LOT:
                if lot:
                    yield word, lot
                word, lot = kind, []
            lot.append(record)
    if lot:
        yield word, lot
