"""What an error of PostgreSQL or of the way to it means to whoever asked, in one line with the next step."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.postgres.address import Address

# A connection that fails carries no SQLSTATE through libpq, only words; these are the server's and libpq's own (English, as lc_messages=C).
_HOPELESS: Final = (
    ("password authentication failed", "is the password right? It is read from the address, PGPASSWORD or ~/.pgpass"),
    ("no password supplied", "put it into ~/.pgpass (mode 0600), or the whole address into a file: --store @FILE"),
    ("no pg_hba.conf entry", "let this machine and user in: pg_hba.conf of the server"),
    ("Peer authentication failed", "the server wants the account of the same name, or a host and a password"),
    ("does not exist", "make it: createuser USER; createdb --encoding UTF8 --owner USER DATABASE"),
    ("session is read-only", "name the primary, or all its hosts with commas: the first that takes writes is used"),
)


def refusal(error: Exception, address: Address, *, reading: bool = False) -> StoreRefused | StoreUnusable:
    """The error to raise for one of psycopg's."""
    said = address.scrub(str(error))
    effect = "" if reading else ": nothing was written"
    match error:
        case errors.DiskFull():
            return StoreRefused(
                f"the disk of PostgreSQL at {address.shown} is full{effect}",
                hint="free some space there; the head goes on by itself",
            )
        case errors.InsufficientPrivilege():
            return StoreUnusable(
                f"PostgreSQL at {address.shown}: the user lacks a right ({said})",
                hint="let the user own the database: ALTER DATABASE name OWNER TO user",
            )
        case errors.ReadOnlySqlTransaction():
            return StoreRefused(
                f"PostgreSQL at {address.shown} takes no writes now ({said})", hint="is it a standby? name the primary"
            )
        case errors.LockNotAvailable() | errors.QueryCanceled():
            return StoreRefused(
                f"PostgreSQL at {address.shown} took too long ({said}){effect}",
                hint="who holds it up: SELECT * FROM pg_stat_activity",
            )
        case errors.DataCorrupted() | errors.IndexCorrupted() | errors.UndefinedTable() | errors.UndefinedColumn():
            return StoreUnusable(
                f"the database at {address.shown} is damaged: {said}", hint="restore it: phalanx restore FILE"
            )
        case errors.IntegrityError():
            return StoreRefused(f"the batch contradicts what is stored ({said}): nothing of it was written")
        case psycopg.DataError() | ValueError():
            return StoreRefused(f"the batch holds what PostgreSQL cannot keep ({said}): nothing of it was written")
        case _:
            return _of_the_way(error, said, effect, address)


def _of_the_way(error: Exception, said: str, effect: str, address: Address) -> StoreRefused | StoreUnusable:
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        for words, hint in _HOPELESS:
            if words in said:
                return StoreUnusable(f"PostgreSQL at {address.shown} lets nobody in: {said}", hint=hint)
        return StoreRefused(
            f"PostgreSQL at {address.shown} does not answer ({said}){effect}",
            hint="is it up? The head goes on by itself once it answers",
        )
    return StoreRefused(
        f"PostgreSQL at {address.shown} failed ({type(error).__name__}: {said}){effect}",
        hint="its own log has the details",
    )
