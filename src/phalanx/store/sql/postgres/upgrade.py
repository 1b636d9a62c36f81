"""Upgrades a database to the schema of this release. If several heads start at once, one upgrades and the others wait."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import psycopg

from phalanx.failpoints import around, hit
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import Migration, check_applied

SCHEMA: Final = "phalanx"  # a schema of its own, to avoid conflicts with tables of other programs in the same database
_log = logging.getLogger("phalanx.store")
_LOCK: Final = 0x50484C58  # "PHLX"; held by the transaction
_WAIT_MS: Final = 60_000  # for another head's upgrade
_LEDGER: Final = """
CREATE TABLE IF NOT EXISTS migrations (number bigint PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL, applied_s bigint NOT NULL)
"""
_REMEMBER: Final = (
    "INSERT INTO migrations (number, name, sha256, applied_s) VALUES (%s, %s, %s, extract(epoch FROM now())::bigint)"
)


def migrate(connection: psycopg.Connection[Any], known: tuple[Migration, ...]) -> int:
    """Apply the missing migrations, each in its own transaction; return their number.

    Raises:
        StoreUnusable: the database is of a newer release, has other migrations, or its schema belongs to another program.
        psycopg.Error: the database failed; the failed migration is rolled back.
    """
    if len(applied(connection)) == len(known):  # the usual case takes no lock
        check_applied(applied(connection), known)
        return 0
    count = 0
    while _next(connection, known, keep=not count):
        count += 1
    return count


def applied(connection: psycopg.Connection[Any]) -> list[tuple[int, str, str]]:
    """The applied migrations: (number, name, sha256).

    Raises:
        StoreUnusable: the schema contains tables of another program.
    """
    tables = {str(row[0]) for row in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'phalanx'")}
    if not tables:
        return []
    if "migrations" not in tables:
        raise StoreUnusable(
            f"schema {SCHEMA} of the database contains tables of another program: {', '.join(sorted(tables)[:3])}",
            hint="give Phalanx a database of its own",
        )
    return [tuple(row) for row in connection.execute("SELECT number, name, sha256 FROM migrations ORDER BY number")]


def _next(connection: psycopg.Connection[Any], known: tuple[Migration, ...], *, keep: bool) -> bool:
    """Apply one migration; return whether there was one. `keep`: copy the present tables first, in the same transaction."""
    connection.execute("BEGIN")
    try:
        connection.execute(
            "SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', '0', true)", (str(_WAIT_MS),)
        )
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        have = applied(connection)
        check_applied(have, known)
        if len(have) == len(known):
            hit("postgres.migrate.nothing")
            connection.execute("ROLLBACK")
            return False
        migration = known[len(have)]
        if have and keep:
            _keep(connection, migration.number, len(known))
        if not have:
            hit("postgres.migrate.schema")
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}".encode())
        hit("postgres.migrate.ledger")
        connection.execute(_LEDGER)
        hit("postgres.migrate.statements")
        connection.execute(migration.sql.encode())
        hit("postgres.migrate.record")
        connection.execute(_REMEMBER, (migration.number, migration.name, migration.sha256))
        hit("postgres.migrate.commit")
        connection.execute("COMMIT")
    except BaseException:
        if not connection.broken:
            hit("postgres.migrate.rollback")
            connection.execute("ROLLBACK")
        raise
    hit("postgres.migrate.done")
    return True


def _keep(connection: psycopg.Connection[Any], number: int, newest: int) -> None:
    """Copy all tables to a separate schema."""
    kept = f"{SCHEMA}_before_{number}_{time.strftime('%Y%m%d_%H%M%S')}"
    with around("upgrade.schema"):
        connection.execute(f"CREATE SCHEMA {kept}".encode())
    for (table,) in connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'phalanx' ORDER BY tablename"
    ).fetchall():
        with around("upgrade.table"):
            connection.execute(f"CREATE TABLE {kept}.{table} AS TABLE {SCHEMA}.{table}".encode())
    _log.warning(
        "upgrading the database from migration %d to %d; a copy of the old one is in schema %s",
        number - 1,
        newest,
        kept,
    )
