"""What others hold on a shared engine comes and goes: the board takes the difference, and is as one made anew from the records."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from phalanx.core.fleet.node import ForeignUsage
from phalanx.core.ids import JobId, NodeId
from phalanx.core.lifecycle.job import place
from phalanx.core.lifecycle.transitions import TransitionContext
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.world import World, WorldChange
from tests.builders import PLAIN, T, job, make_node

NODES = [NodeId(name) for name in ("n0", "n1", "n2")]
KINDS = ("h100:4", "h100:4", "a100-80gb:2")
held = st.builds(
    lambda devices, cpus, gib: ForeignUsage(devices=tuple(sorted(devices)), cpus=cpus, memory_bytes=gib << 30),
    st.sets(st.integers(0, 3), max_size=4),
    st.integers(0, 4),
    st.integers(0, 8),
)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("others"), st.dictionaries(st.sampled_from(NODES), held, min_size=1)),
        st.tuples(st.just("submit"), st.sampled_from(("1", "2", "2x2", "h100:4", "a100:1"))),
    ),
    max_size=12,
)


class Live:
    """A world and its scheduler, told of each change as the controller tells it."""

    def __init__(self):
        self.world = World()
        self.change = WorldChange(world=self.world)
        self.scheduler = Scheduler()
        self.now_s = T
        nodes = [make_node(name, kind, cpus=16, memory_gib=64) for name, kind in zip(NODES, KINDS, strict=True)]
        self.tell(PLAIN, *nodes)
        self.scheduler.rebuild(self.world, self.now_s)

    def tell(self, *records):
        for record in records:
            self.change.put(record)
        self.scheduler.update(self.world, records, self.now_s)

    def plan(self):
        self.now_s += 1.0
        for placement in self.scheduler.plan(self.world, self.now_s).placements:
            assert rejection_reason(self.world, placement) == ""
            outcome = place(
                self.world.jobs[placement.job_id], placement.allocation, TransitionContext(now_s=self.now_s)
            )
            self.tell(outcome.job, outcome.attempt)


def room(scheduler):
    board = scheduler.board
    pools = [(list(pool.free), pool.nodes_by_free, pool.counts_by_free, pool.free_total) for pool in board.pools]
    return pools, list(board.cpus), list(board.memory), dict(board.foreign_devices)


@given(happenings)
def test_the_board_is_as_one_made_anew_whatever_others_take_and_give_back(happened):
    live = Live()
    for number, (what, more) in enumerate(happened, start=1):
        if what == "submit":
            live.tell(replace(job("x", gpus=more, cpus=1, memory_gib=2), id=JobId(str(number)), seq=number))
        else:
            live.tell(*(replace(live.world.nodes[name], foreign_usage=others) for name, others in more.items()))
            assert not live.scheduler.stale
        live.plan()
        if not live.scheduler.pending_placements:
            anew = Scheduler()
            anew.rebuild(live.world, live.now_s)
            assert room(live.scheduler) == room(anew)


def test_a_job_that_was_to_start_where_others_are_now_starts_elsewhere():
    live = Live()
    live.tell(replace(live.world.nodes[NODES[0]], foreign_usage=ForeignUsage(devices=(0, 1, 2, 3))))
    live.tell(replace(job("x", gpus="h100:4"), id=JobId("1"), seq=1))
    plan = live.scheduler.plan(live.world, live.now_s)
    assert [grant.node_id for placed in plan.placements for grant in placed.allocation.grants] == ["n1"]
    live.scheduler.record_rejection(JobId("1"), live.now_s)  # its place went to others before the plan was carried out
    live.tell(
        replace(live.world.nodes[NODES[1]], foreign_usage=ForeignUsage(devices=(0, 1, 2, 3))),
        replace(live.world.nodes[NODES[0]], foreign_usage=ForeignUsage()),
    )
    plan = live.scheduler.plan(live.world, live.now_s + 1.0)
    assert [grant.node_id for placed in plan.placements for grant in placed.allocation.grants] == ["n0"]
