"""Changes of the world: whatever a step put, undoing it restores the world exactly, and loading what was stored gives it back."""

import copy
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from phalanx.core.fleet.node import NodeState
from phalanx.core.ids import NodeId, ProjectId, QueueId, TokenId, UserId
from phalanx.core.lifecycle.job import place
from phalanx.core.state.history import HistoryLine
from phalanx.core.state.records import Idempotency
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.states import AttemptState, JobState
from phalanx.core.work.users import Token, User, UserRole
from phalanx.ports.store import Batch
from phalanx.store.memory import MemoryStore
from tests.builders import T, allocation, facts, job, make_node, placed

NODES = ("n0", "n1", "n2")


def doings():
    """One thing that a step may do, as a function of a change."""
    number = st.integers(1, 4)
    return st.one_of(
        st.builds(lambda n: lambda change: submit(change, n), number),
        st.builds(
            lambda n, on: lambda change: start(change, n, on),
            number,
            st.sampled_from(("n0:0,1", "n1:2 n2:0", "n2:", "n0:3 n1:3")),
        ),
        st.builds(lambda n, state: lambda change: end(change, n, state), number, st.sampled_from(list(JobState))),
        st.builds(lambda n: lambda change: move_on(change, n), number),
        st.builds(
            lambda name, state: lambda change: change.put(replace(make_node(name), state=state)),
            st.sampled_from(NODES),
            st.sampled_from(list(NodeState)),
        ),
        st.builds(lambda name: lambda change: forget(change, name), st.sampled_from(NODES)),
        st.builds(lambda n: lambda change: change.put(Queue(id=QueueId(f"q{n}"), priority=n)), number),
        st.builds(lambda n: lambda change: change.put(Project(id=ProjectId(f"p{n}"))), number),
        st.builds(lambda n: lambda change: change.put(User(id=UserId(f"u{n}"), role=UserRole.USER)), number),
        st.builds(
            lambda n: (
                lambda change: change.put(Token(id=TokenId(f"t{n}"), user=UserId("u"), sha256=f"{n}", created_s=T))
            ),
            number,
        ),
        st.builds(
            lambda n: lambda change: change.add_history(HistoryLine(seq=0, at_s=T, kind="said", text=str(n))), number
        ),
    )


def submit(change, n):
    seq = change.new_job_seq()
    one = job(str(seq), seq=seq)
    change.put(one)
    change.put(Idempotency(user=one.user, key=f"key{n}", body_sha256="", job_id=one.id, at_s=T))


def nth(world, n):
    jobs = sorted(world.jobs.values(), key=lambda one: one.seq)
    return jobs[n % len(jobs)] if jobs else None


def start(change, n, on):
    one = nth(change.world, n)
    wanted = allocation(on)
    held = any(
        set(grant.devices) & change.world.snapshot(T).usage_of(grant.node_id).devices for grant in wanted.grants
    )  # a device is in one live allocation at most: what the verification before every commit sees to
    if one is not None and one.state is JobState.PENDING and one.id not in change.world.attempts and not held:
        after = place(one, wanted, facts())
        change.put(after.job)
        change.put(after.attempt)


def end(change, n, state):
    one = nth(change.world, n)
    attempt = change.world.attempts.get(one.id) if one is not None else None
    if attempt is not None and state is not JobState.RUNNING:
        change.put(replace(one, state=state))
        change.put(replace(attempt, state=AttemptState.ENDED, ended_s=T))


def move_on(change, n):
    one = nth(change.world, n)
    if one is not None and one.id in change.world.attempts:
        change.put(replace(change.world.attempts[one.id], state=AttemptState.RUNNING, why="on"))


def forget(change, name):
    node = change.world.nodes.get(NodeId(name))
    if node is not None and not change.world.attempts_on(node.id):
        change.remove_node(node)


def plain(world: World):
    """Every field but the versions, which only ever grow."""
    fields = set(World.__dataclass_fields__) - {"version", "capacity_version"}
    return {name: copy.deepcopy(getattr(world, name)) for name in fields}


@given(st.lists(doings(), max_size=12), st.lists(doings(), max_size=12))
def test_undo_restores_the_world_exactly_and_takes_numbers_back(before, undone):
    world = World()
    first = WorldChange(world=world)
    for do in before:
        do(first)
    was, version = plain(world), world.version
    change = WorldChange(world=world)
    for do in undone:
        do(change)
    change.undo()
    assert plain(world) == was
    assert world.version > version, "a plan made in between must not pass for a new one"
    assert change.empty
    assert not change.epochs


@given(st.lists(doings(), max_size=12), st.lists(doings(), max_size=12))
def test_step_after_an_undone_one_gives_what_it_would_have_given(steps, undone):
    straight, crooked = World(), World()
    for world in (straight, crooked):
        if world is crooked:
            refused = WorldChange(world=world)
            for do in undone:
                do(refused)
            refused.undo()
        change = WorldChange(world=world)
        for do in steps:
            do(change)
    assert plain(straight) == plain(crooked)


@given(st.lists(st.lists(doings(), max_size=6), max_size=6))
def test_what_is_stored_loads_as_the_world_that_was(steps):
    """Found by reading: a node forgotten and back within one step was written, and then deleted."""
    world, store = World(), MemoryStore()
    for step in steps:
        change = WorldChange(world=world)
        for do in step:
            do(change)
        store.commit(
            Batch(records=change.records, removed=list(change.removed), history=change.history, epochs=change.epochs)
        )
    loaded = store.load()
    for table in (
        "jobs",
        "attempts",
        "nodes",
        "queues",
        "tables",
        "pending",
        "next_job_seq",
        "next_history_seq",
    ):
        assert getattr(loaded, table) == getattr(world, table), table
    for node_id in {*loaded.usage, *world.usage}:
        assert loaded.snapshot(T).usage_of(node_id) == world.snapshot(T).usage_of(node_id)
        assert loaded.attempts_on(node_id) == world.attempts_on(node_id)


def test_allocation_is_freed_whole():
    world = World()
    change = WorldChange(world=world)
    change.put(make_node("n0"))
    one = job("1", seq=1, gpus=2)
    after = placed(one, "n0:0,1")
    change.put(after.job)
    change.put(after.attempt)
    assert world.snapshot(T).usage_of(NodeId("n0")).devices == {0, 1}
    change.put(replace(after.attempt, state=AttemptState.ENDED))
    assert world.snapshot(T).usage_of(NodeId("n0")).devices == frozenset()
    assert world.attempts == {}
    assert world.attempts_on(NodeId("n0")) == []
