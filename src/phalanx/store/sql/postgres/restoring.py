"""Restores a backup into a PostgreSQL database, in one transaction; the previous records are kept in a separate schema."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

import psycopg

from phalanx.core.errors import Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.failpoints import around
from phalanx.ports.store import StoreRefused
from phalanx.store.sql.documents import row_of
from phalanx.store.sql.kinds import KIND_BY_NAME, KINDS
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import (
    Connection,
    close,
    connect,
    open_writer,
)
from phalanx.store.sql.postgres.errors import to_store_error
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.writing import grouped

_LEAVING_S: Final = 2.0  # the server may list the connection of a head that has just stopped
TABLES: Final = (*(kind.table for kind in KINDS), "job_labels")


def restore_records(dsn: str, records: Iterable[tuple[str, Any]], *, replace: bool) -> str:
    """Replace the database's records; return the schema that contains the previous ones, empty for none.

    The leader's term is incremented and its row locked from the beginning: a head that was disconnected, or starts meanwhile, cannot write.

    Raises:
        Conflict: heads are connected, or there are records and `replace` is false.
        StoreUnusable, StoreRefused: the database failed; its records are unchanged.
    """
    address = Address.parse(dsn)
    _refuse_connected_heads(address)  # an older release would not support the schema that is created next
    writer = open_writer(address)
    try:
        writer.execute("BEGIN")
        writer.execute("SELECT set_config('statement_timeout', '0', true)")
        writer.execute(POSTGRES.reads["patience"].encode())
        with around("restore.term"):
            writer.execute(POSTGRES.writes["take_term"].encode())
        aside = _empty(writer, address, replace=replace)
        for word, lot in grouped(records):
            with around("restore.put"):
                kind = KIND_BY_NAME[word]
                put = POSTGRES.writes[f"put {kind.table}"].encode()
                writer.cursor().executemany(put, [row_of(kind, one) for one in lot])
        _commit(writer, address)
        return aside
    except (psycopg.Error, OSError) as error:
        raise to_store_error(error, address) from None
    finally:
        close(writer)  # an open transaction is rolled back


def _commit(writer: Connection, address: Address) -> None:
    try:
        with around("restore.end"):
            writer.execute("COMMIT")
    except psycopg.OperationalError:
        raise StoreRefused(
            f"the connection to PostgreSQL at {address.shown} broke during the commit, whose outcome is unknown",
            hint=Hint(HintCode.RESTORE_AGAIN),
        ) from None


def _refuse_connected_heads(address: Address) -> None:
    connection = None
    try:
        connection = connect(address)
        until_s = time.monotonic() + _LEAVING_S
        while True:
            heads = [str(row[0]) for row in connection.execute(POSTGRES.reads["heads_connected"].encode())]
            if not heads or time.monotonic() > until_s:
                break
            time.sleep(0.05)
    except (psycopg.Error, OSError) as error:
        raise to_store_error(error, address) from None
    finally:
        if connection is not None:
            close(connection)
    if heads:
        raise Conflict(
            f"a head uses the database at {address.shown} ({', '.join(heads[:3])})",
            hint=Hint(HintCode.STOP_ALL_HEADS),
        )


def _empty(writer: Connection, address: Address, *, replace: bool) -> str:
    """Copy the present records into a separate schema, and delete them."""
    found = [int(row[1]) for row in writer.execute(POSTGRES.reads["counts"].encode())]
    if not any(found):
        return ""
    if not replace:
        raise Conflict(
            f"the database at {address.shown} already contains {sum(found)} records",
            hint=Hint(HintCode.REPLACE_DATABASE),
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
