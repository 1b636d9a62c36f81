"""Backup and restore of a head's records, whichever database holds them; the way from one to the other too.

A backup holds what the database holds. Files are not in it: logs, outputs, checkpoints, uploaded folders.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx import __version__
from phalanx.core.errors import BadFile, NotFound
from phalanx.store.lost_numbers import Reach, Restore
from phalanx.store.sql import archive
from phalanx.store.sql.archive import FORMAT, VERSION, Manifest, Say, manifest_of, records_of, save
from phalanx.store.sql.dumping import dumped, held, last_job_seq
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.reading import Look


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where records are: `path` of a SQLite file, or `dsn` of a PostgreSQL database."""

    path: str = ""
    dsn: str = ""

    @property
    def database(self) -> str:
        """Of which kind it is."""
        return "postgres" if self.dsn else "sqlite"


def backup(place: Place, path: str, say: Say) -> Manifest:
    """Write all records into a file, as of one moment, whether a head runs or not.

    Raises:
        NotFound: there is no database.
        Conflict: there is such a file.
        StoreUnusable: a record is damaged: then there is no backup.
        StoreRefused: the database or the disk.
    """
    with _looking(place) as look:
        look.rows("begin_look")
        try:
            counts = held(look)
            manifest = Manifest(
                format=FORMAT,
                version=VERSION,
                phalanx=__version__,
                made_s=time.time(),
                database=place.database,
                migration=len(migrations(place.database)),
                counts=counts,
                last_job_seq=last_job_seq(look),
            )
            save(path, manifest, dumped(look), say)
        finally:
            look.rows("end_look")
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore did.

    Attributes:
        aside: where the records that were there are kept; empty for none.
        epochs: the newest of every job that is known now.
    """

    manifest: Manifest
    aside: str
    epochs: dict[str, int]


def restore(path: str, place: Place, say: Say, *, replace: bool) -> Restored:
    """Make the database hold what a backup holds. The backup is read to its end before anything is touched.

    Raises:
        BadFile: the backup is damaged, or of a newer release.
        Conflict: a head runs, or there are records and they are not to be replaced.
        StoreRefused, StoreUnusable: the database; what was there is there.
    """
    manifest = check(path, say)
    epochs: dict[str, int] = {}
    going_on: dict[str, int] = {}
    records = _told(records_of(path), manifest, epochs, going_on, say)
    if place.dsn:
        from phalanx.store.sql.postgres.filling import fill as fill_postgres  # the extra may be missing

        def told(term: int) -> Restore:
            reach = Reach(last_job_seq=manifest.last_job_seq, epochs=going_on)
            return Restore(id=secrets.token_hex(8), reach=reach, term=term)

        aside = fill_postgres(place.dsn, records, told, replace=replace)
    else:
        from phalanx.store.sql.sqlite.filling import fill

        aside = fill(place.path, records, replace=replace)
    return Restored(manifest=manifest, aside=aside, epochs=epochs)


def check(path: str, say: Say) -> Manifest:
    """A backup, read to its end.

    Raises:
        BadFile: it is damaged, or of a newer release.
    """
    manifest = manifest_of(path)
    known = len(migrations(manifest.database)) if manifest.database in ("sqlite", "postgres") else 0
    if manifest.migration > known:
        raise BadFile(
            f"{path} was written by a newer Phalanx ({manifest.phalanx})", hint="restore it with that release"
        )
    return archive.check(path, say)


@contextmanager
def _looking(place: Place) -> Iterator[Look]:
    if place.dsn:
        from phalanx.store.sql.postgres.address import Address
        from phalanx.store.sql.postgres.connections import Readers as PostgresReaders

        with (
            contextlib.closing(PostgresReaders(Address.parse(place.dsn, session="phalanx-backup"))) as readers,
            readers.lend() as look,
        ):
            look.rows("patience")
            yield look
        return
    if not os.path.exists(place.path):
        raise NotFound(f"there is no database: {place.path}", hint="PHALANX_HOME names the folder of a head")
    if not os.path.getsize(place.path):  # not to be opened: beside an empty file SQLite removes the WAL
        raise NotFound(
            f"there is no database: {place.path} is empty", hint="restore one from a copy: phalanx restore FILE"
        )
    from phalanx.store.sql.queries import SQLITE
    from phalanx.store.sql.sqlite.connections import Readers

    with contextlib.closing(Readers(place.path, "")) as lent, lent.lend() as connection:
        yield Look(SQLITE, connection.execute)


def _told(
    records: Iterator[tuple[str, Any]], manifest: Manifest, epochs: dict[str, int], going_on: dict[str, int], say: Say
) -> Iterator[tuple[str, Any]]:
    for number, (word, record) in enumerate(records):
        if word == "job":
            epochs[record.id] = record.epoch
            if not record.state.terminal:
                going_on[record.id] = record.epoch
        yield word, record
        if number % 2000 == 0:
            say(number, manifest.records)
