"""A backup written into a PostgreSQL database, in one transaction; what was there is kept in a schema of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import psycopg

from phalanx.core.errors import Conflict
from phalanx.failpoints import around
from phalanx.ports.store import StoreRefused
from phalanx.store.lost_numbers import RESTORES, TERMS, Restore, with_restore, with_term
from phalanx.store.sql.kinds import BY_WORD
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import Connection, connect, open_writer, shut
from phalanx.store.sql.postgres.refusals import refusal
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.writing import lots

TABLES: Final = (
    "users",
    "projects",
    "tokens",
    "queues",
    "spent",
    "reservations",
    "calibrations",
    "failure_rules",
    "nodes",
    "jobs",
    "attempts",
    "idempotency",
    "story",
    "audit",
)


def fill(dsn: str, records: Iterable[tuple[str, Any]], told: Callable[[int], Restore], *, replace: bool) -> str:
    """Make the database hold these records; the schema in which what was there is kept, empty for none.

    What `told` says of the term that this takes, once all are read, is left there as word to the heads: in whose folders numbers lie that are lost now.
    The term of the leader grows, and its row is held from the beginning: a head that was cut off or starts during all this writes nothing.

    Raises:
        Conflict: heads are connected, or there are records already and they are not to be replaced.
        StoreUnusable, StoreRefused: the database. What was there is there.
    """
    address = Address.parse(dsn)
    _refuse_beside_heads(address)  # one of an older release would not know the schema that comes next
    writer = open_writer(address)
    try:
        writer.execute("BEGIN")
        writer.execute("SELECT set_config('statement_timeout', '0', true)")
        writer.execute(POSTGRES.reads["patience"].encode())
        with around("restore.term"):
            taken = writer.execute(POSTGRES.writes["take_term"].encode()).fetchone()
        aside = _empty(writer, address, replace=replace)
        for word, lot in lots(records):
            with around("restore.put"):
                writer.cursor().executemany(
                    POSTGRES.writes[BY_WORD[word].put].encode(), [BY_WORD[word].row(one) for one in lot]
                )
        _leave_word(writer, told(0 if taken is None else int(taken[0])))
        _commit(writer, address)
        return aside
    except (psycopg.Error, OSError) as error:
        raise refusal(error, address) from None
    finally:
        shut(writer)  # an open transaction is rolled back


def _leave_word(writer: Connection, restore: Restore) -> None:
    found = {str(name): str(value) for name, value in writer.execute(POSTGRES.reads["words"].encode())}
    words = {
        RESTORES: with_restore(found.get(RESTORES, ""), restore),
        TERMS: with_term(found.get(TERMS, ""), restore.term),
    }
    with around("restore.word"):
        writer.cursor().executemany(POSTGRES.writes["put_word"].encode(), list(words.items()))


def _commit(writer: Connection, address: Address) -> None:
    try:
        with around("restore.end"):
            writer.execute("COMMIT")
    except psycopg.OperationalError:
        raise StoreRefused(
            f"the connection to PostgreSQL at {address.shown} broke while it committed, and it does not say whether it did",
            hint="restore again with --replace: either way these records are there afterwards",
        ) from None


def _refuse_beside_heads(address: Address) -> None:
    connection = None
    try:
        connection = connect(address)
        heads = [str(row[0]) for row in connection.execute(POSTGRES.reads["heads_connected"].encode())]
    except (psycopg.Error, OSError) as error:
        raise refusal(error, address) from None
    finally:
        if connection is not None:
            shut(connection)
    if heads:
        raise Conflict(
            f"a head uses the database at {address.shown} ({', '.join(heads[:3])})",
            hint="phalanx down on every head first",
        )


def _empty(writer: Connection, address: Address, *, replace: bool) -> str:
    """Copy what is there into a schema of its own, and take it away."""
    found = [int(row[1]) for row in writer.execute(POSTGRES.reads["counts"].encode())]
    if not any(found):
        return ""
    if not replace:
        raise Conflict(
            f"the database at {address.shown} holds {sum(found)} records already", hint="--replace puts them aside"
        )
    aside = f"phalanx_before_restore_{time.strftime('%Y%m%d_%H%M%S')}_{time.time_ns() // 1000 % 1_000_000:06d}"
    with around("restore.schema"):
        writer.execute(f"CREATE SCHEMA {aside}".encode())
    for table in TABLES:
        with around("restore.copy"):
            writer.execute(f"CREATE TABLE {aside}.{table} AS TABLE {table}".encode())
    with around("restore.truncate"):
        writer.execute(f"TRUNCATE {', '.join(TABLES)}".encode())
    return aside
