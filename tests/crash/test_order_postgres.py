"""Of a head on PostgreSQL, and of the server that holds its database: what an answer acknowledges was in the server's log, and that log synced,
before the server said COMMIT; and the head heard that before it answered. One trace of both shows it: no call is judged by two clocks.

What a head writes into files is judged in test_order.py: the same code writes it on either database.
"""

import re

import pytest

from benchmarks.cluster import free_port
from tests import postgres_here
from tests.crash.homes import Home
from tests.crash.scene import looked_at, says_something, why_not
from tests.crash.syscalls import out_of_order, written_in
from tests.crash.test_order import DURABLE, WAL

pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not() or "it is here"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "strace is here"),
]
PG_WAL = "/pg_wal/"
COMMITTED = re.compile("C\0\0\0\x0bCOMMIT\0")  # CommandComplete: protocol-message-formats of PostgreSQL's manual
# Of what a head alone keeps in files of its folder, heads that share a database keep these there.
# Pools of virtual nodes are refused there; any other record goes the same way.
IN_DATABASE = [
    *(route for route, where in DURABLE.items() if where == WAL and "/v1/pools/" not in route),
    "POST /v1/join/renew",
    "POST /v1/stop",
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Of the head, and of its database's server."""
    with postgres_here.running(fsync=True, full_page_writes="off") as server:
        home = Home.make(store=server.empty(), words=("--listen", f"127.0.0.2:{free_port()}"))
        try:
            folder = str(tmp_path_factory.mktemp("look"))
            yield looked_at(home, folder, beside=server.processes, folders=(server.data,))
        finally:
            home.close()


@pytest.mark.parametrize("route", IN_DATABASE)
def test_it_is_in_the_servers_log_and_synced_before_the_answer_goes_out(seen, route):
    told = [answer for answer in seen.answered(route) if says_something(answer, route, seen, PG_WAL)]
    assert told, f"nothing was answered by {route}"
    assert [out_of_order(answer, seen.calls, PG_WAL, seen.there) for answer in told] == [""] * len(told)
    assert all(heard_after_sync(answer, seen.calls) for answer in told), "it was answered before the server said COMMIT"


def test_a_trace_without_the_syncs_or_without_what_the_server_said_is_found_out(seen):
    unsynced = [call for call in seen.calls if call.name not in ("fdatasync", "fsync")]
    unsaid = [call for call in seen.calls if not COMMITTED.search(call.text)]
    asked = next(answer for answer in seen.answered("POST /v1/jobs") if answer.marks)
    assert "was synced" in out_of_order(asked, unsynced, PG_WAL, seen.there)
    assert heard_after_sync(asked, seen.calls)
    assert not heard_after_sync(asked, unsynced)
    assert not heard_after_sync(asked, unsaid)


def heard_after_sync(answer, calls):
    """Whether, between the question and the answer, the log was written with each mark, synced, and then COMMIT heard."""
    between = [call for call in calls if call.begun > answer.received and call.ended < answer.sent]
    for mark in answer.marks or ("",):
        first = next((one.last for one in written_in(between, PG_WAL) if one.holds(mark)), None)
        synced = first and next(
            (call for call in between if call.name == "fdatasync" and call.on == first.on and call.begun > first.ended),
            None,
        )
        if not synced or not any(
            call.name in ("recvfrom", "read") and call.ended > synced.ended and COMMITTED.search(call.text)
            for call in between
        ):
            return False
    return True
