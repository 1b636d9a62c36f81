"""Kill -9 of the real head at every place where it writes, before and after; nothing acknowledged is lost, nothing runs twice, nothing is orphaned.

The cases come from `phalanx.failpoints.FAILPOINTS`: a new point is killed here without a line of test, and one that no life reaches fails.
`make test` takes a few of them (`tests/shards.py`); all of them are in `make prove`.
"""

import pytest

from benchmarks.cluster import free_port
from tests.crash.homes import Home, arming, killed_under_load, killed_while_young, ways

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]
# Passed where a head makes its home: each gets a fresh one. All others are passed by one that serves, or stops.
FRESH = (
    "store.open.",
    "history.open.",
    "store.migrate.",
    "home.",
    "tls.",
    "private.",
    "local.spawn.",
    "logs.open.",
    "blobs.open.",
    "kept.open.",
)
LISTENS = "tls."  # of a head that listens off 127.0.0.1
# Not of a head: each with its reason.
NOT_PASSED = {
    "renewals.process": "only of a crowded head; tests/e2e/test_renewal_process.py kills either process",
    "history.aside.rename": "only of a damaged file; tests/contract/test_store_crash.py kills a process there",
    "history.put.rows": "once a minute, and this load is shorter; tests/contract/test_store_crash.py kills a process there",
    "history.put.commit": "the same",
    "history.drop.rows": "only of chunks that are days old; tests/contract/test_store_crash.py kills a process there",
    "history.keep.rows": "only of curves past their number; tests/contract/test_store_crash.py kills a process there",
    "logs.delete.remove": "only of jobs that ended long ago; tests/contract/test_store_crash.py kills a process there",
    "archives.month.directory": "only of jobs that ended long ago; tests/contract/test_api_archives.py stops a run there",
    "outputs.delete.remove": "only of jobs that ended long ago; tests/contract/test_api_retention.py stops a removal there",
    "outputs.delete_owners.remove": "the same",
    "blobs.unused.remove": "only of uploads that are days old; tests/contract/test_store_crash.py kills a process there",
    "blobs.used.touch": "of an upload that is there already; tests/contract/test_store_crash.py kills a process there",
}
# Passed by other programs than a head on SQLite that serves on its own nodes. A head on PostgreSQL is killed in test_kill_points_postgres.py, one
# that brings Ray in test_kill_points_ray.py, an upgrade in tests/contract/test_store_upgrade.py, backup and restore in test_backups.py.
OTHERS = ("postgres.", "upgrade.", "backup.", "restore.", "ray.", "election.", "files.")


def fresh(name):
    return name.startswith(FRESH) and not name.startswith(OTHERS)


def serving(name):
    return not name.startswith((*FRESH, *OTHERS)) and name not in NOT_PASSED


@pytest.fixture(scope="module")
def homes():
    """The home that the cases share; a case that fails leaves a fresh one to the next."""
    held = [Home.make()]
    held[0].recover()
    yield held
    held[0].close()


@pytest.mark.parametrize(("name", "failure", "nth"), ways(serving))
def test_a_serving_head_is_killed(homes, name, failure, nth):
    killed_under_load(homes, Home.make, arming(name, failure, nth), name=name)


@pytest.mark.parametrize(("name", "failure", "nth"), ways(fresh))
def test_a_head_is_killed_while_it_makes_its_home(name, failure, nth):
    words = ("--listen", f"127.0.0.2:{free_port()}") if name.startswith(LISTENS) else ()
    killed_while_young(Home.make(virtual="1x1", words=words), arming(name, failure, nth), name=name)
