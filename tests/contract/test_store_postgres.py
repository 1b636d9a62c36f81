"""PostgreSQL as it fails: cut in COMMIT, killed, restarted, taken over. What was acknowledged is there, once; what is not known is said."""

import logging
import random
import threading
import time

import pytest

from benchmarks.cluster import free_port
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId, QueueId, UserId
from phalanx.failpoints import FAILPOINTS, FailureMode, armed
from phalanx.ports.store import Batch, JobFilter, JobOrder, StaleLeader, StoreDiverged, StoreRefused
from phalanx.store.commit_checks import newest_records
from phalanx.store.errors import StoreUnusable
from phalanx.store.sql import reading
from phalanx.store.sql.queries import POSTGRES
from phalanx.store.sql.writing import statements
from tests import postgres_here
from tests.contract.cut_wire import Wire
from tests.contract.records import dump, job, node, submitted

pytestmark = pytest.mark.skipif(bool(postgres_here.why_not()), reason=postgres_here.why_not())
pytest.importorskip("psycopg")

from phalanx.store.sql.postgres import connections as connecting  # noqa: E402  # after the extra is known to be there
from phalanx.store.sql.postgres import store as module  # noqa: E402
from phalanx.store.sql.postgres.store import PostgresStore  # noqa: E402


@pytest.fixture
def dsn():
    made = postgres_here.server().fresh()
    yield made
    postgres_here.server().drop(made)


@pytest.fixture
def store(dsn):
    opened = PostgresStore(dsn)
    yield opened
    opened.close()


@pytest.fixture
def wire(dsn):
    made = Wire(dsn)
    yield made
    made.close()


@pytest.fixture
def wired(wire):
    opened = PostgresStore(wire.dsn)
    yield opened
    opened.close()


def jobs_in(store):
    return len(store.jobs(JobFilter(limit=100_000)))


@pytest.fixture
def at(monkeypatch):
    """Do something at a failpoint, once; a test that never comes there has shown nothing."""
    waiting: list[str] = []

    def arm(name, act):
        waiting.append(name)

        def hit(point):
            if point in waiting:
                waiting.remove(point)
                act()

        monkeypatch.setattr(module, "hit", hit)

    yield arm
    assert waiting == [], "never passed"


# ---- the fence -------------------------------------------------------------------------------------------------------


def test_who_was_taken_over_writes_nothing_more(dsn, store):
    store.commit(submitted(1))
    with_another = PostgresStore(dsn)
    for _ in range(2):
        with pytest.raises(StaleLeader, match=f"term {with_another.term}, this head's is {store.term}"):
            store.commit(submitted(2))
    assert jobs_in(with_another) == 1
    with_another.commit(submitted(2))
    assert jobs_in(store) == 2, "reading needs no term"
    with_another.close()


def test_a_given_term_is_the_one_that_counts(dsn):
    postgres_here.server().execute("UPDATE phalanx.leader SET term = 7", dsn.rpartition("/")[2])
    seventh, sixth = PostgresStore(dsn, term=7), PostgresStore(dsn, term=6)
    seventh.commit(submitted(1))
    with pytest.raises(StaleLeader):
        sixth.commit(submitted(2))
    seventh.commit(submitted(2))
    for opened in (seventh, sixth):
        opened.close()


@pytest.mark.parametrize("sent", [0, 1])
def test_a_leader_frozen_in_the_middle_of_a_commit_holds_up_nobody_for_long(dsn, store, sent):
    """Its transaction holds the row of the term; who takes over ends its session, and what the frozen one sends then is refused."""
    batch = submitted(1)
    rows = newest_records(batch)
    frozen = store._begin(batch, rows)
    if sent:  # half of a pipeline: for the server its statement never ends
        pipeline = frozen.pipeline()
        pipeline.__enter__()
        frozen.execute("UPDATE last_commit SET id = 'half'")
        frozen.pgconn.send_flush_request()
        frozen.pgconn.flush()
    successor = PostgresStore(dsn)
    successor.commit(submitted(1))
    with pytest.raises(StoreRefused):  # raised, or returned where the end of the session is seen at the COMMIT only
        raise store._write(frozen, statements(batch, rows), "its-id") or AssertionError("it was confirmed")
    with pytest.raises(StaleLeader):
        store.commit(submitted(2))
    assert jobs_in(successor) == 1
    successor.close()


