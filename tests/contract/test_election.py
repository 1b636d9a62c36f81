"""The election's verbs on a real PostgreSQL: what one head writes, another reads; and what a head that was stopped still holds."""

import time
from collections.abc import Iterator

import psycopg
import pytest

from benchmarks.cluster import free_port
from phalanx.core.errors import Conflict
from phalanx.core.ids import UserId
from phalanx.core.work.users import User, UserRole
from phalanx.ports.election import ElectionUnavailable, HeadRecord, Leader
from phalanx.ports.store import Batch, StaleLeader
from phalanx.store.sql.queries import queries
from tests import postgres_here

pytestmark = pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here")
if not postgres_here.why_not():
    from phalanx.store.sql.postgres.election import PostgresElection, leading_dsn
    from phalanx.store.sql.postgres.store import PostgresStore


@pytest.fixture
def dsn() -> Iterator[str]:
    made = postgres_here.server().empty()  # a database that was opened once has had a leader
    voice(made, "a").prepare()
    yield made
    postgres_here.server().drop(made)


def head(name: str) -> HeadRecord:
    return HeadRecord(
        name=name, head_id=f"id-{name}", url=f"http://{name}:1", version="1", user="ada", token_sha256="f" * 64
    )


def voice(dsn: str, name: str) -> "PostgresElection":
    return PostgresElection(dsn, head_id=f"id-{name}")


def claimed(election: "PostgresElection", name: str) -> int | None:
    return election.claim(election.read_leader(), head(name), lease_s=3.0, grants_s=9.0)


def users(name: str) -> Batch:
    return Batch(records=[User(id=UserId(name), role=UserRole.USER, created_s=1.0)])


def test_of_two_that_saw_the_same_one_leads(dsn):
    a, b = voice(dsn, "a"), voice(dsn, "b")
    seen_by_a, seen_by_b = a.read_leader(), b.read_leader()
    assert a.claim(seen_by_a, head("a"), lease_s=3.0, grants_s=9.0) == 1
    assert b.claim(seen_by_b, head("b"), lease_s=3.0, grants_s=9.0) is None
    row = b.read_leader()
    assert (row.term, row.holder, row.url, row.lease_s, row.grants_s) == (1, "id-a", "http://a:1", 3.0, 9.0)


def test_renewal_between_look_and_claim_keeps_the_leader(dsn):
    a, b = voice(dsn, "a"), voice(dsn, "b")
    claimed(a, "a")
    seen = b.read_leader()
    assert a.renew(1)
    assert b.claim(seen, head("b"), lease_s=3.0, grants_s=9.0) is None


def test_who_was_followed_renews_and_releases_nothing(dsn):
    a, b = voice(dsn, "a"), voice(dsn, "b")
    claimed(a, "a")
    assert claimed(b, "b") == 2
    assert not a.renew(1)
    a.release(1)
    assert b.read_leader().holder == "id-b"
    with pytest.raises(ElectionUnavailable):
        a.grant_long(1, 600.0)


def test_release_frees_the_term_and_keeps_where_the_last_one_was(dsn):
    a = voice(dsn, "a")
    claimed(a, "a")
    before = a.read_leader()
    a.release(1)
    after = a.read_leader()
    assert (after.term, after.holder, after.url) == (1, "", "http://a:1")
    assert after.beat > before.beat


def test_long_leases_are_told_to_the_successor(dsn):
    a = voice(dsn, "a")
    claimed(a, "a")
    a.grant_long(1, 600.0)
    assert 500.0 < voice(dsn, "b").read_leader().long_leases_left_s <= 600.0


def test_longer_leases_of_the_leader_before_the_last_are_still_told(dsn):
    a, b, c = voice(dsn, "a"), voice(dsn, "b"), voice(dsn, "c")
    assert a.claim(a.read_leader(), head("a"), lease_s=3.0, grants_s=30.0) == 1
    a.release(1)
    assert claimed(b, "b") == 2
    assert 20.0 < c.read_leader().long_leases_left_s <= 30.0


def test_shorter_long_leases_do_not_hide_longer_ones(dsn):
    a = voice(dsn, "a")
    claimed(a, "a")
    a.grant_long(1, 600.0)
    a.grant_long(1, 60.0)
    assert 500.0 < a.read_leader().long_leases_left_s <= 600.0


