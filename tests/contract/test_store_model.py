"""SQLite and PostgreSQL against memory: whatever batches come, sound or not, all answer alike, also after the database was opened anew."""

import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phalanx.core.ids import Epoch, JobId, NodeId, UserId
from phalanx.core.state.records import NODES
from phalanx.core.work.states import AttemptState, JobState
from phalanx.ports.store import Batch, JobFilter, JobOrder, StoreRefused
from phalanx.store.memory import MemoryStore
from phalanx.store.sql.sqlite.store import SqliteStore
from tests import postgres_here
from tests.contract.records import (
    attempt,
    calibration,
    dump,
    job,
    key,
    line,
    node,
    project,
    queue,
    reservation,
    spent,
    token,
    user,
)
from tests.effort import examples

pytestmark = pytest.mark.timeout(600)  # three stores, told and asked all of it 800 times
SEQS = st.integers(1, 6)  # few, so that records meet
EPOCHS = st.integers(0, 3)
NAMES = st.sampled_from(["ann", "bob", "ünï", "x'--"])
JOBS = st.builds(
    lambda seq, state, epoch, owner, name: job(seq, state, epoch=epoch, user=owner, name=name),
    SEQS,
    st.sampled_from(JobState),
    EPOCHS,
    NAMES,
    st.sampled_from(["a", "b"]),
)
ATTEMPTS = st.builds(
    lambda seq, epoch, state, place: attempt(seq, epoch, state, node=place),
    SEQS,
    st.integers(1, 3),
    st.sampled_from([AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED]),
    st.sampled_from(["n0", "n1"]),
)
OTHERS = st.one_of(
    st.builds(lambda name, host: node(name, hostname=host), st.sampled_from(["n0", "n1", "n10", "n2"]), NAMES),
    st.builds(queue, NAMES),
    st.builds(project, NAMES),
    st.builds(lambda name, ended: reservation(name, ended=ended), NAMES, st.booleans()),
    st.builds(spent, NAMES),
    st.builds(calibration, NAMES),
    st.builds(user, NAMES),
    st.builds(token, st.sampled_from(["t1", "t2"]), NAMES),
    st.builds(key, SEQS, NAMES, st.sampled_from(["k1", "k2"])),
)
RECORDS = st.lists(st.one_of(JOBS, JOBS, ATTEMPTS, OTHERS), max_size=8)


class Stores(RuleBasedStateMachine):
    """Stores that are told the same. Where PostgreSQL is not here there are two."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="phalanx-model-")
        self.memory = MemoryStore()
        self.sqlite = SqliteStore(self.folder + "/phalanx.db")
        self.databases: list[Any] = [self.sqlite]
        self.dsn = "" if postgres_here.why_not() else postgres_here.server().fresh()
        if self.dsn:
            self.databases.append(self.postgres())
        self.lines = 0

    def postgres(self):
        from phalanx.store.sql.postgres.store import PostgresStore

        return PostgresStore(self.dsn)

    def commit(self, batch):
        answers: list[object] = []
        for store in (self.memory, *self.databases):
            try:
                store.commit(batch)
                answers.append("taken")
            except StoreRefused as error:
                answers.append((type(error), error.message))
        assert all(answer == answers[0] for answer in answers)
        if answers[0] == "taken":
            self.lines += len(batch.history)

    @initialize()
    def people(self):
        self.commit(Batch(records=[user(), queue(), project()]))

    @rule(
        records=RECORDS,
        lines=st.integers(0, 3),
        skip=st.sampled_from([0, 0, 0, 0, 1]),
        epochs=st.dictionaries(SEQS, EPOCHS, max_size=2),
    )
    def any_batch(self, records, lines, skip, epochs):
        history = [line(self.lines + skip + n + 1, (n + lines) % 4, "n0" if n % 2 else None) for n in range(lines)]
        self.commit(
            Batch(
                records=records,
                history=history,
                epochs={JobId(str(seq)): Epoch(epoch) for seq, epoch in epochs.items()},
            )
        )

    @rule(seq=SEQS)
    def run_again(self, seq):
        held = self.memory.job(JobId(str(seq)))
        if held is not None and not held.state.terminal:
            epoch = held.epoch + 1
            ends = [attempt(seq, past.epoch, AttemptState.ENDED) for past in self.memory.attempts(held.id)]
            self.commit(
                Batch(
                    records=[*ends, job(seq, JobState.RUNNING, epoch=epoch), attempt(seq, epoch)],
                    epochs={held.id: Epoch(epoch)},
                )
            )

    @rule(names=st.sets(st.sampled_from(["n0", "n1", "n10", "never"])))
    def remove_nodes(self, names):
        self.commit(Batch(removed=[(NODES, NodeId(name)) for name in sorted(names)]))

    @rule()
    def open_anew(self):
        for database in self.databases:
            database.close()
        self.sqlite = SqliteStore(self.folder + "/phalanx.db")
        self.databases = [self.sqlite, self.postgres()] if self.dsn else [self.sqlite]

    @rule(
        states=st.sets(st.sampled_from(JobState)),
        owner=st.none() | NAMES,
        name=st.sampled_from([None, "a"]),
        before=st.none() | SEQS,
        limit=st.integers(-1, 4),
        order=st.sampled_from(JobOrder),
        ascending=st.booleans(),
        after=st.none() | SEQS,
    )
    def list_jobs(self, states, owner, name, before, limit, order, ascending, after):
        key = self.memory.job(JobId(str(after))) if after else None
        wanted = JobFilter(
            states=frozenset(states),
            user=None if owner is None else UserId(owner),
            name=name,
            before_seq=before,
            limit=limit,
            order=order,
            ascending=ascending,
            after=None if key is None else order.key_of(key),
        )
        for database in self.databases:
            assert database.jobs(wanted) == self.memory.jobs(wanted)

    @rule(seq=st.none() | SEQS, place=st.sampled_from([None, "n0"]), after=st.integers(-1, 9), limit=st.integers(-1, 5))
    def read_the_history(self, seq, place, after, limit):
        about = {"job_id": JobId(str(seq)) if seq else None, "node_id": place, "after": after, "limit": limit}
        for database in self.databases:
            assert database.history(**about) == self.memory.history(**about)

    @invariant()
    def same_content(self):
        for database in self.databases:
            assert dump(database) == dump(self.memory)

    def teardown(self):
        assert self.sqlite.check_integrity() == []
        for database in self.databases:
            database.close()
        if self.dsn:
            postgres_here.server().drop(self.dsn)
        shutil.rmtree(self.folder)


TestStoresAgree = Stores.TestCase
TestStoresAgree.settings = settings(max_examples=examples(40), stateful_step_count=20, deadline=None)