def test_the_server_lets_go_of_a_frozen_head_by_itself(dsn, store):
    batch = submitted(1)
    store._begin(batch, newest_records(batch))
    other = connecting.connect(store._address)
    other.execute("UPDATE leader SET renewed_s = 1")  # as an election does, which is patient
    connecting.close(other)


def test_a_takeover_waits_for_the_commit_under_way(dsn, store, at):
    """What was acknowledged before the takeover is seen by who takes over."""
    successors = []
    thread = threading.Thread(target=lambda: successors.append(PostgresStore(dsn)))

    def take_over():
        thread.start()
        thread.join(0.3)
        assert successors == [], "the row of the term is held by the commit"

    at("postgres.commit.commit", take_over)
    store.commit(submitted(1))
    thread.join(30)
    assert list(successors[0].load().jobs) == ["1"]
    successors[0].close()


def test_a_head_that_steps_down_is_let_out_of_its_commit(dsn, wire, wired):
    """The network swallows everything: `abandon` from another thread ends the wait."""
    wire.mute = True
    caught = []

    def commit():
        try:
            wired.commit(submitted(1))
        except StoreRefused as error:
            caught.append(error)

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    wired.abandon("its lease is over")
    thread.join(30)
    assert [type(error) for error in caught] == [StaleLeader]
    with pytest.raises(StaleLeader, match="its lease is over"):
        wired.commit(submitted(1))


def test_a_head_that_steps_down_while_it_connects_commits_nothing(store, monkeypatch):
    store._drop()

    def and_steps_down(address):
        opened = connecting.open_writer(address)
        store.abandon("its lease is over")
        return opened

    monkeypatch.setattr(module, "open_writer", and_steps_down)
    with pytest.raises(StaleLeader, match="its lease is over"):
        store.commit(submitted(1))
    assert jobs_in(store) == 0


# ---- connections that break ------------------------------------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_is_found_to_be_there(wire, wired, at):
    wired.commit(submitted(1))
    at("postgres.commit.commit", lambda: setattr(wire, "deaf", True))
    wired.commit(submitted(2, 3))
    assert not wire.deaf, "no answer was lost"
    wired.commit(submitted(5))
    assert jobs_in(wired) == 5
    assert [told.seq for told in wired.history()] == [1, 2, 3, 4, 5]


def test_a_commit_that_never_reached_the_server_is_refused_and_may_be_repeated(wire, wired, at):
    at("postgres.commit.commit", wire.cut)
    with pytest.raises(StoreRefused, match="nothing was written"):
        wired.commit(submitted(1, 3))
    assert jobs_in(wired) == 0
    wired.commit(submitted(1, 3))
    assert jobs_in(wired) == 3


def test_a_commit_that_is_still_on_its_way_is_waited_for_and_not_written_later(wire, wired, at):
    """The head's side broke; the server holds the open transaction, and COMMIT lies somewhere between them."""

    def half_cut():
        wire.mute = True

    def and_gone(*_):
        wire.cut_clients()

    at("postgres.commit.commit", half_cut)
    timer = threading.Timer(0.2, and_gone)
    timer.start()

    def mend():
        wire.mute = False

    threading.Timer(0.3, mend).start()
    with pytest.raises(StoreRefused):
        wired.commit(submitted(1, 3))
    wire.say()  # what was on its way arrives, at a server that has let go
    wired.commit(submitted(1))
    assert jobs_in(wired) == 1


def test_a_commit_that_broke_while_it_waited_for_a_standby_is_no_commit_before_the_standby_has_it():
    """It can be read then, on the primary alone."""
    with postgres_here.running() as server:
        store = PostgresStore(server.fresh())
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.stop()
        server.start()
        thread = threading.Thread(target=lambda: store.commit(submitted(1)))
        thread.start()
        [first] = waiting_for_a_standby(server)
        server.execute(f"SELECT pg_terminate_backend({first})")
        [second] = waiting_for_a_standby(server, but=first)
        assert thread.is_alive(), "no standby has it"
        assert jobs_in(store) == 1, "it can be read"
        assert second != first
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.execute("SELECT pg_reload_conf()")
        thread.join(30)
        assert not thread.is_alive()
        store.commit(submitted(2))
        assert jobs_in(store) == 2
        store.close()


