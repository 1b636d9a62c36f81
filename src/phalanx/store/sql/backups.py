"""Backup and restore of a head's records from and to either database; also migrates from one to the other.

A backup contains all records of the database, but no files: logs, outputs, checkpoints, uploaded folders.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx import __version__
from phalanx.core.errors import BadFile, NotFound
from phalanx.core.hints import Hint, HintCode
from phalanx.store.sql import archive
from phalanx.store.sql.archive import (
    BACKUP,
    VERSION,
    BackupManifest,
    ProgressCallback,
    read_manifest,
    read_records,
    write_backup,
)
from phalanx.store.sql.dumping import dump_records, last_job_seq, record_counts
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.reading import SqlReader


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseLocation:
    """A database: `path` of a SQLite file, or `dsn` of a PostgreSQL database."""

    path: str = ""
    dsn: str = ""

    @property
    def database(self) -> str:
        """Kind of the database."""
        return "postgres" if self.dsn else "sqlite"


def backup(place: DatabaseLocation, path: str, progress: ProgressCallback) -> BackupManifest:
    """Write a consistent snapshot of all records into a file. A head may run meanwhile.

    Raises:
        NotFound: the database does not exist.
        Conflict: the file exists.
        StoreUnusable: a record is damaged; no backup is written.
        StoreRefused: the database or the disk failed.
    """
    with _reader(place) as look:
        look.rows("begin_look")
        try:
            counts = record_counts(look)
            manifest = BackupManifest(
                format=BACKUP,
                version=VERSION,
                phalanx=__version__,
                made_s=time.time(),
                database=place.database,
                migration=len(migrations(place.database)),
                counts=counts,
                last_job_seq=last_job_seq(look),
            )
            write_backup(path, manifest, dump_records(look), progress)
        finally:
            look.rows("end_look")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """Result of a restore.

    Attributes:
        aside: file or schema that contains the previous records; empty for none.
    """

    manifest: BackupManifest
    aside: str


def restore(path: str, place: DatabaseLocation, progress: ProgressCallback, *, replace: bool) -> RestoreResult:
    """Replace the database's records by those of a backup. The backup is verified to its end before anything is changed.

    Raises:
        BadFile: the backup is damaged, or of a newer release.
        Conflict: a head runs, or there are records and `replace` is false.
        StoreRefused, StoreUnusable: the database failed; its records are unchanged.
    """
    manifest = check(path, progress)
    records = _counted(read_records(path), manifest, progress)
    if place.dsn:
        from phalanx.store.sql.postgres.restoring import restore_records as fill_postgres  # the extra may be missing

        aside = fill_postgres(place.dsn, records, replace=replace)
    else:
        from phalanx.store.sql.sqlite.restoring import restore_records

        aside = restore_records(place.path, records, replace=replace)
    return RestoreResult(manifest=manifest, aside=aside)


def check(path: str, progress: ProgressCallback) -> BackupManifest:
    """Verify a backup by reading it to its end.

    Raises:
        BadFile: it is damaged, or of a newer release.
    """
    manifest = read_manifest(path)
    known = len(migrations(manifest.database)) if manifest.database in ("sqlite", "postgres") else 0
    if manifest.migration > known:
        raise BadFile(
            f"{path} was written by a newer Phalanx ({manifest.phalanx})", hint="restore it with that release"
        )
    return archive.check(path, progress)


@contextmanager
def _reader(place: DatabaseLocation) -> Iterator[SqlReader]:
    if place.dsn:
        from phalanx.store.sql.postgres.address import Address
        from phalanx.store.sql.postgres.connections import PostgresReaders

        with (
            contextlib.closing(PostgresReaders(Address.parse(place.dsn, session="phalanx-backup"))) as readers,
            readers.borrow() as look,
        ):
            look.rows("patience")
            yield look
        return
    if not os.path.exists(place.path):
        raise NotFound(f"no database at {place.path}", hint="set PHALANX_HOME to the folder of a head")
    if not os.path.getsize(place.path):  # do not open it: SQLite removes the WAL beside an empty file
        raise NotFound(f"no database: {place.path} is empty", hint=Hint(HintCode.RESTORE_BACKUP))
    from phalanx.store.sql.queries import SQLITE
    from phalanx.store.sql.sqlite.connections import SqliteReaders

    with contextlib.closing(SqliteReaders(place.path, "")) as lent, lent.borrow() as connection:
        yield SqlReader(SQLITE, connection.execute)


def _counted(
    records: Iterator[tuple[str, Any]], manifest: BackupManifest, progress: ProgressCallback
) -> Iterator[tuple[str, Any]]:
    """The records unchanged; reports progress."""
    for number, record in enumerate(records):
        yield record
        if number % 2000 == 0:
            progress(number, manifest.records)
