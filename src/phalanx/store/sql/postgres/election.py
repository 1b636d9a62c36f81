"""The election's verbs on PostgreSQL: each one statement, on a connection of its own that is made anew whenever it broke.

A connection that no longer leads anywhere (a cut cable, a stopped server) is given up within SILENCE_MS: the kernel's own patience is
minutes. Who hangs all the same leads no longer than its lease: that is watched on another thread, by the clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from phalanx.core.errors import Conflict
from phalanx.failpoints import around
from phalanx.ports.election import HeadRecord, Leader, NoElection
from phalanx.ports.store import StoreRefused
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql.migrations import compare, migrations
from phalanx.store.sql.postgres.address import Address
from phalanx.store.sql.postgres.connections import Connection, connect, shut
from phalanx.store.sql.postgres.refusals import refusal
from phalanx.store.sql.postgres.upgrade import applied, migrate
from phalanx.store.sql.queries import POSTGRES, queries

SILENCE_MS: Final = 2000  # of a peer that answers nothing at all: shorter than a leader's lease
ANSWER_MS: Final = 1500  # of one statement on one row
LOCK_MS: Final = 300  # a leader that does not renew and still holds the row was stopped inside a commit
_SESSION: Final = "phalanx-head"
_HEADS_SINCE: Final = 3  # the migration that made what `leads_now` asks


class PostgresElection:
    """One head's voice in the election; `head_id` is this life of it.

    Raises:
        BadRequest: the DSN is none.
    """

    def __init__(self, dsn: str, *, head_id: str) -> None:
        self._address = _address(dsn, session=f"{_SESSION}-election")
        self._head_id = head_id
        self._connection: Connection | None = None
        self._texts = queries(POSTGRES.name, "election.sql")

    def prepare(self) -> None:
        """Bring the database up to today's schema, as each head does at its start.

        Raises:
            NoElection: it does not answer.
            StoreUnusable: it cannot be used as it is.
            Conflict: a head of an older release leads, which would not know the new schema.
        """
        known = migrations(POSTGRES.name)
        connection = None
        try:
            connection = connect(self._address)
            have = applied(connection)
            compare(have, known)
            if _HEADS_SINCE <= len(have) < len(known):
                with around("election.prepare.leads"):
                    leading = connection.execute(self._texts["leads_now"].encode()).fetchall()
                if leading:
                    raise Conflict(
                        f"the head at {leading[0][0]} leads with schema {len(have)} of the database; this release makes it {len(known)}",
                        hint="phalanx down on the heads of the older release first; jobs run on meanwhile (docs/high-availability.md)",
                    )
            migrate(connection, known)
        except (psycopg.Error, OSError) as error:
            found = refusal(error, self._address, reading=True)
            if isinstance(found, StoreRefused):
                raise NoElection(found.message, hint=found.hint) from None
            raise found from None
        finally:
            if connection is not None:
                shut(connection)

    def look(self) -> Leader:
        """The row as it is now."""
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
        """Take over from what was seen: the new term, or None where anything moved since.

        A head that was stopped inside a commit still holds the row: its sessions are ended, and the next try goes through.
        """
        words = {
            "term": seen.term,
            "beat": seen.beat,
            "holder": mine.head_id,
            "url": mine.url,
            "lease_s": lease_s,
            "grants_s": grants_s,
        }
        try:
            found = self._rows("claim", words)
        except _Held:
            self._rows("end_sessions", {"session": session_of(seen.holder)})
            return None
        return int(found[0][0]) if found else None

    def renew(self, term: int) -> bool:
        """Say that we live; False where the term has passed to another."""
        return bool(self._rows("renew", {"term": term, "holder": self._head_id}))

    def release(self, term: int) -> None:
        """Give it up at once."""
        self._rows("release", {"term": term, "holder": self._head_id})

    def grant_long(self, term: int, lease_s: float) -> None:
        """Write down that supervisors may hold leases of this length.

        Raises:
            NoElection: it is not written down, so none may be granted.
        """
        if not self._rows("grant_long", {"term": term, "holder": self._head_id, "lease_s": lease_s}):
            raise NoElection(f"term {term} has passed to another head", hint="phalanx heads names the one that leads")

    def say(self, mine: HeadRecord) -> None:
        """Put our own row among the heads."""
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

    def leave(self, name: str) -> None:
        """Take it out again."""
        self._rows("leave", {"name": name, "head_id": self._head_id})

    def heads(self) -> list[HeadRecord]:
        """All heads that were seen within a week, by name."""
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
        """Offer secrets by name; those that count, which are the first that were ever offered."""
        for name, value in sorted(secrets.items()):
            self._rows("offer", {"name": name, "value": value})
        return {str(name): str(value) for name, value in self._rows("shared")}

    def replace_shared(self, name: str, value: str) -> None:
        """Let another value count from now on."""
        self._rows("replace", {"name": name, "value": value})

    def close(self) -> None:
        """Let go of the database; harmless twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            shut(connection)

    def _rows(self, name: str, words: Mapping[str, object] | None = None) -> list[tuple[Any, ...]]:
        """What one statement gives.

        Raises:
            NoElection: the database did not answer, or refused.
        """
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._address)
                with around("election.open.patience"):
                    self._connection.execute(self._texts["patience"].encode(), (f"{ANSWER_MS}", f"{LOCK_MS}"))
            with around("election.say.statement"):
                cursor = self._connection.execute(self._texts[name].encode(), words)
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.errors.LockNotAvailable as error:
            raise _Held("the leader's row is held by another session") from error
        except (psycopg.Error, OSError, StoreUnusable) as error:
            self.close()
            found = error if isinstance(error, StoreUnusable) else refusal(error, self._address, reading=True)
            raise NoElection(found.message, hint=found.hint) from None  # psycopg's own words may hold the password


class _Held(NoElection):
    """Another session holds the row: a commit of the leader before."""


def session_of(head_id: str) -> str:
    """By which name the sessions go that a leading head reads and commits on; a successor ends them."""
    return f"{_SESSION}-{head_id}"


def leading_dsn(dsn: str, head_id: str) -> str:
    """The address for the store of a head that leads: its sessions carry its name."""
    return _address(dsn, session=session_of(head_id)).conninfo


def _address(dsn: str, *, session: str) -> Address:
    known = Address.parse(dsn)
    return replace(known, conninfo=make_conninfo(known.conninfo, application_name=session, tcp_user_timeout=SILENCE_MS))
