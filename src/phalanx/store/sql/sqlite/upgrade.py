"""Upgrades a SQLite file to the schema of this release: each migration once, in its own transaction, recorded in the file."""

from __future__ import annotations

import itertools
import logging
import os
from typing import Final

import apsw

from phalanx.durable_files import create_file, remove_file, rename_path, sync_directory, sync_file
from phalanx.failpoints import around, hit
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import Migration, check_applied

APPLICATION_ID: Final = 0x50484C58  # "PHLX", in the header of the file: identifies a Phalanx database
_log = logging.getLogger("phalanx.store")
_MARK: Final = f"PRAGMA application_id = {APPLICATION_ID}"
_LEDGER: Final = """
CREATE TABLE IF NOT EXISTS migrations (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sha256 TEXT NOT NULL, applied_s INTEGER NOT NULL
) STRICT;
INSERT INTO migrations (number, name, sha256, applied_s) VALUES (?, ?, ?, unixepoch());
"""


def migrate(connection: apsw.Connection, known: tuple[Migration, ...], path: str) -> int:
    """Keep a copy of the database at `path`, apply the missing migrations, and return their number.

    Raises:
        StoreUnusable: the file is not of Phalanx, of a newer release, or has other migrations.
        apsw.Error, OSError: the disk failed; the failed migration is rolled back.
    """
    applied = _applied(connection)
    check_applied(applied, known)
    pending = known[len(applied) :]
    if applied and pending:
        kept = _keep(connection, f"{path}.before-{pending[0].number}")
        _log.warning(
            "upgrading %s from migration %d to %d; a copy of the old one is %s", path, len(applied), len(known), kept
        )
    for migration in pending:
        _apply(connection, migration)
    return len(pending)


def _keep(connection: apsw.Connection, wanted: str) -> str:
    """Copy the database, readable only by the owner; renamed once it is synced."""
    part = wanted + ".part"
    if os.path.exists(part):  # of an interrupted upgrade
        remove_file("upgrade.copy", part)
    os.close(create_file("upgrade.copy", part, os.O_RDWR | os.O_EXCL))  # with mode 0600; SQLite accepts an empty file
    with around("upgrade.copy.write"):
        connection.execute("VACUUM INTO ?", (part,))
    fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file("upgrade.copy", fd)
    finally:
        os.close(fd)
    kept = free_name(wanted)
    rename_path("upgrade.copy", part, kept)
    sync_directory("upgrade.copy", os.path.dirname(kept))
    return kept


def free_name(wanted: str) -> str:
    """The name, or the first of `name-2`, `name-3` ... that is not in use."""
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.exists(name) and not os.path.exists(name + "-wal"))


def _applied(connection: apsw.Connection) -> list[tuple[int, str, str]]:
    tables = {str(row[0]) for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not tables:
        return []
    if connection.pragma("application_id") != APPLICATION_ID or "migrations" not in tables:
        raise StoreUnusable(
            "the file is a SQLite database of another program", hint="set PHALANX_HOME to another folder"
        )
    rows = connection.execute("SELECT number, name, sha256 FROM migrations ORDER BY number").fetchall()
    return [(int(str(number)), str(name), str(sha256)) for number, name, sha256 in rows]


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
            with around("store.migrate.rollback"):
                connection.execute("ROLLBACK")
        raise
    hit("store.migrate.done")
