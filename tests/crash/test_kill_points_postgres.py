"""Kill -9 of a real head on a real PostgreSQL, at every place where it writes there, before and after; and, among long campaigns, at every
place where it writes files, whose order against the database's commit is another one than SQLite's.

The next head over the database is the same folder's: it waits until the killed one's term is over, and leads with the next.
"""

import os
import tempfile

import psycopg
import pytest

from phalanx.failpoints import FAILPOINTS
from phalanx.store.sql.migrations import migrations
from phalanx.store.sql.postgres.upgrade import migrate
from tests import postgres_here
from tests.crash.homes import Home, arming, killed_under_load, killed_while_young, ways
from tests.crash.test_kill_points import serving as writes_files

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here"),
]
OURS = ("postgres.", "election.", "files.")
# Passed where the first head over a database makes what it needs there: each gets an empty one.
FRESH = ("postgres.open.", "postgres.migrate.", "election.prepare.", "election.open.", "files.")
# A head passes the first only where another has taken its term, and would begin anew within a second; the second never, for it is elected and
# brings its term along. It writes history once a minute, and drops chunks that are days old: this load is shorter.
# tests/contract/test_store_crash.py kills processes at all of them.
HISTORY = ("postgres.history.rows", "postgres.history.commit", "postgres.history.drop", "postgres.history.keep")
ELSEWHERE = ("postgres.commit.rollback", "postgres.open.term", *HISTORY)
UPGRADING = ("election.prepare.leads",)  # who leads is only asked before an upgrade
PASSES = (7, 40)  # a head begins with some statements about who leads, and goes on with one a second


def fresh(name):
    return name.startswith(FRESH) and name not in (*ELSEWHERE, *UPGRADING)


def upgrading(name):
    return name in UPGRADING or (name.startswith("postgres.migrate.") and name != "postgres.migrate.schema")


def serving(name):
    return name.startswith(OURS) and not name.startswith(FRESH) and name not in ELSEWHERE


def often(name):
    return name.startswith(("postgres.commit.", "election.say.")) and name not in ELSEWHERE


def beside(name):
    return writes_files(name) and not name.startswith(("store.", "history."))


def make(virtual="2x4", words=()):
    return Home.make(virtual=virtual, words=words, store=postgres_here.server().empty())


@pytest.fixture(scope="module")
def homes():
    held = [make()]
    held[0].recover()
    yield held
    held[0].close()


def test_every_point_of_the_database_is_killed_here():
    assert {name for name in FAILPOINTS if name.startswith(OURS)} - {*ELSEWHERE} == {
        param.values[0] for param in (*ways(serving), *ways(often, PASSES), *ways(fresh), *ways(upgrading))
    }


@pytest.mark.parametrize(("name", "failure", "nth"), ways(serving) + ways(often, PASSES))
def test_a_serving_head_on_postgresql_is_killed(homes, name, failure, nth):
    killed_under_load(homes, make, arming(name, failure, nth), name=name)


@pytest.mark.parametrize(("name", "failure", "nth"), ways(beside))
def test_a_head_on_postgresql_is_killed_where_it_writes_files(homes, name, failure, nth):
    killed_under_load(homes, make, arming(name, failure, nth), name=name)


@pytest.mark.parametrize(("name", "failure", "nth"), ways(fresh))
def test_a_head_is_killed_while_it_makes_its_database(name, failure, nth):
    with tempfile.TemporaryDirectory(prefix="phalanx-files-") as folder:
        words = ("--files", os.path.join(folder, "shared")) if name.startswith("files.") else ()
        killed_while_young(make(virtual="1x1", words=words), arming(name, failure, nth), name=name)


@pytest.mark.parametrize(("name", "failure", "nth"), ways(upgrading))
def test_a_head_is_killed_while_it_upgrades_an_older_database(name, failure, nth):
    home = make(virtual="1x1")
    with psycopg.connect(home.head.store, autocommit=True) as connection:
        assert migrate(connection, migrations("postgres")[:1]) == 1
    killed_while_young(home, arming(name, failure, nth), name=name)
