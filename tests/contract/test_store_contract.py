"""What every store must do: the same suite for memory, SQLite and PostgreSQL."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from phalanx.core.fleet.custom_failure_rules import OPERATORS
from phalanx.core.fleet.documents import CALIBRATION_ID
from phalanx.core.ids import Epoch, JobId, NodeId, ProjectId, QueueId, ReservationId, UserId
from phalanx.core.state.records import (
    ATTEMPT_USES,
    ATTEMPTS,
    CALIBRATIONS,
    FAILURE_RULES,
    IDEMPOTENCY,
    JOBS,
    KIND_OF,
    NODES,
    PROJECTS,
    QUEUE_USAGE,
    QUEUES,
    RECORDS,
    RESERVATIONS,
    TOKENS,
    USERS,
)
from phalanx.core.state.world import WorldChange
from phalanx.core.work.states import AttemptState, JobState
from phalanx.core.work.users import UserRole
from phalanx.ports.store import Batch, JobFilter, JobOrder, StaleEpoch, Store, StoreRefused
from phalanx.store.memory import MemoryStore
from phalanx.store.sql import reading
from phalanx.store.sql.sqlite.store import SqliteStore
from tests import postgres_here
from tests.contract.records import (
    FAILED,
    PENDING,
    RUNNING,
    SUCCEEDED,
    attempt,
    attempt_use,
    calibration,
    dump,
    failure_rules,
    job,
    key,
    line,
    node,
    one_of_each_kind,
    project,
    queue,
    reservation,
    scoped_token,
    spent,
    submitted,
    token,
    user,
)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request, tmp_path):
    with opened(request.param, str(tmp_path)) as store:
        yield store


@contextmanager
def opened(kind: str, folder: str) -> Iterator[Store]:
    """A store of one kind, with nothing in it."""
    match kind:
        case "memory":
            yield MemoryStore()
        case "sqlite":
            with closing(SqliteStore(folder + "/phalanx.db")) as store:
                yield store
        case _:
            if why := postgres_here.why_not():
                pytest.skip(why)
            from phalanx.store.sql.postgres.store import PostgresStore

            dsn = postgres_here.server().fresh()
            with closing(PostgresStore(dsn)) as store:
                yield store
            postgres_here.server().drop(dsn)


def put(store, *records, **more):
    store.commit(Batch(records=records, **more))


def seqs(jobs):
    return [job.seq for job in jobs]


# ---- what is committed is read ---------------------------------------------------------------------------------------


def test_every_kind_of_record_is_stored_loaded_and_removed(store):
    records = {KIND_OF[type(record)]: record for record in one_of_each_kind()}
    assert list(records) == list(RECORDS), "tests.contract.records lacks a kind"
    put(store, *records.values())
    world = store.load()
    for kind, record in records.items():
        assert store.records(kind) == [record]
        assert store.record(kind, kind.key_of(record)) == record
        if kind.table in world.tables:
            assert world.table(kind) == {kind.key_of(record): record}
    removable = [kind for kind in RECORDS if kind not in (JOBS, ATTEMPTS)]
    put(store, removed=[(kind, kind.key_of(records[kind])) for kind in removable])
    assert [store.records(kind) for kind in removable] == [[]] * len(removable)


def test_scope_of_a_token_comes_back(store):
    put(store, user(), scoped_token())
    assert store.tokens() == [scoped_token()]


def test_newest_attempts_of_several_jobs(store):
    put(store, job(1, RUNNING, epoch=1), attempt(1), job(2), job(3, RUNNING, epoch=1), attempt(3))
    put(store, attempt(1, 1, AttemptState.ENDED), job(1, RUNNING, epoch=2), attempt(1, 2))
    asked = [JobId("1"), JobId("2"), JobId("9")]
    assert store.newest_attempts(asked) == {JobId("1"): attempt(1, 2)}
    assert store.newest_attempts([]) == {}


def test_the_last_of_several_states_of_one_record_counts(store):
    put(store, job(1), job(1, RUNNING, epoch=1), attempt(1), job(1, detail="later", state=RUNNING, epoch=1))
    assert store.job(JobId("1")) == job(1, RUNNING, epoch=1, detail="later")


def test_what_is_unknown_is_none_or_empty(store):
    assert store.job(JobId("7")) is None
    assert store.token("0" * 64) is None
    assert store.user(UserId("nobody")) is None
    assert store.attempts(JobId("7")) == []
    assert store.history(job_id=JobId("7")) == []
    assert store.jobs(JobFilter()) == []


def test_an_empty_batch_changes_nothing(store):
    before = dump(store)
    store.commit(Batch())
    assert dump(store) == before


def test_a_removed_node_is_gone_also_when_the_same_batch_put_it(store):
    put(store, node("n0"), node("n1"))
    put(store, node("n1", hostname="again"), removed=[(NODES, NodeId("n1")), (NODES, NodeId("never-there"))])
    assert [held.id for held in store.nodes()] == ["n0"]


def test_a_token_is_found_by_its_hash_also_when_revoked(store):
    put(store, user(), token("t1", sha256="a" * 64))
    put(store, token("t1", sha256="a" * 64, revoked_s=9.0))
    held = store.token("a" * 64)
    assert held is not None
    assert held.revoked_s == 9.0


def test_a_removed_queue_is_gone_with_what_it_had_used(store):
    put(store, queue("a"), queue("b", parent=QueueId("a"), quota_gpus=8, budget_gpu_h=0.5), spent("a"), spent("b"))
    put(
        store,
        spent("b", at_s=1200.0),
        removed=[(kind, QueueId(name)) for kind in (QUEUES, QUEUE_USAGE) for name in ("a", "never-there")],
    )
    assert store.queues() == [queue("b", parent=QueueId("a"), quota_gpus=8, budget_gpu_h=0.5)]
    assert store.records(QUEUE_USAGE) == [spent("b", at_s=1200.0)]
    assert store.load().queue_usage == {"b": spent("b", at_s=1200.0)}


def test_the_last_calibration_is_the_one_that_is_kept_and_loaded(store):
    assert store.record(CALIBRATIONS, CALIBRATION_ID) is None
    put(store, calibration("opal"))
    put(store, calibration("root", profile='{"at":"later"}'))
    assert store.record(CALIBRATIONS, CALIBRATION_ID) == calibration("root", profile='{"at":"later"}')
    assert list(store.load().table(CALIBRATIONS).values()) == [calibration("root", profile='{"at":"later"}')]


def test_failure_rules_are_a_record_of_their_own_beside_the_profile(store):
    assert store.record(FAILURE_RULES, OPERATORS) is None
    put(store, calibration(), failure_rules())
    put(store, failure_rules("root", rules='[{"name":"later"}]'))
    assert store.record(FAILURE_RULES, OPERATORS) == failure_rules("root", rules='[{"name":"later"}]')
    world = store.load()
    assert list(world.table(FAILURE_RULES).values()) == [failure_rules("root", rules='[{"name":"later"}]')]
    assert list(world.table(CALIBRATIONS).values()) == [calibration()]


def test_an_ended_reservation_is_found_by_name_and_neither_listed_nor_loaded(store):
    put(store, reservation("b"), reservation("a"), reservation("c"))
    put(store, reservation("b", ended=True))
    assert store.reservations() == [reservation("a"), reservation("c")]
    assert store.record(RESERVATIONS, ReservationId("b")) == reservation("b", ended=True)
    assert store.record(RESERVATIONS, ReservationId("never")) is None
    assert list(store.load().reservations) == ["a", "c"]
    put(store, reservation("b"))
    assert list(store.load().reservations) == ["a", "b", "c"], "a name is free again once its reservation ended"


def test_tokens_are_listed_oldest_first(store):
    put(store, token("b", created_s=2.0), token("a", created_s=2.0), token("z", created_s=1.0))
    assert [held.id for held in store.tokens()] == ["z", "a", "b"]


def test_attempts_are_listed_by_epoch_as_a_number(store):
    put(
        store,
        job(1, RUNNING, epoch=11),
        *(attempt(1, epoch, AttemptState.ENDED) for epoch in range(10, 0, -1)),
        attempt(1, 11),
    )
    assert [held.epoch for held in store.attempts(JobId("1"))] == list(range(1, 12))


# ---- lists of jobs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def many(store):
    put(
        store,
        *(
            job(
                seq,
                [PENDING, RUNNING, SUCCEEDED, FAILED][seq % 4],
                user="ann" if seq % 3 else "bob",
                queue="q" if seq % 2 else "r",
                project="p" if seq % 5 else "o",
                name="a" if seq % 7 else "b",
            )
            for seq in range(1, 41)
        ),
    )
    return store


def test_jobs_are_listed_newest_first_and_paged(many):
    assert seqs(many.jobs(JobFilter(limit=3))) == [40, 39, 38]
    assert seqs(many.jobs(JobFilter(limit=3, before_seq=38))) == [37, 36, 35]
    assert seqs(many.jobs(JobFilter(before_seq=1))) == []
    assert many.jobs(JobFilter(limit=0)) == []


def test_jobs_are_sorted_over_all_pages_by_every_order_under_every_filter(many):
    put(many, replace(job(41, name="c", user="zoe"), queue=QueueId("r")), job(42, FAILED, name="B"))
    filters = (
        JobFilter(),
        JobFilter(states=frozenset({PENDING, FAILED})),
        JobFilter(user=UserId("ann")),
        JobFilter(queue=QueueId("r"), name="a"),
        JobFilter(ended_since_s=2010.0),
    )
    for wanted, order, ascending in itertools.product(filters, JobOrder, (False, True)):
        every = sorted(many.jobs(replace(wanted, limit=1000)), key=order.key_of, reverse=not ascending)
        paged, after = [], None
        while page := many.jobs(replace(wanted, order=order, ascending=ascending, limit=17, after=after)):
            paged += page
            after = order.key_of(page[-1])
        assert paged == every, (wanted, order, ascending)


def labelled(seq, state, **labels):
    one = job(seq, state)
    return replace(
        one, spec=replace(one.spec, labels=tuple(labels.items())), project=ProjectId("p" if seq % 2 else "o")
    )


@pytest.mark.parametrize("few", [5000, 0])
def test_jobs_are_found_by_their_labels_whether_a_state_has_few_jobs_or_many(store, few, monkeypatch):
    monkeypatch.setattr(reading, "_FEW", few)
    states = [PENDING, RUNNING, SUCCEEDED, FAILED]
    put(store, *(labelled(seq, states[seq % 4], exp=str(seq % 3), note="x'\"") for seq in range(1, 25)), job(25))
    put(store, *(replace(one, progress_step=9) for one in store.jobs(JobFilter(limit=4))))  # changed again
    seven = (("exp", "1"),)
    cases = {
        JobFilter(labels=seven): lambda seq: seq % 3 == 1,
        JobFilter(labels=(("exp", None),)): lambda seq: True,
        JobFilter(labels=(("exp", "1"), ("note", "x'\""))): lambda seq: seq % 3 == 1,
        JobFilter(labels=(("exp", "1"), ("note", "y"))): lambda seq: False,
        JobFilter(labels=(("nothing", None),)): lambda seq: False,
        JobFilter(labels=seven, states=frozenset({FAILED, RUNNING})): lambda seq: seq % 3 == 1 and seq % 4 in (1, 3),
        JobFilter(labels=seven, before_seq=16): lambda seq: seq % 3 == 1 and seq < 16,
        JobFilter(labels=seven, visible_to=(UserId("x"), frozenset({ProjectId("o")}))): lambda seq: seq % 6 == 4,
        JobFilter(labels=seven, visible_to=(UserId("x"), frozenset())): lambda seq: False,
    }
    for wanted, matches in cases.items():
        assert seqs(store.jobs(wanted)) == [seq for seq in range(24, 0, -1) if matches(seq)], wanted
        paged, after = [], None
        while page := store.jobs(replace(wanted, order=JobOrder.NAME, ascending=True, limit=3, after=after)):
            paged += seqs(page)
            after = JobOrder.NAME.key_of(page[-1])
        assert sorted(paged) == [seq for seq in range(1, 25) if matches(seq)], wanted


def test_labels_leave_with_archived_jobs_and_their_values_can_be_summed_by(store):
    put(store, *(replace(labelled(seq, SUCCEEDED, exp=str(seq)), ended_s=float(seq)) for seq in range(1, 5)), job(5))
    everyone = {"ended_since_s": 2.0, "visible_to": None}
    assert store.label_values("exp", **everyone) == {"2": "2", "3": "3", "4": "4"}
    assert store.label_values("note", **everyone) == {}
    of_o = (UserId("x"), frozenset({ProjectId("o")}))
    assert store.label_values("exp", ended_since_s=0.0, visible_to=of_o) == {"2": "2", "4": "4"}
    store.commit(Batch(archived=[JobId("3")]))
    assert store.label_values("exp", **everyone) == {"2": "2", "4": "4"}
    assert seqs(store.jobs(JobFilter(labels=(("exp", None),)))) == [4, 2, 1]


def test_jobs_are_found_by_their_end_whenever_they_were_submitted(store):
    put(
        store,
        replace(job(1, FAILED), ended_s=100.0),
        replace(job(2, SUCCEEDED), ended_s=50.0),
        job(3, RUNNING),
        replace(job(4, SUCCEEDED), ended_s=99.0),
    )
    assert seqs(store.jobs(JobFilter(ended_since_s=99.0))) == [4, 1]
    assert seqs(store.jobs(JobFilter(ended_since_s=99.0, states=frozenset({FAILED})))) == [1]
    assert seqs(store.jobs(JobFilter(ended_since_s=0.0, limit=2))) == [4, 2]
    assert seqs(store.jobs(JobFilter(ended_since_s=0.0, limit=2, before_seq=2))) == [1]
    assert seqs(store.jobs(JobFilter(ended_since_s=101.0))) == []


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        (JobFilter(states=frozenset({PENDING})), lambda seq: seq % 4 == 0),
        (JobFilter(states=frozenset({SUCCEEDED, FAILED})), lambda seq: seq % 4 in (2, 3)),
        (JobFilter(user=UserId("bob")), lambda seq: seq % 3 == 0),
        (JobFilter(name="b"), lambda seq: seq % 7 == 0),
        (JobFilter(project=ProjectId("o"), queue=QueueId("q")), lambda seq: seq % 5 == 0 and seq % 2 == 1),
        (
            JobFilter(user=UserId("ann"), states=frozenset({PENDING, RUNNING}), before_seq=30),
            lambda seq: seq % 3 and seq % 4 in (0, 1) and seq < 30,
        ),
        (JobFilter(user=UserId("x' OR '1'='1")), lambda seq: False),
    ],
)
def test_jobs_are_filtered(many, wanted, matches):
    assert seqs(many.jobs(wanted)) == [seq for seq in range(40, 0, -1) if matches(seq)]


def test_counts_name_every_state(many):
    assert many.job_counts() == {**dict.fromkeys(JobState, 0), PENDING: 10, RUNNING: 10, SUCCEEDED: 10, FAILED: 10}


def test_states_by_submit_number_are_in_order_and_end_where_the_jobs_do(many):
    everything = many.states(1, 1000)
    assert len(everything) == sum(many.job_counts().values())
    assert everything == [(job.id, job.state) for job in reversed(many.jobs(JobFilter(limit=1000)))]
    assert many.states(3, 4) == everything[2:6]
    assert many.states(3, 0) == []
    assert many.states(10_000, 5) == []
    assert many.states(3, 2**63) == everything[2:]


# ---- the history -------------------------------------------------------------------------------------------------------


def test_the_history_is_read_by_job_by_node_and_whole(store):
    put(store, job(1), job(2), history=[line(1, 1), line(2, 2), line(3, node_id="n0"), line(4, 1, "n0")])
    assert store.history() == [line(1, 1), line(2, 2), line(3, node_id="n0"), line(4, 1, "n0")]
    assert [told.seq for told in store.history(job_id=JobId("1"))] == [1, 4]
    assert [told.seq for told in store.history(node_id=NodeId("n0"))] == [3, 4]
    assert [told.seq for told in store.history(job_id=JobId("1"), node_id=NodeId("n0"))] == [4]
    assert [told.seq for told in store.history(after=1, limit=2)] == [2, 3]


@pytest.mark.parametrize("wrong", [[line(3)], [line(1)], [line(2), line(4)], [line(3), line(2)]])
def test_a_history_with_a_hole_or_a_repetition_is_refused(store, wrong):
    put(store, history=[line(1)])
    with pytest.raises(StoreRefused, match="does not follow"):
        put(store, node(), history=wrong)
    assert store.history() == [line(1)]
    assert store.nodes() == []


# ---- fences ----------------------------------------------------------------------------------------------------------


def test_a_batch_of_an_old_epoch_is_refused_whole(store):
    put(store, job(1, RUNNING, epoch=2), attempt(1, 2))
    before = dump(store)
    with pytest.raises(StaleEpoch, match="epoch 1 is stale, the store is at epoch 2"):
        put(store, job(2), attempt(1, 1, AttemptState.ENDED), epochs={JobId("1"): Epoch(1)}, history=[line(1)])
    assert dump(store) == before


def test_the_present_epoch_and_the_next_are_taken(store):
    put(store, job(1, RUNNING, epoch=1), attempt(1, 1), epochs={JobId("1"): Epoch(1)})
    put(
        store, attempt(1, 1, AttemptState.ENDED), job(1, RUNNING, epoch=2), attempt(1, 2), epochs={JobId("1"): Epoch(2)}
    )
    put(store, epochs={JobId("1"): Epoch(2)})
    assert store.load().attempts == {JobId("1"): attempt(1, 2)}


def test_an_epoch_never_goes_back(store):
    put(store, job(1, epoch=2))
    with pytest.raises(StaleEpoch):
        put(store, job(1, epoch=1))


def test_a_job_has_one_live_attempt(store):
    put(store, job(1, RUNNING, epoch=1), attempt(1, 1))
    with pytest.raises(StoreRefused, match="2 live attempts"):
        put(store, job(1, RUNNING, epoch=2), attempt(1, 2))
    with pytest.raises(StoreRefused, match="2 live attempts"):
        put(store, job(2, RUNNING, epoch=2), attempt(2, 1), attempt(2, 2))


def test_the_end_of_one_attempt_and_the_next_may_come_in_any_order(store):
    put(store, job(1, RUNNING, epoch=1), attempt(1, 1))
    put(store, job(1, RUNNING, epoch=2), attempt(1, 2), attempt(1, 1, AttemptState.ENDED))
    assert store.load().attempts == {JobId("1"): attempt(1, 2)}


def test_an_end_is_for_good(store):
    put(store, job(1, SUCCEEDED))
    put(store, job(1, SUCCEEDED, exit_code=0))
    for other in (PENDING, RUNNING, FAILED):
        with pytest.raises(StoreRefused, match="has ended"):
            put(store, job(1, other))


def test_orphans_are_refused(store):
    with pytest.raises(StoreRefused, match="the job does not exist"):
        put(store, attempt(1))
    with pytest.raises(StoreRefused, match="does not exist"):
        put(store, key(1))


def test_an_archived_job_leaves_with_all_that_is_its_own_and_nothing_else(store):
    store.commit(Batch(records=[*one_of_each_kind(), job(2, SUCCEEDED), job(3, SUCCEEDED)]))
    store.commit(
        Batch(
            records=[
                attempt(2, 1, AttemptState.ENDED),
                key(2),
                attempt(3, 1, AttemptState.ENDED),
                attempt_use(2),
                attempt_use(3),
            ]
        )
    )
    store.commit(Batch(history=[line(1, 2, "n0"), line(2, 3, "n0"), line(3, None, "n0"), line(4, 2, None)]))
    store.commit(Batch(history=[line(5)], archived=[JobId("2")]))
    assert (store.job(JobId("2")), store.attempts(JobId("2"))) == (None, [])
    assert [one.seq for one in store.history()] == [2, 3, 5]
    assert store.record(ATTEMPT_USES, (JobId("2"), Epoch(1))) is None
    assert store.job(JobId("3")) is not None
    assert store.record(ATTEMPT_USES, (JobId("3"), Epoch(1))) is not None
    assert store.load().next_history_seq == 6


@pytest.mark.parametrize("state", [PENDING, RUNNING])
def test_only_ended_jobs_are_archived(store, state):
    store.commit(Batch(records=[*one_of_each_kind(), job(2, state)]))
    for wrong in ("2", "99"):
        with pytest.raises(StoreRefused, match="cannot be archived"):
            store.commit(Batch(archived=[JobId(wrong)]))
    assert store.job(JobId("2")) is not None


def test_a_submit_number_is_given_once(store):
    put(store, job(1))
    with pytest.raises(StoreRefused):
        put(store, replace(job(1), id=JobId("2")))
    with pytest.raises(StoreRefused):
        put(store, replace(job(5), id=JobId("1")))
    assert seqs(store.jobs(JobFilter())) == [1]


def test_two_tokens_never_share_a_hash(store):
    put(store, token("t1", sha256="a" * 64))
    with pytest.raises(StoreRefused):
        put(store, token("t2", sha256="a" * 64))
    assert [held.id for held in store.tokens()] == ["t1"]


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_a_world_is_loaded_with_its_indexes(store):
    put(store, node("n0"), node("n1"), queue(), user(), project(), token())
    put(
        store,
        job(1, RUNNING, epoch=2),
        attempt(1, 1, AttemptState.ENDED),
        attempt(1, 2, node="n1", devices=(2, 3)),
        job(2),
        key(2),
    )
    put(store, job(3, SUCCEEDED), history=[line(1), line(2)])
    world = store.load()
    assert list(world.jobs) == ["1", "2", "3"]
    assert list(world.pending) == ["2"]
    assert world.attempts == {JobId("1"): attempt(1, 2, node="n1", devices=(2, 3))}
    assert world.usage[NodeId("n1")].devices == {2, 3}
    assert world.usage[NodeId("n1")].host.cpus == 4
    assert world.snapshot(0.0).usage_of(NodeId("n0")).host.cpus == 0
    assert world.attempts_on(NodeId("n1")) == [attempt(1, 2, node="n1", devices=(2, 3))]
    assert list(world.table(IDEMPOTENCY)) == [("ann", "key-2")]
    assert (world.next_job_seq, world.next_history_seq) == (4, 3)
    assert set(world.nodes) == {"n0", "n1"}
    assert (set(world.queues), set(world.table(USERS)), set(world.table(PROJECTS)), set(world.table(TOKENS))) == (
        {"default"},
        {"ann"},
        {"vision"},
        {"t1"},
    )


def test_an_empty_store_loads_an_empty_world(store):
    world = store.load()
    assert (world.next_job_seq, world.next_history_seq, world.jobs) == (1, 1, {})


def test_of_ended_jobs_the_newest_thousand_are_loaded(store):
    put(store, *(job(seq, SUCCEEDED if seq % 2 else FAILED) for seq in range(2, 1203)), job(1))
    world = store.load()
    assert list(world.jobs) == ["1", *(str(seq) for seq in range(203, 1203))]
    assert world.next_job_seq == 1203


def test_a_loaded_world_goes_on_where_the_store_stands(store):
    store.commit(submitted(1, 2))
    world = store.load()
    change = WorldChange(world=world)
    seq = change.new_job_seq()
    change.put(job(seq))
    change.add_history(line(0, seq))
    store.commit(Batch(records=change.records, history=change.history, epochs=change.epochs))
    assert seq == 3
    assert dump(store)["world"].jobs == world.jobs


# ---- what the API hangs on -------------------------------------------------------------------------------------------


def test_access_version_grows_with_users_tokens_and_projects_alone(store):
    seen = [store.access_version]
    for records in ([user()], [token()], [project()], [node(), queue(), job(1)], [user(role=UserRole.ADMIN)]):
        put(store, *records)
        seen.append(store.access_version)
    assert [after - before for before, after in itertools.pairwise(seen)] == [1, 1, 1, 0, 1]


def test_a_refused_batch_leaves_the_access_version(store):
    with pytest.raises(StoreRefused):
        put(store, user(), history=[line(7)])
    assert store.access_version == 0
    assert store.users() == []


def test_readers_in_many_threads_see_whole_batches_while_the_writer_commits(store):
    stop = threading.Event()
    torn: list[str] = []

    def read():
        while not stop.is_set():
            jobs = store.jobs(JobFilter(limit=1000))
            if len(jobs) % 5 or seqs(jobs) != list(range(len(jobs), 0, -1)):
                torn.append(str(seqs(jobs)))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for first in range(1, 101, 5):
        store.commit(submitted(first, 5))
    stop.set()
    for reader in readers:
        reader.join()
    assert torn == []
    assert len(store.jobs(JobFilter(limit=1000))) == 100


def test_a_record_that_json_cannot_hold_is_refused_and_nothing_of_its_batch_is_there(tmp_path):
    store = SqliteStore(str(tmp_path / "phalanx.db"))
    with pytest.raises(StoreRefused, match="cannot be written"):
        put(store, job(1), job(2, detail="\ud800"))
    assert store.jobs(JobFilter()) == []
    store.close()


def test_a_closed_store_refuses_and_closes_twice(store):
    store.close()
    store.close()
    with pytest.raises(StoreRefused, match="closed"):
        put(store, job(1))
