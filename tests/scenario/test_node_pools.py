"""Node pools: what waiting jobs order, the life of each node, and calls that survive the death of a head."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from phalanx.controller.controller import Controller
from phalanx.controller.leases import LeaseBook
from phalanx.controller.step_context import ControllerSettings
from phalanx.controller.step_result import ControllerTime
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import NodeState
from phalanx.core.fleet.node_console import CONSOLES_MAX, console_text
from phalanx.core.fleet.node_pool import (
    BACKOFF_S,
    RETURN_WAIT_S,
    NodePool,
    NodeTemplate,
    PoolNode,
    PoolNodeState,
    next_life,
)
from phalanx.core.ids import JobId, NodeId, PoolId, ProjectId, QueueId, UserId
from phalanx.core.scheduling.feasibility.answer import Outlook
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.scheduling.node_demand import JOBS_SEEN_MAX, node_demand
from phalanx.core.state.commands import ProviderAction
from phalanx.core.state.events import PutNodePool, PutProject, PutQueue, RemoveNodePool, SubmitJob, UncordonNode
from phalanx.core.state.plan import WaitReason
from phalanx.core.state.records import NODE_CONSOLES
from phalanx.core.state.reports import ProviderOutcome, ProviderReported, SupervisorRegistered
from phalanx.core.state.snapshot import Snapshot, Usage
from phalanx.core.state.world import World, WorldChange
from phalanx.core.work.extras import Licence
from phalanx.core.work.gpus import parse_gpus
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.queue import Project, Queue
from phalanx.core.work.states import AttemptState, WaitReasonCode
from tests.builders import T, job, make_node, queue, spec

REQUESTED, PROVISIONING, UP, DRAINING, DOWN = (
    PoolNodeState.REQUESTED,
    PoolNodeState.PROVISIONING,
    PoolNodeState.UP,
    PoolNodeState.DRAINING,
    PoolNodeState.DOWN,
)
WAITS = WaitReason(reason=WaitReasonCode.RESOURCES, detail="needs more")
EITHER = parse_gpus("virtual:8|virtual:6")
SEATS_OF_2 = Licence(id="matlab", total=2)
START, STOP = ProviderAction.START, ProviderAction.STOP


def pool(name="p", devices=8, most=4, price=2.0, **fields):
    own = [
        Device(index=index, uuid="", model="virtual", memory_bytes=16 << 30, virtual=True) for index in range(devices)
    ]
    return NodePool(
        id=PoolId(name),
        provider="virtual",
        template=NodeTemplate(text=str(devices), devices=tuple(own), cpus=32, memory_bytes=256 << 30),
        price_per_h=price,
        by=UserId("op"),
        **{"min_nodes": 0, "max_nodes": most, "idle_s": 300.0, "start_limit_s": 600.0, **fields},
    )


def member(number=0, state=REQUESTED, name="p", at_s=T):
    node_id = f"{name}-{number}"
    return PoolNode(
        id=NodeId(node_id),
        pool=PoolId(name),
        token=f"{node_id}-k",
        state=state,
        requested_s=at_s,
        changed_s=at_s,
    )


# ---- the decision ---------------------------------------------------------------------------------------------------


def ordered(jobs, pools, *, nodes=(), members=(), queues=(), reason=WAITS, now_s=T, usage=None, licences=()):
    snapshot = Snapshot(
        version=1,
        now_s=now_s,
        nodes={node.id: node for node in nodes},
        usage=usage or {},
        queues={one.id: one for one in queues or [queue("default")]},
        node_pools={one.id: one for one in pools},
        pool_nodes={one.id: one for one in members},
        licences={one.id: one for one in licences},
    )
    found = node_demand(snapshot, jobs, lambda _: reason, now_s)
    return dict(sum((Counter({one.pool: one.count}) for one in found.wanted), Counter()))


def test_a_job_reads_why_its_pool_orders_nothing_while_failed_nodes_cannot_be_stopped():
    failed = [
        replace(member(number, PoolNodeState.DOWN), given_up=True, why="no keys", problem="no keys")
        for number in (0, 1)
    ]
    jobs = [gang(2)]

    def text(own, at_s):
        snapshot = Snapshot(
            version=1,
            now_s=at_s,
            nodes={},
            usage={},
            queues={one.id: one for one in [queue("default")]},
            node_pools={own.id: own},
            pool_nodes={each.id: each for each in failed},
            licences={},
        )
        return node_demand(snapshot, jobs, lambda _: WAITS, at_s).texts[jobs[0].id]

    full = pool(most=2).after_failure("p-0: no keys", T)
    assert text(full, T) == "pool p tries again in 30s: 1 node failed to start, the last: p-0: no keys"
    assert text(full, T + BACKOFF_S) == "pool p orders no other node before p-0 is stopped: no keys"
    assert failed[0].reasons == "no keys"
    assert replace(failed[0], problem="no answer").reasons == "no keys; no answer"


def needed(jobs, nodes, members, queues):
    snapshot = Snapshot(
        version=1,
        now_s=T,
        nodes={node.id: node for node in nodes},
        queues={one.id: one for one in queues},
        node_pools={PoolId("p"): pool()},
        pool_nodes={one.id: one for one in members},
    )
    return node_demand(snapshot, jobs, lambda _: WAITS, T).used


def gang(nodes, name="1", **fields):
    return job(name, seq=int(name), gpus=parse_gpus(f"{nodes}x8"), **fields)


@pytest.mark.parametrize(
    ("jobs", "given", "expected"),
    [
        ([gang(2)], {"pools": [pool()]}, {"p": 2}),
        ([gang(5)], {"pools": [pool()]}, {}),  # never half a gang
        (
            [gang(3), gang(3, "2"), gang(1, "3")],
            {"pools": [pool()]},
            {"p": 4},
        ),  # the second does not fit, the third does
        ([gang(2)], {"pools": [pool()], "members": [member(0), member(1, PROVISIONING)]}, {}),  # ordered already
        ([gang(2)], {"pools": [pool()], "members": [member(0)]}, {"p": 1}),
        ([gang(4)], {"pools": [pool()], "members": [member(0, DRAINING)]}, {}),  # one that is released still counts
        ([gang(2)], {"pools": [pool()], "nodes": [make_node("n0", 8)]}, {"p": 1}),  # free capacity first
        ([gang(1)], {"pools": [pool(), pool("q", price=1.0)]}, {"q": 1}),  # the cheapest
        ([gang(1)], {"pools": [pool(), pool("q", devices=2, price=1.0)]}, {"p": 1}),  # too small
        ([gang(1)], {"pools": [pool(retry_at_s=T + 1.0)]}, {}),  # backs off
        ([gang(1)], {"pools": [pool(removing=True)]}, {}),
        ([gang(1)], {"pools": [pool()], "queues": [queue("default", gpus_per_user=4)]}, {}),
        ([gang(1)], {"pools": [pool()], "reason": WaitReason(reason=WaitReasonCode.BUDGET, detail="")}, {}),
        # The quota of one queue is nothing to the jobs of another.
        (
            [job("1", gpus=EITHER, queue="nlp"), job("2", seq=2, gpus=EITHER)],
            {"pools": [pool()], "queues": [queue("default"), queue("nlp", gpus_per_user=4)]},
            {"p": 1},
        ),
        # No node is ordered for a job whose licence lacks seats.
        ([gang(1, licences="matlab:3")], {"pools": [pool()], "licences": [SEATS_OF_2]}, {}),
        (
            [gang(1, licences="matlab:1"), gang(1, "2", licences="matlab:1")],
            {"pools": [pool()], "licences": [SEATS_OF_2]},
            {"p": 2},
        ),
        (
            [gang(1, licences="matlab:2"), gang(1, "2", licences="matlab:1")],
            {"pools": [pool()], "licences": [SEATS_OF_2]},
            {"p": 1},
        ),
        ([gang(1, nodelist=("n7",))], {"pools": [pool()]}, {}),
        ([], {"pools": [pool(min_nodes=2)]}, {"p": 2}),
        ([gang(1)], {"pools": [pool(min_nodes=2)], "members": [member(0, DRAINING)]}, {"p": 2}),
    ],
)
def test_what_waiting_jobs_order(jobs, given, expected):
    assert ordered(jobs, **given) == expected


HALVES = {"n0": Usage(devices=frozenset({0, 1}), shares={0: (500, "mps:gpt"), 1: (500, "mps:gpt")})}


@pytest.mark.parametrize(
    ("gpus", "project", "expected"),
    [
        ("1", "gpt", {"p": 1}),  # two halves are no whole device
        ("1/2", "gpt", {}),
        ("0.6", "gpt", {"p": 1}),
        ("1/2", "vision", {"p": 1}),  # the devices are shared by another project
    ],
)
def test_what_is_left_of_shared_devices_holds_shares_of_their_project(gpus, project, expected):
    one = replace(job("1", seq=1, gpus=parse_gpus(gpus)), project=ProjectId(project))
    assert ordered([one], [pool()], nodes=[make_node("n0", 2)], usage=HALVES) == expected


LENDS_2 = [queue("default"), queue("nlp", quota_gpus=4, lend_gpus=2)]  # 2 of 4 GPUs stay with queue nlp


def test_a_gang_that_its_quota_admits_only_on_a_larger_fleet_gets_further_nodes():
    assert ordered([gang(2)], [pool()], queues=LENDS_2) == {"p": 3}  # 16 of 24 - 2 GPUs, of 16 - 2 not
    assert ordered([gang(2)], [pool(most=2)], queues=LENDS_2) == {}  # it cannot grow so far


def test_nodes_that_only_a_quota_needs_are_kept_while_the_gang_waits():
    nodes = [make_node(f"p-{number}", 8) for number in range(3)]
    members = [member(number, UP) for number in range(3)]
    assert needed([gang(2)], nodes, members, LENDS_2) == {"p-0", "p-1", "p-2"}
    assert needed([gang(2)], nodes, members, [queue("default")]) == {"p-0", "p-1"}


def test_a_job_is_told_why_its_pool_starts_no_node():
    waiting = replace(pool(), failures=2, failure="p-1: no room", retry_at_s=T + 40.0)
    snapshot = Snapshot(
        version=1, now_s=T, nodes={}, queues={QueueId("default"): queue("default")}, node_pools={waiting.id: waiting}
    )
    jobs = [gang(2), gang(5, "2")]  # the second is too large for the pool, whenever it starts
    texts = node_demand(snapshot, jobs, lambda _: WAITS, T).texts
    assert texts == {"1": "pool p tries again in 40s: 2 nodes failed to start, the last: p-1: no room"}


def test_a_job_is_told_why_the_nodes_that_come_for_it_are_not_up_yet():
    coming = [replace(member(number, PROVISIONING), problem=f"no node for {number // 2}") for number in range(10)]
    snapshot = Snapshot(
        version=1,
        now_s=T,
        nodes={},
        queues={QueueId("default"): queue("default")},
        node_pools={PoolId("p"): pool(most=10)},
        pool_nodes={one.id: one for one in coming},
    )
    jobs = [gang(2), gang(8, "2")]
    texts = node_demand(snapshot, jobs, lambda _: WAITS, T).texts
    assert texts[JobId("1")] == "pool p is starting 2 nodes for it; no node for 0"
    assert texts[JobId("2")] == "pool p is starting 8 nodes for it; no node for 1; no node for 2; no node for 3", (
        "at most three"
    )


def test_a_clock_that_was_set_back_stops_no_order():
    assert ordered([gang(1)], [pool(retry_at_s=T + 86400.0)]) == {"p": 1}


def test_jobs_that_nodes_do_not_help_hide_no_later_one():
    jobs = [gang(1, str(number), hold=True) for number in range(1, JOBS_SEEN_MAX + 1)]
    jobs = [replace(one, held=True) for one in jobs]
    assert ordered([*jobs, gang(1, str(JOBS_SEEN_MAX + 1))], [pool()]) == {"p": 1}


def test_jobs_that_only_a_pool_could_hold_are_accepted_and_larger_ones_refused():
    snapshot = Snapshot(version=1, now_s=T, nodes={}, queues={QueueId("default"): queue("default")})
    with_pool = replace(snapshot, node_pools={PoolId("p"): pool()})
    found = FeasibilityChecker(with_pool, T).check_job(gang(4))
    assert (found.outlook, "pool p (at most 4 nodes)" in found.detail) == (Outlook.NOT_NOW, True)
    assert FeasibilityChecker(with_pool, T).check_job(gang(5)).never


def outlook(asked, up):
    """The outlook of a job, with a pool of at most 4 nodes of 8 virtual GPUs whose nodes `up` are registered: each is given by its devices."""
    nodes = [make_node(f"p-{number}", devices) for number, devices in enumerate(up)]
    snapshot = Snapshot(
        version=1,
        now_s=T,
        nodes={node.id: node for node in nodes},
        queues={QueueId("default"): queue("default")},
        node_pools={PoolId("p"): pool()},
        pool_nodes={node.id: member(number, UP) for number, node in enumerate(nodes)},
    )
    return FeasibilityChecker(snapshot, T).check_job(job("1", seq=1, gpus=parse_gpus(asked)))


@pytest.mark.parametrize(
    ("asked", "up", "expected"),
    [
        ("1xh100:8", ["h100:8"], Outlook.POSSIBLE),
        ("2xh100:8", ["h100:8"], Outlook.NOT_NOW),  # a further node may be like the one that is there
        ("4x8", ["h100:8"], Outlook.NOT_NOW),  # of one model: three more like it, or four of the template
        ("4xvirtual:8", ["h100:8"], Outlook.NOT_NOW),
        ("3xa100:8", ["h100:8", "a100:8"], Outlook.NOT_NOW),
        ("4x8", ["h100:8", "a100:8"], Outlook.NOT_NOW),
        ("5xh100:8", ["h100:8"], Outlook.NEVER),  # more than the pool may have, of any kind
        ("5x8", ["h100:8"], Outlook.NEVER),
        ("1xh100:9", ["h100:8"], Outlook.NEVER),
        ("1xb200:8", ["h100:8"], Outlook.NEVER),  # none of its nodes had such a GPU
        ("4xh100:8", ["virtual:8"], Outlook.NEVER),
    ],
)
def test_nodes_of_a_pool_may_turn_out_to_be_of_another_model_than_its_template(asked, up, expected):
    found = outlook(asked, up)
    assert found.outlook is expected, found.detail
    if expected is Outlook.NEVER:
        assert "needs nodes of pool" not in found.detail


def test_a_job_that_waits_for_another_model_of_a_pool_is_told_which():
    assert outlook("2xh100:8", ["h100:8"]).detail.endswith(
        "needs nodes of pool p with h100 (at most 4); it also has others"
    )


NO_RCLONE = "rclone is not installed"
MOUNTS: dict[str, Any] = {"data": (("train", "s3://b/train"),), "data_mode": DataMode.MOUNT}


def test_a_pool_whose_nodes_cannot_mount_is_not_ordered_from_for_jobs_that_mount_until_it_is_set_again():
    steps = Steps()
    steps.step(PutNodePool(pool=pool()), steps.submit(1, **MOUNTS))
    steps.step(steps.told(ProviderOutcome.STARTED, "p-0"))
    hello = steps.hello("p-0")
    steps.step(replace(hello, node=replace(hello.node, mounts_error=NO_RCLONE)))
    for _ in range(20):
        steps.step(after_s=60.0)
    assert list(steps.tokens) == ["p-0"]  # else one node after the other would be paid for, and idle
    (waits,) = steps.controller.waits.values()
    assert (waits.reason, waits.detail) == (
        WaitReasonCode.NEVER,
        f"too few nodes that fit can mount object stores; it cannot use nodes of pool p, p-0 ({NO_RCLONE})",
    )
    steps.step(PutNodePool(pool=pool()))
    steps.step()
    assert len(steps.tokens) == 2


# ---- the life -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "node", "after_s", "expected"),
    [
        (REQUESTED, None, 599.0, REQUESTED),
        (REQUESTED, None, 600.0, DOWN),
        (REQUESTED, NodeState.UP, 1.0, UP),  # it registered before the provider's answer
        (PROVISIONING, NodeState.UP, 1.0, UP),
        (PROVISIONING, NodeState.DOWN, 1.0, PROVISIONING),
        (PROVISIONING, None, 600.0, DOWN),
        (UP, NodeState.UP, 9e9, UP),
        (UP, NodeState.DOWN, 1.0, DOWN),
        (UP, None, 1.0, DOWN),
        (DOWN, NodeState.UP, 1.0, UP),
        (DOWN, NodeState.DOWN, RETURN_WAIT_S - 1.0, DOWN),
        (DOWN, NodeState.DOWN, RETURN_WAIT_S, DOWN),
        (DRAINING, NodeState.UP, 9e9, DRAINING),
        (DRAINING, None, 9e9, DRAINING),
        (DRAINING, NodeState.DOWN, 1.0, DOWN),
    ],
)
def test_life_of_a_pooled_node(state, node, after_s, expected):
    known = None if node is None else replace(make_node("p-0", 8), state=node)
    after = next_life(member(state=state), pool(), known, T + after_s, after_s)
    assert after.state is expected
    assert after.leaving == (state is DRAINING or after_s in {600.0, RETURN_WAIT_S})


def test_a_node_that_was_given_up_does_not_return():
    gone = replace(member(state=DOWN), given_up=True)
    assert next_life(gone, pool(), make_node("p-0", 8), T, 9e9) is gone


def test_each_node_given_up_doubles_the_pause():
    once = pool().after_failure("p-0: no answer", T)
    twice = once.after_failure("p-1: no answer", T)
    assert (once.retry_at_s - T, twice.retry_at_s - T) == (BACKOFF_S, 2.0 * BACKOFF_S)
    assert (twice.failures, twice.failure) == (2, "p-1: no answer")


# ---- the controller ------------------------------------------------------------------------------------------------


class Steps:
    """A controller whose steps all commit; a new head continues with the same world."""

    def __init__(self):
        self.now_s, self.world, self.head = 1000.0, World(), 0
        self.tokens, self.offset_s = {}, 0.0
        self.start()
        self.step(PutProject(project=Project(id=ProjectId("gpt"))), PutQueue(queue=Queue(id=QueueId("default"))))

    def start(self):
        self.head += 1
        settings = ControllerSettings(checkpoint_root="/c", output_root="/o", storage_key=f"k{self.head}")
        self.controller = Controller(world=self.world, leases=LeaseBook(lease_s=1e6), settings=settings)
        self.controller.start(self.time())

    def time(self):
        return ControllerTime(wall_s=T + self.now_s + self.offset_s, boot_s=self.now_s)

    def step(self, *events, after_s=1.5):
        self.now_s += after_s
        done = self.controller.step(self.time(), events)
        assert not [answer for answer in done.answers if isinstance(answer, Exception)], done.answers
        self.controller.committed(done, self.time())
        self.tokens |= {call.node_id: call.token for call in done.provider_calls}
        # Without the number of the order, which is the last part of the token.
        return [(call.action, call.node_id, call.token.rpartition("-")[0]) for call in done.provider_calls]

    def told(self, outcome, name, token="", why=""):
        return ProviderReported(
            node_id=NodeId(name), token=token or self.tokens[NodeId(name)], outcome=outcome, why=why
        )

    def submit(self, nodes, **more):
        return SubmitJob(
            spec=spec("gang", gpus=parse_gpus(f"{nodes}x8"), **more),
            user=UserId("ada"),
            project=ProjectId("gpt"),
            queue=QueueId("default"),
        )

    def states(self):
        return {one.id: one.state for one in self.world.pool_nodes.values()}

    def hello(self, name):
        node = replace(make_node(name, 8), engine="virtual")
        assert node.supervisor_id is not None
        return SupervisorRegistered(node=node, supervisor_id=node.supervisor_id, running=())


def test_a_head_that_dies_between_any_two_steps_orders_once_and_releases_all():
    steps = Steps()
    calls = steps.step(PutNodePool(pool=pool(idle_s=10.0)), steps.submit(1))
    assert calls == [(START, "p-0", "p-0-k1")]
    assert steps.states() == {"p-0": REQUESTED}
    steps.start()  # dead after the commit, before or after the call
    assert steps.step() == [(START, "p-0", "p-0-k1")]  # the same token
    assert steps.step() == []  # not again at once
    steps.step(steps.told(ProviderOutcome.STARTED, "p-0"))
    assert steps.states() == {"p-0": PROVISIONING}
    steps.start()
    assert steps.step() == []
    steps.step(steps.hello("p-0"))
    steps.step()
    assert steps.states() == {"p-0": UP}
    assert len(steps.world.attempts) == 1
    steps.world.attempts.clear()  # its job has ended
    steps.world.attempts_by_node.clear()
    steps.world.pending.clear()
    steps.world.jobs.clear()
    steps.start()
    assert steps.step() == []
    assert steps.step(after_s=11.0) == [(STOP, "p-0", "p-0-k1")]
    steps.start()
    assert steps.step() == [(STOP, "p-0", "p-0-k1")]
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0"))
    assert (steps.states(), dict(steps.world.nodes)) == ({}, {})


def test_a_node_that_leaves_is_drained_and_then_stopped():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(idle_s=10.0)), steps.submit(1))
    steps.step(steps.told(ProviderOutcome.STARTED, "p-0"))
    steps.step(steps.hello("p-0"))
    steps.step()
    assert len(steps.world.attempts) == 1
    steps.step(steps.told(ProviderOutcome.LEAVING, "p-0", why="a spot notice"))
    assert steps.states() == {"p-0": DRAINING}
    cordon = steps.world.nodes[NodeId("p-0")].cordon
    assert cordon is not None
    assert (cordon.drain, "a spot notice" in cordon.why) == (True, True)
    [attempt] = steps.world.attempts.values()
    assert attempt.state is AttemptState.STOPPING


def test_a_node_that_leaves_before_it_is_up_is_given_up():
    steps = Steps()
    steps.step(PutNodePool(pool=pool()), steps.submit(1))
    assert steps.step(steps.told(ProviderOutcome.LEAVING, "p-0", why="no room")) == [(STOP, "p-0", "p-0-k1")]
    assert "no room" in steps.world.node_pools[PoolId("p")].failure


def test_why_a_node_is_not_up_yet_is_known_until_it_is():
    steps = Steps()
    steps.step(PutNodePool(pool=pool()), steps.submit(1))
    steps.step(steps.told(ProviderOutcome.STARTED, "p-0"))
    found = []
    for why in ("no GPU", "", "no image"):
        steps.step(steps.told(ProviderOutcome.DELAYED, "p-0", why=why))
        found.append(steps.world.pool_nodes[NodeId("p-0")].problem)
    assert found == ["no GPU", "", "no image"]
    steps.step(steps.hello("p-0"))
    steps.step()
    steps.step(steps.told(ProviderOutcome.DELAYED, "p-0", why="too late"))
    assert (steps.states(), steps.world.pool_nodes[NodeId("p-0")].problem) == ({"p-0": UP}, "")


def test_a_pool_learns_from_its_first_node_which_devices_it_has():
    steps = Steps()
    steps.step(PutNodePool(pool=pool()), steps.submit(1))
    steps.step(steps.told(ProviderOutcome.STARTED, "p-0"))
    hello = steps.hello("p-0")
    steps.step(replace(hello, node=replace(hello.node, devices=make_node("p-0", "measured:8").devices)))
    steps.step()
    template = steps.world.node_pools[PoolId("p")].template
    assert {device.model for device in template.devices} == {"measured"}


def test_a_node_that_cannot_start_is_stopped_and_its_pool_backs_off():
    steps = Steps()
    steps.step(PutNodePool(pool=pool()), steps.submit(1))
    assert steps.step(steps.told(ProviderOutcome.FAILED, "p-0", why="no room")) == [(STOP, "p-0", "p-0-k1")]
    assert "no room" in steps.world.node_pools[PoolId("p")].failure
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0"))
    assert steps.step() == []
    assert steps.step(after_s=BACKOFF_S) == [(START, "p-1", "p-1-k1")]


def test_a_supervisor_that_registers_too_late_gets_no_job():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(start_limit_s=5.0)), steps.submit(1))
    assert steps.step(after_s=6.0) == [(STOP, "p-0", "p-0-k1")]
    steps.step(steps.hello("p-0"))
    assert not steps.world.attempts
    assert steps.world.nodes[NodeId("p-0")].cordon is not None


def test_a_node_that_its_pool_releases_is_not_undrained():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(min_nodes=1)))
    steps.step(steps.hello("p-0"))
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by=UserId("op")))
    steps.now_s += 1.0
    done = steps.controller.step(steps.time(), [UncordonNode(node_id=NodeId("p-0"), by=UserId("op"))])
    assert [str(answer) for answer in done.answers] == ["pool p is releasing p-0: pool p is removed"]
    assert steps.world.nodes[NodeId("p-0")].cordon is not None


def test_a_pool_that_returns_under_its_name_gets_tokens_of_its_own():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(min_nodes=1)))
    first = steps.tokens[NodeId("p-0")]
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by=UserId("op")))
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0"))
    steps.step(PutNodePool(pool=pool(min_nodes=1)))
    assert steps.tokens[NodeId("p-0")] != first
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by=UserId("op")))
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0", token=first))  # the answer came twice
    assert steps.states() == {"p-0": DRAINING}


def test_a_larger_pool_makes_a_waiting_job_possible():
    steps = Steps()
    steps.step(
        PutNodePool(pool=pool(most=1)),
        replace(steps.submit(2), spec=spec("gang", gpus=parse_gpus("2x8"), allow_never=True)),
    )
    assert steps.controller.waits[JobId("1")].reason is WaitReasonCode.NEVER
    steps.step(PutNodePool(pool=pool(most=2)))
    assert steps.states() == {"p-0": REQUESTED, "p-1": REQUESTED}


def test_a_clock_that_is_set_gives_up_no_node():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(min_nodes=1, start_limit_s=600.0)))
    steps.offset_s = 86400.0
    steps.step()
    assert steps.states() == {"p-0": REQUESTED}
    assert steps.step(after_s=600.0) == [(STOP, "p-0", "p-0-k1")]
    assert steps.states() == {"p-0": DOWN}


def test_a_removed_pool_ends_with_its_last_node_and_reports_of_old_orders_change_nothing():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(min_nodes=1)))
    assert steps.step(RemoveNodePool(pool_id=PoolId("p"), by=UserId("op"))) == [(STOP, "p-0", "p-0-k1")]
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0", token="p-0-k0-1"))
    assert steps.states() == {"p-0": DRAINING}
    steps.step(steps.told(ProviderOutcome.STOPPED, "p-0"))
    assert (steps.states(), steps.world.node_pools) == ({}, {})


def test_an_undone_step_sends_its_call_with_the_next():
    steps = Steps()
    steps.now_s += 1.5
    done = steps.controller.step(steps.time(), [PutNodePool(pool=pool(min_nodes=1))])
    assert len(done.provider_calls) == 1
    steps.controller.refused(done)
    assert steps.states() == {}
    change = WorldChange(world=steps.world)
    change.put(pool(min_nodes=1))
    assert [call[0] for call in steps.step()] == [START]


# ---- console output of nodes that never joined ---------------------------------------------------------------------------


def given_up(steps, name):
    """Start the node of a waiting job, and let it miss its time limit; returns the calls of that step."""
    while not steps.states():
        steps.step(after_s=BACKOFF_S)
    assert list(steps.states()) == [name]
    steps.step(replace(steps.told(ProviderOutcome.STARTED, name), machine=f"i-{name}"))
    steps.now_s += 700.0
    done = steps.controller.step(steps.time(), ())
    steps.controller.committed(done, steps.time())
    return [(call.action, call.node_id, call.known_machine, call.console) for call in done.provider_calls]


def test_what_the_machine_of_a_node_printed_that_never_joined_is_kept_and_the_node_is_replaced():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(most=1)), steps.submit(1))
    for number in range(CONSOLES_MAX + 1):
        name = f"p-{number}"
        assert given_up(steps, name) == [(STOP, name, f"i-{name}", True)]
        steps.step(replace(steps.told(ProviderOutcome.CONSOLE, name), console=f"no driver {number}\n"))
        assert steps.world.pool_nodes[NodeId(name)].why.endswith("after its request; its console output is kept")
        assert steps.world.node_pools[PoolId("p")].failure.endswith("its console output is kept")
        assert steps.step(after_s=20.0) == [(STOP, name, f"{name}-k1")], "the stop is repeated"
        steps.step(steps.told(ProviderOutcome.STOPPED, name))
    kept = steps.world.table(NODE_CONSOLES)
    assert [(one.id, one.machine, one.text) for one in kept.values()] == [
        (f"p-{number}", f"i-p-{number}", f"no driver {number}\n") for number in range(1, CONSOLES_MAX + 1)
    ], "the newest"
    steps.step(RemoveNodePool(pool_id=PoolId("p"), by=UserId("op")))
    steps.step()
    assert (steps.world.node_pools, dict(steps.world.table(NODE_CONSOLES))) == ({}, {})


@pytest.mark.parametrize(
    ("report", "note"),
    [({"why": "no rights"}, "its console output could not be read: no rights"), ({}, "its console has no output")],
)
def test_a_console_that_gives_nothing_is_said_and_not_kept(report, note):
    steps = Steps()
    steps.step(PutNodePool(pool=pool(most=1)), steps.submit(1))
    given_up(steps, "p-0")
    steps.step(replace(steps.told(ProviderOutcome.CONSOLE, "p-0"), **report))
    assert steps.world.pool_nodes[NodeId("p-0")].why.endswith(note)
    assert not steps.world.table(NODE_CONSOLES)


def test_the_console_of_a_node_that_had_joined_is_not_asked_for():
    steps = Steps()
    steps.step(PutNodePool(pool=pool(most=1, idle_s=10.0)), steps.submit(1))
    steps.step(replace(steps.told(ProviderOutcome.STARTED, "p-0"), machine="i-1"))
    steps.step(steps.hello("p-0"))
    steps.step(steps.told(ProviderOutcome.LOST, "p-0", why="its machine has ended"))
    assert steps.world.pool_nodes[NodeId("p-0")].given_up
    done = steps.controller.step(steps.time(), ())
    assert [call.console for call in done.provider_calls if call.action is STOP] in ([], [False])


def test_tokens_and_control_characters_are_not_kept():
    raw = "\x1b[1mexport PHALANX_JOIN_TOKEN='phxm.1796.0a-f'\r\n\x00a\ttab\n" + "x" * 40_000
    assert console_text(raw)[-3:] == "xxx"
    assert len(console_text(raw)) == 32_768
    assert console_text(raw[:80]).startswith("export PHALANX_JOIN_TOKEN='[token]'\na\ttab\nxx")


@pytest.mark.parametrize("before", ["working\r", "\x1b]0;boot\x07", "\x1b(B\x1b[m", "T_", "a\x00"])
def test_a_token_is_masked_whatever_is_before_it(before):
    assert "secret" not in console_text(f"{before}phxj.secret\n")
