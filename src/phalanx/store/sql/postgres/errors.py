"""Translates errors of PostgreSQL and of its connections to one-line errors with a hint."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from phalanx.core.hints import Hint, HintCode
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.postgres.address import Address

# libpq reports failed connections without an SQLSTATE, only as text: that of the server or of libpq (English, as with lc_messages=C).
_ACCESS_DENIED: Final = (
    ("password authentication failed", "check the password: it is read from the address, PGPASSWORD or ~/.pgpass"),
    ("no password supplied", Hint(HintCode.GIVE_PASSWORD)),
    ("no pg_hba.conf entry", "allow this machine and user in the server's pg_hba.conf"),
    ("Peer authentication failed", "use the account of the same name, or give a host and a password"),
    ("does not exist", "create it: createuser USER; createdb --encoding UTF8 --owner USER DATABASE"),
    ("session is read-only", "use the primary's address, or all hosts with commas: the first writable one is used"),
)


def to_store_error(error: Exception, address: Address, *, reading: bool = False) -> StoreRefused | StoreUnusable:
    """The error to raise for a psycopg error."""
    text = address.scrub(str(error))
    effect = "" if reading else ": nothing was written"
    match error:
        case errors.DiskFull():
            return StoreRefused(
                f"the disk of PostgreSQL at {address.shown} is full{effect}",
                hint="free some space there; the head then continues by itself",
            )
        case errors.InsufficientPrivilege():
            return StoreUnusable(
                f"PostgreSQL at {address.shown}: the user lacks a privilege ({text})",
                hint="make the user the owner of the database: ALTER DATABASE name OWNER TO user",
            )
        case errors.ReadOnlySqlTransaction():
            return StoreRefused(
                f"PostgreSQL at {address.shown} is read-only now ({text})",
                hint="if it is a standby, use the primary's address",
            )
        case errors.LockNotAvailable() | errors.QueryCanceled():
            return StoreRefused(
                f"PostgreSQL at {address.shown} took too long ({text}){effect}",
                hint="find the blocking session: SELECT * FROM pg_stat_activity",
            )
        case errors.DataCorrupted() | errors.IndexCorrupted() | errors.UndefinedTable() | errors.UndefinedColumn():
            return StoreUnusable(
                f"the database at {address.shown} is damaged: {text}", hint=Hint(HintCode.RESTORE_BACKUP)
            )
        case errors.IntegrityError():
            return StoreRefused(f"the batch conflicts with stored records ({text}): nothing of it was written")
        case psycopg.DataError() | ValueError():
            return StoreRefused(f"PostgreSQL cannot store the batch ({text}): nothing of it was written")
        case _:
            return _connection_error(error, text, effect, address)


def _connection_error(error: Exception, text: str, effect: str, address: Address) -> StoreRefused | StoreUnusable:
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        for words, hint in _ACCESS_DENIED:
            if words in text:
                return StoreUnusable(f"PostgreSQL at {address.shown} denies access: {text}", hint=hint)
        return StoreRefused(
            f"PostgreSQL at {address.shown} does not answer ({text}){effect}",
            hint="check that it is up; the head continues by itself once it answers",
        )
    return StoreRefused(
        f"PostgreSQL at {address.shown} failed ({type(error).__name__}: {text}){effect}",
        hint="see its own log",
    )
