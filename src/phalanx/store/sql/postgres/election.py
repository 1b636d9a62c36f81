"""The Election port on PostgreSQL: each operation is one statement, on its own connection, which is reopened after an error.

A broken connection (network failure, stopped server) is closed after SILENCE_MS; the kernel's default takes minutes. If a call hangs anyway,
the head leads no longer than its lease: another thread checks that by the clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from phalanx.core.errors import Conflict
from phalanx.core.hints import Hint, HintCode
from phalanx.failpoints import around
from phalanx.ports.election import ElectionUnavailable, HeadRecord, Leader
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import check_applied, migrations
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import Connection, close, connect
from phalanx.store.sql.postgres.errors import to_store_error
from phalanx.store.sql.postgres.upgrade import applied, migrate
from phalanx.store.sql.queries import POSTGRES, queries

SILENCE_MS: Final = 2000  # TCP timeout: shorter than a leader's lease
ANSWER_MS: Final = 1500  # timeout of one statement on one row
LOCK_MS: Final = 300  # a leader that holds the row longer without renewing was suspended during a commit
_SESSION: Final = "phalanx-head"


class PostgresElection:
    """One head's access to the election; `head_id`: its incarnation.

    Raises:
        BadRequest: invalid DSN.
    """

    def __init__(self, dsn: str, *, head_id: str) -> None:
        self._address = _address(dsn, session=f"{_SESSION}-election")
        self._head_id = head_id
        self._connection: Connection | None = None
        self._texts = queries(POSTGRES.name, "election.sql")

    def prepare(self) -> None:
        """Upgrade the database's schema; each head does this at its start.

        Raises:
            ElectionUnavailable: the database does not answer.
            StoreUnusable: the database cannot be used.
            Conflict: a head of an older release leads, which does not support the new schema.
        """
        known = migrations(POSTGRES.name)
        connection = None
        try:
            connection = connect(self._address)
            have = applied(connection)
            check_applied(have, known)
            if 0 < len(have) < len(known):
                with around("election.prepare.leads"):
                    leading = connection.execute(self._texts["leads_now"].encode()).fetchall()
                if leading:
                    raise Conflict(
                        f"the head at {leading[0][0]} leads with schema version {len(have)}; this release needs version {len(known)}",
                        hint=Hint(HintCode.STOP_OLDER_HEADS),
                    )
            migrate(connection, known)
        except (psycopg.Error, OSError) as error:
            found = to_store_error(error, self._address, reading=True)
            if isinstance(found, StoreRefused):
                raise ElectionUnavailable(found.message, hint=found.hint) from None
            raise found from None
        finally:
            if connection is not None:
                close(connection)

    def read_leader(self) -> Leader:
        """Read the leader's row."""
        term, beat, holder, url, lease_s, grants_s, since_s, renewed_s, long_s = self._rows("look")[0]
        return Leader(
            term=term,
            beat=beat,
            holder=holder,
            url=url,
            lease_s=lease_s,
            grants_s=grants_s,
            since_s=since_s,
            renewed_s=renewed_s,
            long_leases_left_s=long_s,
        )

    def claim(self, seen: Leader, mine: HeadRecord, *, lease_s: float, grants_s: float) -> int | None:
        """Take over; return the new term, or None if the row has changed since `seen`.

        If a head that was suspended during a commit still holds the row, its sessions are ended, and the next attempt succeeds.
        """
        values = {
            "term": seen.term,
            "beat": seen.beat,
            "holder": mine.head_id,
            "url": mine.url,
            "lease_s": lease_s,
            "grants_s": grants_s,
        }
        try:
            found = self._rows("claim", values)
        except _RowLocked:
            self._rows("end_sessions", {"session": session_of(seen.holder)})
            return None
        return int(found[0][0]) if found else None

    def renew(self, term: int) -> bool:
        """Renew the leader's lease; False if another head has taken over."""
        return bool(self._rows("renew", {"term": term, "holder": self._head_id}))

    def release(self, term: int) -> None:
        """Release the term at once."""
        self._rows("release", {"term": term, "holder": self._head_id})

    def grant_long(self, term: int, lease_s: float) -> None:
        """Record that supervisors may hold leases of this length.

        Raises:
            ElectionUnavailable: it was not recorded, so none may be granted.
        """
        if not self._rows("grant_long", {"term": term, "holder": self._head_id, "lease_s": lease_s}):
            raise ElectionUnavailable(f"another head has taken over from term {term}", hint=Hint(HintCode.LIST_HEADS))

    def register(self, mine: HeadRecord) -> None:
        """Register this head."""
        self._rows(
            "say",
            {
                "name": mine.name,
                "head_id": mine.head_id,
                "url": mine.url,
                "version": mine.version,
                "user": mine.user,
                "token_sha256": mine.token_sha256,
                "started_s": mine.started_s,
            },
        )

    def unregister(self, name: str) -> None:
        """Remove this head's registration."""
        self._rows("leave", {"name": name, "head_id": self._head_id})

    def heads(self) -> list[HeadRecord]:
        """All heads that registered within a week, by name."""
        return [
            HeadRecord(
                name=name,
                head_id=head_id,
                url=url,
                version=version,
                user=user,
                token_sha256=sha256,
                started_s=started_s,
                seen_ago_s=ago_s,
            )
            for name, head_id, url, version, user, sha256, started_s, ago_s in self._rows("heads")
        ]

    def share(self, secrets: Mapping[str, str]) -> dict[str, str]:
        """Offer secrets by name; return the cluster's, which are the first ones offered."""
        for name, value in sorted(secrets.items()):
            self._rows("offer", {"name": name, "value": value})
        return {str(name): str(value) for name, value in self._rows("shared")}

    def replace_shared(self, name: str, value: str) -> None:
        """Replace a shared secret."""
        self._rows("replace", {"name": name, "value": value})

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            close(connection)

    def _rows(self, name: str, values: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows.

        Raises:
            ElectionUnavailable: the database did not answer, or refused.
        """
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._address)
                with around("election.open.patience"):
                    self._connection.execute(self._texts["patience"].encode(), (f"{ANSWER_MS}", f"{LOCK_MS}"))
            with around("election.say.statement"):
                cursor = self._connection.execute(self._texts[name].encode(), values)
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.errors.LockNotAvailable as error:
            raise _RowLocked("the leader's row is held by another session") from error
        except (psycopg.Error, OSError, StoreUnusable) as error:
            self.close()
            found = error if isinstance(error, StoreUnusable) else to_store_error(error, self._address, reading=True)
            raise ElectionUnavailable(
                found.message, hint=found.hint
            ) from None  # psycopg's message may contain the password


class _RowLocked(ElectionUnavailable):
    """Another session holds the row: a commit of the previous leader."""


def session_of(head_id: str) -> str:
    """Application name of the sessions on which a leading head reads and commits; its successor ends them."""
    return f"{_SESSION}-{head_id}"


def leading_dsn(dsn: str, head_id: str) -> str:
    """The address for the store of a leading head: its sessions have the head's name."""
    return _address(dsn, session=session_of(head_id)).conninfo


def _address(dsn: str, *, session: str) -> Address:
    known = Address.parse(dsn)
    return replace(known, conninfo=make_conninfo(known.conninfo, application_name=session, tcp_user_timeout=SILENCE_MS))