def test_commit_of_a_leader_that_was_followed_is_refused(dsn):
    a, b = voice(dsn, "a"), voice(dsn, "b")
    claimed(a, "a")
    old = PostgresStore(leading_dsn(dsn, "id-a"), term=1)
    old.commit(users("ada"))
    assert claimed(b, "b") == 2
    with pytest.raises(StaleLeader):
        old.commit(users("eve"))
    new = PostgresStore(leading_dsn(dsn, "id-b"), term=2)
    assert [user.id for user in new.users()] == ["ada"]
    for store in (old, new):
        store.close()


def test_leader_stopped_inside_a_commit_does_not_keep_the_row(dsn):
    """Its session still holds the fence; the successor ends it, and the commit that it was in never happens."""
    a, b = voice(dsn, "a"), voice(dsn, "b")
    claimed(a, "a")
    with psycopg.connect(leading_dsn(dsn, "id-a")) as stopped:
        stopped.execute("SET search_path = phalanx; SET idle_in_transaction_session_timeout = 0")
        stopped.execute("SELECT term FROM leader FOR KEY SHARE")
        end_s, term = time.monotonic() + 60.0, None
        while term is None and time.monotonic() < end_s:
            term = claimed(b, "b")
        assert term == 2
        with pytest.raises(psycopg.OperationalError):
            stopped.execute("SELECT 1")


def test_leader_renews_and_promises_while_its_commit_takes_long_and_nobody_takes_over_meanwhile(dsn):
    """Found by reading: the commit of ten thousand jobs held the row against its own head's renewals, until the lease was over."""
    a, b = voice(dsn, "a"), voice(dsn, "b")
    claimed(a, "a")
    begin = queries("postgres", "reads.sql")["begin_commit"]
    with psycopg.connect(dsn, autocommit=True) as long:  # under no head's name: nobody's to end
        long.execute("SET search_path = phalanx; SET idle_in_transaction_session_timeout = 0")
        long.execute(begin.encode())
        assert a.renew(1)
        a.grant_long(1, 60.0)
        assert claimed(b, "b") is None
        with psycopg.connect(dsn, autocommit=True) as restore:
            restore.execute("SET search_path = phalanx; SET lock_timeout = 100")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                restore.execute(queries("postgres", "writes.sql")["take_term"].encode())
        assert a.renew(1)
        long.execute("COMMIT")
    assert claimed(b, "b") == 2


def test_heads_are_listed_until_they_leave_and_only_by_themselves(dsn):
    a, b = voice(dsn, "a"), voice(dsn, "b")
    a.register(head("a"))
    b.register(head("b"))
    assert [(one.name, one.head_id, one.user) for one in a.heads()] == [("a", "id-a", "ada"), ("b", "id-b", "ada")]
    b.unregister("a")
    b.unregister("b")
    assert [one.name for one in a.heads()] == ["a"]


def test_first_offer_of_a_secret_counts_for_all(dsn):
    assert voice(dsn, "a").share({"node_secret": "aa", "tls/ca.pem": ""}) == {"node_secret": "aa", "tls/ca.pem": ""}
    assert voice(dsn, "b").share({"node_secret": "bb"})["node_secret"] == "aa"
    voice(dsn, "b").replace_shared("node_secret", "cc")
    assert voice(dsn, "a").share({})["node_secret"] == "cc"


def test_database_that_does_not_answer_is_said_in_one_line_without_the_password():
    away = voice(f"postgresql://ada:secret@127.0.0.1:{free_port()}/x", "a")
    for ask in (away.read_leader, away.prepare):
        with pytest.raises(ElectionUnavailable) as refused:
            ask()
        assert "\n" not in refused.value.message
        assert "secret" not in f"{refused.value.message}{refused.value.hint}"


def test_newer_schema_is_not_made_under_a_leader_that_would_not_know_it(dsn, monkeypatch):
    from phalanx.store.sql import migrations as numbered
    from phalanx.store.sql.postgres import election as module

    claimed(voice(dsn, "a"), "a")
    today = numbered.migrations("postgres")
    later = numbered.Migration(len(today) + 1, f"{len(today) + 1:04d}_later", "CREATE TABLE later (id text)")
    monkeypatch.setattr(module, "migrations", lambda _: (*today, later))
    with pytest.raises(Conflict, match="leads with schema"):
        voice(dsn, "b").prepare()
    voice(dsn, "a").release(1)
    voice(dsn, "b").prepare()


def test_row_before_anybody_led_is_free(dsn):
    assert voice(dsn, "a").read_leader() == Leader(term=0, beat=0)
