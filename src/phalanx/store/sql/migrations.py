"""Numbered migrations: each file is applied once, in a transaction of its own, and remembered with its checksum.

A database of an older release is brought up to date; one of a newer release is left alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

import apsw

from phalanx.store.errors import StoreUnusable
from phalanx.store.failpoints import hit

APPLICATION_ID: Final = 0x50484C58  # "PHLX", in the header of the file: what `file` and a wrong path are told by
_MARK: Final = f"PRAGMA application_id = {APPLICATION_ID}"
_LEDGER: Final = """
CREATE TABLE IF NOT EXISTS migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, applied_s INTEGER NOT NULL
) STRICT;
INSERT INTO migrations (number, name, sha256, applied_s) VALUES (?, ?, ?, unixepoch());
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: `0001_initial.sql` is number 1."""

    number: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        """Of its text; a migration that was released is never edited."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """All migrations of a dialect, numbered 1, 2, 3 ... without holes.

    Raises:
        ValueError: a number is missing or stands twice.
    """
    folder = files("phalanx.store.sql").joinpath(dialect, "migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    found = tuple(
        Migration(int(name[:4]), name.removesuffix(".sql"), folder.joinpath(name).read_text(encoding="utf-8"))
        for name in names
    )
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"{dialect}: migrations are not numbered 1 to {len(found)}: {', '.join(names)}")
    return found


def migrate(connection: apsw.Connection, known: tuple[Migration, ...]) -> int:
    """Apply what the database does not have yet; the count applied.

    Raises:
        StoreUnusable: it is not ours, of a newer release, or was made by migrations other than ours.
        apsw.Error: the disk; the database is as it was before the migration that failed.
    """
    applied = _applied(connection)
    _compare(applied, known)
    for migration in known[len(applied) :]:
        _apply(connection, migration)
    return len(known) - len(applied)


def _applied(connection: apsw.Connection) -> list[tuple[int, str, str]]:
    tables = {str(row[0]) for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not tables:
        return []
    if connection.pragma("application_id") != APPLICATION_ID or "migrations" not in tables:
        raise StoreUnusable(
            "the file is a SQLite database, but not one of Phalanx", hint="point PHALANX_HOME at another folder"
        )
    rows = connection.execute("SELECT number, name, sha256 FROM migrations ORDER BY number").fetchall()
    return [(int(str(number)), str(name), str(sha256)) for number, name, sha256 in rows]


def _compare(applied: list[tuple[int, str, str]], known: tuple[Migration, ...]) -> None:
    if len(applied) > len(known):
        number, name, _ = applied[-1]
        raise StoreUnusable(
            f"the database was written by a newer Phalanx: it has migration {number} ({name}), this release knows {len(known)}",
            hint="install that release again, or restore the copy made before the upgrade",
        )
    for (number, name, sha256), migration in zip(applied, known, strict=False):
        if number != migration.number or sha256 != migration.sha256:
            raise StoreUnusable(
                f"migration {number} ({name}) of the database is not this release's {migration.name}",
                hint="the database was made by a development build; restore a copy made by a release",
            )


def _apply(connection: apsw.Connection, migration: Migration) -> None:
    hit("store.migrate.begin")
    connection.execute("BEGIN IMMEDIATE")
    try:
        hit("store.migrate.statements")
        connection.execute(migration.sql)
        hit("store.migrate.record")
        connection.execute(_MARK)
        hit("store.migrate.ledger")
        connection.execute(_LEDGER, (migration.number, migration.name, migration.sha256))
        hit("store.migrate.commit")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            hit("store.migrate.rollback")
            connection.execute("ROLLBACK")
        raise
    hit("store.migrate.done")
