"""Restores a backup into a new SQLite file, and replaces the present file once the new one is complete."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

import apsw

from phalanx.core.errors import Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.durable_files import remove_file, rename_path, sync_directory
from phalanx.failpoints import around
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.documents import row_of
from phalanx.store.sql.kinds import KIND_BY_NAME
from phalanx.store.sql.queries import SQLITE
from phalanx.store.sql.sqlite.connections import (
    close,
    lock,
    open_writer,
    record_created,
    to_store_error,
)
from phalanx.store.sql.sqlite.upgrade import free_name
from phalanx.store.sql.writing import grouped


def restore_records(path: str, records: Iterable[tuple[str, Any]], *, replace: bool) -> str:
    """Create the database `path` with these records; return the name of the file that keeps the previous one, empty for none.

    Raises:
        Conflict: a head uses it, or it exists and `replace` is false.
        StoreRefused: the disk failed or is full; the previous database is unchanged.
    """
    held = lock(path)
    try:
        if os.path.exists(path) and os.path.getsize(path) and not replace:
            raise Conflict(f"the database {path} already exists", hint=Hint(HintCode.REPLACE_DATABASE))
        fresh = path + ".restoring"
        _remove(fresh)
        writer = open_writer(fresh, "", held=-1)
        try:
            _write(writer, records)
        except (apsw.Error, OSError) as error:
            raise to_store_error(error, fresh) from error
        finally:
            close(writer)
        aside = _put_in_place(fresh, path)
        with contextlib.suppress(OSError):  # the records are in place; otherwise the next head records it
            record_created(held)
        return aside
    except OSError as error:
        raise to_store_error(error, path) from error
    finally:
        os.close(held)


def _write(writer: apsw.Connection, records: Iterable[tuple[str, Any]]) -> None:
    """Write all rows in one transaction, then checkpoint the WAL, since only the database file is moved to its place."""
    writer.execute("BEGIN IMMEDIATE")
    for word, lot in grouped(records):
        with around("restore.rows"):
            kind = KIND_BY_NAME[word]
            writer.executemany(SQLITE.writes[f"put {kind.table}"], [row_of(kind, record) for record in lot])
    with around("restore.commit"):
        writer.execute("COMMIT")
    with around("restore.checkpoint"):  # explicitly: closing would ignore a full disk or another reader
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _put_in_place(fresh: str, path: str) -> str:
    """Rename the old database and its WAL, if any, then move the new one into place: SQLite would apply an old WAL to the new file.

    A WAL may also exist without a database, if that was lost or truncated.
    """
    aside = kept = ""
    exists = os.path.exists(path) and os.path.getsize(path) > 0
    if exists:
        _empty_wal(path)
    if exists or os.path.exists(path + "-wal"):
        aside = free_name(f"{path}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}")
    if os.path.exists(path + "-wal"):
        rename_path("restore.wal", path + "-wal", aside + "-wal")
        kept = aside + "-wal"
    if exists:
        with around("restore.aside"):
            os.link(path, aside)
        kept = aside
    if os.path.exists(path + "-shm"):
        remove_file("restore.shm", path + "-shm")
    rename_path("restore", fresh, path)
    sync_directory("restore", os.path.dirname(path))
    return kept


def _empty_wal(path: str) -> None:
    """Checkpoint the WAL of a healthy database by opening and closing it; a damaged one is renamed as it is."""
    try:
        close(open_writer(path, "", held=-1))
    except (StoreUnusable, StoreRefused):
        return


def _remove(path: str) -> None:
    """Remove the files of an interrupted restore."""
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            remove_file("restore", name)