def waiting_for_a_standby(server, *, but=0):
    """Sessions whose COMMIT waits for one, but for one; after some seconds at the latest."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        found = server.execute(f"SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid <> {but}")
        if found:
            return [row[0] for row in found]
        time.sleep(0.02)
    return []


@pytest.mark.parametrize("there", [True, False])
def test_an_outcome_that_nobody_can_tell_is_said_and_settled_before_the_next_commit(
    wire, wired, monkeypatch, there, at
):
    monkeypatch.setattr(module, "OUTCOME_WAIT_S", 0.3)

    def lose():
        wire.refusing = True
        if there:
            wire.deaf = True
        else:
            wire.cut()

    at("postgres.commit.commit", lose)
    for _ in range(2):
        with pytest.raises(StoreRefused, match="outcome is unknown"):
            wired.commit(submitted(1))
    wire.refusing = False
    if there:
        for _ in range(2):
            with pytest.raises(StoreDiverged, match="is in the database after all"):
                wired.commit(submitted(2))
    else:
        wired.commit(submitted(1))
    assert jobs_in(wired) == 1


def test_who_took_over_meanwhile_makes_an_unknown_outcome_the_end(dsn, wire, wired, monkeypatch, at):
    monkeypatch.setattr(module, "OUTCOME_WAIT_S", 0.3)

    def lose():
        wire.refusing = wire.deaf = True

    at("postgres.commit.commit", lose)
    with pytest.raises(StoreRefused, match="outcome is unknown"):
        wired.commit(submitted(1))
    successor = PostgresStore(dsn)
    successor.commit(submitted(2))
    wire.refusing = False
    with pytest.raises(StaleLeader):
        wired.commit(submitted(1))
    successor.close()


@pytest.mark.parametrize(
    ("name", "failure", "nth"),
    [
        (name, failure, nth)
        for name, failures in FAILPOINTS.items()
        if name.startswith("postgres.commit.")
        for failure in sorted(failures & {FailureMode.ERROR, FailureMode.FULL})
        for nth in ((1, 2, 3) if name == "postgres.commit.rows" else (1,))
    ],
)
def test_a_commit_that_fails_anywhere_is_refused_whole_and_may_be_repeated(store, name, failure, nth):
    store.commit(submitted(1, 3))
    before = dump(store)
    with armed(name, failure, nth), pytest.raises(StoreRefused):
        store.commit(submitted(4, 3))
    assert dump(store) == before
    store.commit(submitted(4, 3))
    assert jobs_in(store) == 6


def test_a_database_that_lost_an_acknowledged_commit_is_written_no_further(dsn, store):
    """As a replica that lagged, and was promoted: it may lack commits that no history line tells of."""
    store.commit(submitted(1))
    server, name = postgres_here.server(), dsn.rpartition("/")[2]
    [(before,)] = server.execute("SELECT id FROM phalanx.last_commit", name)
    store.commit(Batch(records=[node("n7")]))
    server.execute(f"DELETE FROM phalanx.nodes; UPDATE phalanx.last_commit SET id = '{before}'", name)
    for _ in range(2):
        with pytest.raises(StoreDiverged, match="lacks an acknowledged batch"):
            store.commit(submitted(2))
    assert jobs_in(store) == 1
    with_all_of_it = PostgresStore(dsn)
    with_all_of_it.commit(submitted(2))
    with_all_of_it.close()


# ---- the server ------------------------------------------------------------------------------------------------------


def test_a_server_that_restarted_is_met_again_without_a_refusal():
    with postgres_here.running() as server:
        store = PostgresStore(server.fresh())
        store.commit(submitted(1))
        assert jobs_in(store) == 1
        server.stop()
        with pytest.raises(StoreRefused, match="does not answer"):
            store.commit(submitted(2))
        with pytest.raises(StoreRefused, match="does not answer"):
            store.jobs(JobFilter())
        server.start()
        store.commit(submitted(2))
        assert jobs_in(store) == 2
        server.stop()
        server.start()
        assert jobs_in(store) == 2
        store.commit(submitted(3))
        store.close()


def kills(count, seed):
    """Kill all of PostgreSQL at random moments under a stream of commits; nothing acknowledged is lost, nothing refused is there."""
    dice = random.Random(seed)
    with postgres_here.running(fsync=True) as server:
        store = PostgresStore(server.fresh())
        acknowledged, refused, stop, ended = 0, 0, threading.Event(), threading.Event()

        def submit():
            nonlocal acknowledged, refused
            while not stop.is_set():
                size = dice.choice([1, 1, 5, 40])
                try:
                    store.commit(submitted(acknowledged + 1, size))
                    acknowledged += size
                except StoreRefused:
                    refused += 1
                    time.sleep(0.05)
            ended.set()

        thread = threading.Thread(target=submit)
        thread.start()
        for _ in range(count):
            time.sleep(dice.uniform(0.02, 0.5))
            server.kill()
            server.start()
        stop.set()
        thread.join(60)
        assert ended.is_set(), "a commit raised something else, or never returned"
        assert acknowledged > count, "the load never ran"
        # Every batch follows the one acknowledged before: one lost, doubled or refused yet there would break the history's numbers.
        assert jobs_in(store) == acknowledged
        assert [told.seq for told in store.history(limit=10**6)] == list(range(1, acknowledged + 1))
        store.close()
    return acknowledged, refused


def test_kill_9_of_the_server_under_load_loses_nothing_acknowledged():
    kills(3, seed=6)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_forty_kills_of_the_server_lose_nothing_acknowledged():
    acknowledged, refused = kills(40, seed=7)
    print(f"{acknowledged} jobs acknowledged, {refused} commits refused")


def test_commit_means_durable_whatever_the_role_or_the_server_is_set_to(dsn):
    server = postgres_here.server()
    server.execute(f"ALTER DATABASE {dsn.rpartition('/')[2]} SET synchronous_commit = off")
    store = PostgresStore(dsn)
    assert store._writer is not None
    assert store._writer.execute("SHOW synchronous_commit").fetchone() == ("on",)
    store.close()


def test_a_server_that_does_not_sync_is_named_in_the_log(dsn, caplog):
    with caplog.at_level(logging.WARNING, logger="phalanx.store"):
        PostgresStore(dsn).close()
    assert "fsync=off: acknowledged data may be lost" in caplog.text


# ---- what cannot be used ---------------------------------------------------------------------------------------------


def test_a_wrong_password_is_one_line_without_it(dsn):
    wrong = dsn.replace(postgres_here.server().password, "sesame-417")
    with pytest.raises(StoreUnusable, match="password authentication failed") as caught:
        PostgresStore(wrong)
    assert "\n" not in str(caught.value)
    assert "sesame-417" not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda dsn: dsn.rpartition("/")[0] + "/nowhere", 'database "nowhere" does not exist'),
        (lambda dsn: dsn.replace("//phalanx:", "//stranger:"), "authentication failed"),
    ],
)
def test_where_nobody_is_let_in_another_try_does_not_help(dsn, change, says):
    with pytest.raises(StoreUnusable, match=says) as caught:
        PostgresStore(change(dsn))
    assert caught.value.hint


def test_nobody_at_the_port_is_try_later():
    with pytest.raises(StoreRefused, match="does not answer"):
        PostgresStore(f"postgresql://ann:secret-81@127.0.0.1:{free_port()}/phalanx")


@pytest.mark.parametrize(
    "text",
    ["postgresql://u:hush-7@h:port/db", "postgres:hush-7", "host=a password='hush-7' colour=red", "", "nonsense"],
)
def test_what_is_no_address_is_refused_without_its_password(text):
    with pytest.raises((BadRequest, StoreUnusable, StoreRefused)) as caught:
        PostgresStore(text)
    said = f"{caught.value} {caught.value.hint}"
    assert "hush-7" not in said or text == "postgres:hush-7"
    assert "\n" not in said


def test_an_encoding_that_cannot_hold_every_name_is_refused():
    server = postgres_here.server()
    latin = server.empty(ENCODING="'LATIN1'", TEMPLATE="template0")
    with pytest.raises(StoreUnusable, match="has the encoding LATIN1"):
        PostgresStore(latin)
    server.drop(latin)


def test_a_user_without_rights_is_told_which_step_helps():
    server = postgres_here.server()
    database = server.empty()
    server.execute("CREATE ROLE guest LOGIN PASSWORD 'guest-pw'")
    with pytest.raises(StoreUnusable, match="lacks a privilege") as caught:
        PostgresStore(server.dsn(database.rpartition("/")[2], user="guest", password="guest-pw"))
    assert "OWNER TO" in caught.value.hint
    server.drop(database)
    server.execute("DROP ROLE guest")


def test_a_newer_database_and_somebody_elses_schema_are_left_alone(dsn):
    server, name = postgres_here.server(), dsn.rpartition("/")[2]
    server.execute("INSERT INTO phalanx.migrations VALUES (99, '0099_later', 'x', 0)", name)
    with pytest.raises(StoreUnusable, match=r"newer Phalanx: it has migration 99"):
        PostgresStore(dsn)
    theirs = server.empty()
    server.execute("CREATE SCHEMA phalanx; CREATE TABLE phalanx.theirs (x int)", theirs.rpartition("/")[2])
    with pytest.raises(StoreUnusable, match="of another program: theirs"):
        PostgresStore(theirs)
    server.drop(theirs)


def test_tables_of_another_program_in_the_same_database_are_not_in_the_way():
    server = postgres_here.server()
    shared = server.empty()
    server.execute("CREATE TABLE users (x int); CREATE TABLE jobs (x int)", shared.rpartition("/")[2])
    store = PostgresStore(shared)
    store.commit(submitted(1))
    assert jobs_in(store) == 1
    store.close()
    server.drop(shared)


def test_many_heads_that_start_at_once_make_one_schema():
    server = postgres_here.server()
    empty = server.empty()
    stores, errors = [], []

    def start():
        try:
            stores.append(PostgresStore(empty))
        except Exception as error:  # noqa: BLE001  # all are shown
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(store.term for store in stores) == [1, 2, 3, 4, 5], "each had its own turn"
    for store in stores:
        store.close()
    server.drop(empty)


# ---- what it holds ---------------------------------------------------------------------------------------------------


def test_what_text_cannot_hold_is_refused_and_the_store_goes_on(store):
    with pytest.raises(StoreRefused, match="cannot store"):
        store.commit(Batch(records=[job(1, name="a\0b")]))
    noise = random.Random(1)
    long = "".join(chr(noise.randrange(0x4E00, 0x9FFF)) for _ in range(6000))
    with pytest.raises(StoreRefused):
        store.commit(Batch(records=[job(1, name=long)]))
    store.commit(Batch(records=[job(1, name="ünï'; DROP TABLE jobs; --%s")]))
    assert store.job(JobId("1")) == job(1, name="ünï'; DROP TABLE jobs; --%s")


def test_a_document_that_was_edited_is_refused_by_name(dsn, store):
    store.commit(submitted(1, 3))
    postgres_here.server().execute(
        "UPDATE phalanx.jobs SET doc = replace(doc, 'ann', 'eve') WHERE seq = 3", dsn.rpartition("/")[2]
    )
    with pytest.raises(StoreUnusable, match="kind job is damaged"):
        store.job(JobId("3"))
    with pytest.raises(StoreUnusable):
        store.load()
    assert store.job(JobId("2")) == job(2)


def test_more_readers_than_connections_wait_for_each_other(store):
    store.commit(submitted(1, 20))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.extend(jobs_in(store) for _ in range(5))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [20] * 150
    assert len(store._readers._idle) <= connecting.READERS_MAX


def test_no_list_of_jobs_reads_the_whole_table_or_sorts_a_state(dsn, store):
    server, name = postgres_here.server(), dsn.rpartition("/")[2]
    server.execute(
        "INSERT INTO phalanx.jobs SELECT n, n, (ARRAY['pending','succeeded'])[1 + n % 2], 'u' || n % 50, 'p', 'q' || n % 9, 'n' || n % 99,"
        " 0, NULL, 0, 1000 * (n % 9), '', 0 FROM generate_series(1, 20000) n; ANALYZE phalanx.jobs",
        name,
    )
    plans: list[str] = []

    def explain(sql, values=()):
        assert store._writer is not None
        plans.append("\n".join(row[0] for row in store._writer.execute(b"EXPLAIN " + sql.encode(), values)))
        return []

    for wanted in (
        JobFilter(),
        JobFilter(user=UserId("u7")),
        JobFilter(queue=QueueId("q3"), before_seq=900),
        JobFilter(name="n5"),
        JobFilter(ended_since_s=1.0),
    ):
        reading.list_jobs(reading.SqlReader(POSTGRES, explain), wanted)
    assert "jobs_by_end" in plans.pop()
    assert len(plans) == 4
    for plan in plans:
        assert "Seq Scan" not in plan, plan
        assert "Sort  (" not in plan, plan
    plans.clear()
    for wanted in (
        *(JobFilter(order=order) for order in JobOrder),
        JobFilter(order=JobOrder.NAME, ascending=True, after=("n7", 3)),
        JobFilter(order=JobOrder.GPUS, after=(8000, 3)),
        JobFilter(order=JobOrder.USER, user=UserId("u7"), after=("u7", 900)),
    ):
        reading.list_jobs(reading.SqlReader(POSTGRES, explain), wanted)
    for plan in plans:
        assert "Seq Scan" not in plan, plan
        assert "Bitmap" not in plan.partition("InitPlan")[2], (
            plan
        )  # every part is in order: only the page itself is sorted
