"""A job that is judged possible starts alone on the empty cluster, and no other job does."""

from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Cordon, Node, NodeState
from phalanx.core.ids import NodeId, QueueId, ReservationId, UserId
from phalanx.core.scheduling.feasibility.answer import POSSIBLE, Outlook
from phalanx.core.scheduling.feasibility.cache import FeasibilityCache
from phalanx.core.scheduling.feasibility.checker import FeasibilityChecker
from phalanx.core.scheduling.feasibility.node_scopes import NODE_RETURNS_WITHIN_S
from phalanx.core.scheduling.scheduler import Scheduler
from phalanx.core.state.snapshot import Snapshot
from phalanx.core.units import GIB
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.job_file.data_mode import DataMode
from phalanx.core.work.queue import Queue
from phalanx.core.work.quotas.queue_validation import check_queue_tree
from phalanx.core.work.reservation import Reservation
from phalanx.core.work.spec import TopologyConstraint
from tests.builders import T, job
from tests.effort import examples

NAMES = [NodeId(f"n{at}") for at in range(6)]
QUEUES = ("a", "b", "c")


class Blind(FeasibilityCache):
    """Judges every job possible, to see what the scheduler does on its own."""

    __slots__ = ()

    def checker(self, cluster, now_s):
        return SimpleNamespace(check_job=lambda _: POSSIBLE, valid_until_s=float("inf"))


@st.composite
def nodes(draw):
    state = draw(st.sampled_from([NodeState.UP, NodeState.UP, NodeState.UP, NodeState.DOWN]))
    cordon = draw(st.sampled_from([None, None, None, Cordon(by="op", why="disk", since_s=T)]))
    model = draw(st.sampled_from(["h100", "a100"]))
    sick = draw(st.sampled_from([(), (), (), (0,), (0, 1)]))
    racks = draw(st.sampled_from([{}, {"rack": "r0"}, {"rack": "r0"}, {"rack": "r1"}]))
    return {
        "state": state,
        "cordon": cordon,
        "labels": racks,
        "cpus": draw(st.sampled_from([8, 32])),
        "memory_bytes": draw(st.sampled_from([64, 256])) * GIB,
        "devices": tuple(
            Device(index=at, uuid=f"{at}", model=model, memory_bytes=80 * GIB, healthy=at not in sick)
            for at in range(draw(st.sampled_from([0, 2, 4, 4, 8])))
        ),
        "mounts_error": draw(st.sampled_from(["", "", "", "rclone is not installed"])),
        "changed_s": T - draw(st.sampled_from([0.0, 2 * NODE_RETURNS_WITHIN_S])),
    }


@st.composite
def trees(draw):
    if draw(st.booleans()):
        return {QueueId(name): Queue(id=QueueId(name)) for name in QUEUES}
    found = {
        QueueId(name): Queue(
            id=QueueId(name),
            parent=draw(st.sampled_from([None, *QUEUES[:at]])),
            quota_gpus=draw(st.sampled_from([None, None, 4, 6, 12])),
            borrow_gpus=draw(st.sampled_from([None, None, None, 0, 4])),
            lend_gpus=draw(st.sampled_from([None, None, 0, 2])),
            gpus_per_user=draw(st.sampled_from([None, None, None, None, None, 0, 4, 8])),
            jobs_per_user=draw(st.sampled_from([None, None, None, None, None, 0, 1])),
            budget_gpu_h=draw(st.sampled_from([None, None, None, None, None, 0.0, 10.0])),
        )
        for at, name in enumerate(QUEUES)
    }
    try:
        check_queue_tree(found)
    except Exception:  # noqa: BLE001
        found = {QueueId(name): Queue(id=QueueId(name)) for name in QUEUES}
    return found


@st.composite
def requests(draw):
    gpus = draw(
        st.sampled_from(
            [
                "0",
                "1",
                "2",
                "4",
                "6",
                "8",
                "12",
                "2x2",
                "2x4",
                "3x4",
                "2x8",
                "1..3x4",
                "2..4x2",
                "a100:4",
                "h100:8",
                "h100,a100:8",
                "2xa100,h100:4",
                "b200:1",
            ]
        )
    )
    asked = parse_gpus(gpus)
    if draw(st.booleans()) and asked.nodes is None and asked.total > 4:
        asked = replace(asked, uneven=True)
    level = draw(st.sampled_from(["", "", "", "rack", "leaf"]))
    topology = TopologyConstraint(within=level, required=bool(level) and draw(st.booleans()))
    if asked.nodes == 2 and asked.nodes_max is None and draw(st.integers(0, 3)) == 0:
        topology = replace(topology, slice_nodes=2, slice_within="rack")
    return job(
        "x",
        gpus=asked if asked.total else GpuRequest(total=0, nodes=draw(st.integers(1, 3)), per_node=0),
        cpus=draw(st.sampled_from([0, 0, 0, 16, 64])),
        memory_gib=draw(st.sampled_from([0, 0, 0, 128, 512])),
        topology=topology,
        nodelist=tuple(draw(st.sampled_from([(), (), (), NAMES[:1], NAMES[:3], NAMES[2:]]))),
        data=draw(st.sampled_from([(), (), (("train", "s3://b/train"),), (("train", "/nfs/train"),)])),
        data_mode=draw(st.sampled_from([DataMode.MOUNT, DataMode.STREAM])),
        exclude=tuple(draw(st.sampled_from([(), (), (), NAMES[:1], NAMES[3:]]))),
        reservation=draw(st.sampled_from([*[""] * 8, "r", "r", "r", "gone"])),
        queue=draw(st.sampled_from(QUEUES)),
    )


@st.composite
def clusters(draw):
    fleet = {
        name: Node(id=name, engine="local", **draw(nodes()))
        for name in NAMES[: draw(st.sampled_from([0, 1, 2, 4, 6, 6, 6]))]
    }
    reserved = Reservation(
        id=ReservationId("r"),
        nodes=tuple(name for name in NAMES[1:4] if name in fleet),
        start_s=T - 10.0,
        end_s=T + 1e6,
        users=frozenset(draw(st.sampled_from([[UserId("ada")], [UserId("ada")], [UserId("bob")]]))),
    )
    one = draw(requests())
    if one.spec.reservation != "r":  # closed nodes would delay it
        reserved = replace(reserved, nodes=())
    return Snapshot(
        version=1,
        now_s=T,
        nodes=fleet,
        queues=draw(trees()),
        reservations={reserved.id: reserved} if reserved.nodes else {},
        jobs={one.id: replace(one, seq=1)},
        awaited_nodes=draw(st.sampled_from(["", "", "", "n9 has not registered yet"])),
    )


def starts(snapshot, feasibility=None):
    scheduler = Scheduler(feasibility=feasibility)
    return bool(scheduler.plan(snapshot, T).placements)


@settings(max_examples=examples(400))
@given(clusters())
def test_possible_is_what_starts_alone(snapshot):
    one = next(iter(snapshot.jobs.values()))
    outlook = FeasibilityChecker(snapshot, T).check_job(one)
    alone = starts(snapshot, Blind())
    assert alone == (outlook.outlook is Outlook.POSSIBLE), outlook
    assert starts(snapshot) == alone
    assert bool(outlook.detail) == (outlook.outlook is not Outlook.POSSIBLE)
    assert bool(outlook.limit) == outlook.never
