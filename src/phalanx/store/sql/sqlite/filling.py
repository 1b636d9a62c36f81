"""A SQLite file made of a backup, beside the one that is there, and put in its place when it is whole."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

import apsw

from phalanx.core.errors import Conflict
from phalanx.failpoints import around, sync_directory
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.kinds import BY_WORD
from phalanx.store.sql.queries import SQLITE
from phalanx.store.sql.sqlite.connections import lock, open_writer, refusal, remember_made, shut
from phalanx.store.sql.sqlite.upgrade import free_name
from phalanx.store.sql.writing import lots


def fill(path: str, records: Iterable[tuple[str, Any]], *, replace: bool) -> str:
    """Make `path` a database of these records; the name under which what was there before is kept, empty for nothing.

    Raises:
        Conflict: a head runs on it, or there is one already and it is not to be replaced.
        StoreRefused: the disk. What was there is there.
    """
    held = lock(path)
    try:
        if os.path.exists(path) and os.path.getsize(path) and not replace:
            raise Conflict(f"there is a database already: {path}", hint="--replace puts it aside")
        fresh = path + ".restoring"
        _remove(fresh)
        writer = open_writer(fresh, "", held=-1)
        try:
            _write(writer, records)
        except (apsw.Error, OSError) as error:
            raise refusal(error, fresh) from error
        finally:
            shut(writer)
        aside = _put_in_place(fresh, path)
        with contextlib.suppress(OSError):  # the records are in place; the head that starts says it then
            remember_made(held)
        return aside
    except OSError as error:
        raise refusal(error, path) from error
    finally:
        os.close(held)


def _write(writer: apsw.Connection, records: Iterable[tuple[str, Any]]) -> None:
    """All in one transaction, rows of one kind in lots; then out of the WAL into the file, which alone is put in place."""
    writer.execute("BEGIN IMMEDIATE")
    for word, lot in lots(records):
        with around("restore.rows"):
            writer.executemany(SQLITE.writes[BY_WORD[word].put], [BY_WORD[word].row(record) for record in lot])
    with around("restore.commit"):
        writer.execute("COMMIT")
    with around("restore.checkpoint"):  # not left to the close, which tells nobody of a full disk or of another reader
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)


def _put_in_place(fresh: str, path: str) -> str:
    """The old one gets another name first, with its WAL if one is left: a WAL beside the new file would be taken for its own.

    A WAL may also stand alone, beside a database that was lost or emptied.
    """
    aside = kept = ""
    stands = os.path.exists(path) and os.path.getsize(path) > 0
    if stands:
        _empty_wal(path)
    if stands or os.path.exists(path + "-wal"):
        aside = free_name(f"{path}.before-restore-{time.strftime('%Y%m%d-%H%M%S')}")
    if os.path.exists(path + "-wal"):
        with around("restore.wal"):
            os.rename(path + "-wal", aside + "-wal")
        kept = aside + "-wal"
    if stands:
        with around("restore.aside"):
            os.link(path, aside)
        kept = aside
    if os.path.exists(path + "-shm"):
        with around("restore.shm"):
            os.unlink(path + "-shm")
    with around("restore.rename"):
        os.replace(fresh, path)
    sync_directory("restore.directory", os.path.dirname(path))
    return kept


def _empty_wal(path: str) -> None:
    """A sound database takes its WAL in when it is opened and closed; a damaged one is set aside as it is."""
    try:
        shut(open_writer(path, "", held=-1))
    except (StoreUnusable, StoreRefused):
        return


def _remove(path: str) -> None:
    """What a restore that was killed has left."""
    for name in (path, path + "-wal", path + "-shm"):
        if os.path.exists(name):
            with around("restore.remove"):
                os.unlink(name)
