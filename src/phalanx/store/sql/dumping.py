"""Reads all documents of a database from one snapshot, verifies each, and pages through long histories to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from phalanx.core.hints import Hint, HintCode
from phalanx.core.state.records import RecordKind
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql import reading
from phalanx.store.sql.documents import decode
from phalanx.store.sql.kinds import KINDS
from phalanx.store.sql.migrations import check_applied, migrations
from phalanx.store.sql.reading import SqlReader

_PAGE: Final = 1000


def record_counts(look: SqlReader) -> dict[str, int]:
    """Number of records of each kind.

    Raises:
        StoreUnusable: the database is of another release.
    """
    known = migrations(look.dialect.name)
    applied = [(int(number), str(name), str(sha256)) for number, name, sha256 in look.rows("schema")]
    check_applied(applied, known)
    if len(applied) < len(known):
        raise StoreUnusable(
            f"the database is of an older release: migration {len(applied)} of {len(known)}",
            hint=Hint(HintCode.UPGRADE_STORE),
        )
    return {str(word): int(count) for word, count in look.rows("counts")}


def dump_records(look: SqlReader) -> Iterator[tuple[str, str]]:
    """(name of the kind, document) for every record, in the order of KINDS. Call it between `begin_look` and `end_look`.

    Raises:
        StoreUnusable: a document is damaged; a backup must not contain damaged records.
    """
    for kind in KINDS:
        for doc, crc in _all(look, kind):
            decode(kind, doc, crc)
            yield kind.name, doc


def last_job_seq(look: SqlReader) -> int:
    """The newest job's number; 0 for none."""
    return reading.number(look, "last_job_seq")


def _all(look: SqlReader, kind: RecordKind[Any, Any]) -> Iterator[tuple[str, int]]:
    if not kind.pages:
        yield from look.rows(f"all {kind.table}")
        return
    key = [first for _, first in kind.pages]
    while rows := look.rows(f"page {kind.table}", (*key, _PAGE)):
        for doc, crc, *key_ in rows:
            yield doc, crc
            key = key_
