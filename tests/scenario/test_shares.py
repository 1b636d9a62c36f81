"""Parts of devices, drawn: who shares with whom, what is left, who makes room, and what the books say. A job is `name: gpus`."""

import random
from dataclasses import replace

import pytest

from phalanx.core.accounting.ledger import Ledger
from phalanx.core.ids import JobId, ProjectId, QueueId
from phalanx.core.scheduling.fleet_index import PendingUsage
from phalanx.core.scheduling.policies import POLICIES
from phalanx.core.scheduling.sharing.shared_devices import SharedDevice
from phalanx.core.work.gpus import parse_gpus, with_share_kind
from phalanx.core.work.share import gpus_of
from phalanx.core.work.states import WaitReasonCode
from phalanx.simulator.fleet import TraceNode
from phalanx.simulator.packing_replay import replay_packing
from phalanx.simulator.trace import TraceJob
from tests.builders import job, make_fleet, queue
from tests.cell import Cell


def asks(name, gpus, *, share="", project="gpt", **fields):
    one = job(name, gpus=with_share_kind(parse_gpus(gpus), share), **fields)
    return replace(one, project=ProjectId(project))


def played(fleet, *jobs, **policy):
    cell = Cell(make_fleet(fleet), **policy)
    for number, one in enumerate(jobs):
        cell.submit(replace(one, seq=number))
        cell.go_on(1.0)
    return cell


def detail(cell, name):
    why = cell.scheduler.wait_reason(cell.world.jobs[JobId(name)])
    return "" if why is None else why.detail


def drawn(fleet, words, **fields):
    """Jobs `a: 1/2` one after the other; where each runs, or `-`."""
    jobs = [asks(*(part.strip() for part in word.split(":", 1)), **fields) for word in words.split(";")]
    cell = played(fleet, *jobs)
    return " ".join(f"{one.id}@{cell.place_of(one.id) or '-'}".replace(" ", "+") for one in jobs), cell


PLACES = [
    ("two share a device, a third waits", "r: n0=1", "a: 1/2; b: 1/2; c: 1/2", "a@n0:0 b@n0:0 c@-"),
    ("the fullest device that suffices", "r: n0=2", "a: 0.6; b: 0.7; c: 0.3; d: 0.4", "a@n0:0 b@n0:1 c@n0:1 d@n0:0"),
    ("thirds are thirds", "r: n0=1", "a: 1/3; b: 1/3; c: 1/3; d: 0.002", "a@n0:0 b@n0:0 c@n0:0 d@-"),
    ("a whole device is not shared", "r: n0=2", "a: 1; b: 1/2; c: 1", "a@n0:0 b@n0:1 c@-"),
    ("a share on each of two nodes", "r: n0=1 n1=1", "a: 2x1/2; b: 2x1/2; c: 1/4", "a@n0:0+n1:0 b@n0:0+n1:0 c@-"),
    ("nodes with room before free devices", "r: n0=1 n1=1 n2=1", "a: 1/4; b: 2x1/4", "a@n0:0 b@n0:0+n1:0"),
    ("as much as that memory needs", "r: n0=h100-80gb:1", "a: 20GiB; b: 60GiB; c: 1GiB", "a@n0:0 b@n0:0 c@-"),
    ("the largest device, as its share is the smallest", "r: n0=a100-40gb:1 n1=h100-80gb:1", "a: 20GiB", "a@n1:0"),
    ("a device a little smaller than its name", "r: n0=h100-79gb:1", "a: 80GiB; b: 0.01", "a@n0:0 b@-"),
    ("of the model asked for", "r: n0=a100-40gb:1 n1=h100-80gb:1", "a: a100:20GiB; b: a100:0.6", "a@n0:0 b@-"),
]


@pytest.mark.parametrize(("fleet", "words", "where"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_where_shares_go(fleet, words, where):
    assert drawn(fleet, words)[0] == where


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_fills_a_device_to_the_brim_and_no_further(name):
    cell = played("r: n0=2", *(asks(f"j{number}", "1/4", submit_s=0.0) for number in range(9)), name=name)
    cell.go_on(120.0)
    assert len(cell.world.attempts) == 8
    assert {used for used, _ in cell.world.usage["n0"].shares.values()} == {1000}


def test_only_one_project_and_one_way_of_sharing_on_a_device():
    cell = played(
        "r: n0=3",
        asks("a", "1/4", project="p1"),
        asks("b", "1/4", project="p2"),
        asks("c", "1/4", project="p1", share="time"),
        asks("d", "1/4", project="p1"),
        asks("e", "1/4", project="p3"),
    )
    assert [cell.place_of(name) for name in "abcde"] == ["n0:0", "n0:1", "n0:2", "n0:0", ""]
    assert detail(cell, "e") == (
        "needs 0.25 of a GPU; 0 free in total, no GPU that it may share has room; "
        "GPUs shared by other projects, or in another way, do not count"
    )


def test_the_last_share_gives_the_whole_device_back():
    cell = played("r: n0=1", asks("a", "1/2"), asks("b", "1/4"), asks("w", "1"))
    assert cell.why("w") is WaitReasonCode.RESOURCES
    cell.end("a")
    cell.go_on(1.0)
    assert not cell.runs("w")
    cell.end("b")
    cell.go_on(1.0)
    assert cell.runs("w")
    assert cell.world.usage["n0"].shares == {}


def test_a_scheduler_that_begins_again_knows_which_device_is_shared():
    cell = played("r: n0=2", asks("a", "0.6"), asks("b", "0.7"))
    cell.scheduler = type(cell.scheduler)(cell.policy)
    cell.submit(asks("c", "0.3", seq=7), asks("d", "0.4", seq=8), asks("e", "0.1", seq=9))
    cell.go_on(1.0)
    assert [cell.place_of(name) for name in "abcde"] == ["n0:0", "n0:1", "n0:1", "n0:0", ""]


def test_a_placement_that_the_state_refuses_claims_no_device():
    """Otherwise two shared devices of a node might get one index."""
    cell = played("r: n0=2", asks("a", "1/2"))
    scheduler = cell.scheduler
    entry = scheduler.entries[JobId("a")]
    device = SharedDevice(entry.need.share_group)
    role = cell.world.jobs[JobId("a")].spec.role
    usage = PendingUsage(cell.world.usage)
    offered = scheduler.fleet_index.allocation(entry.need, entry.places, role, usage, (device,))
    assert offered.grants[0].devices == (1,)
    assert device.index == -1


def test_all_that_share_a_device_make_room_for_a_higher_priority_and_nobody_else():
    cell = played("r: n0=2", asks("a", "1/2"), asks("b", "1/2"), asks("c", "1/4"))
    cell.go_on(4000.0)
    cell.submit(asks("w", "1", priority=5, seq=9))
    cell.go_on(1.0)
    assert cell.runs("w")
    assert [cell.runs(name) for name in "abc"] == [True, True, False]  # one small job is the cheapest


def test_quotas_count_thousandths():
    fleet = make_fleet("r: n0=4").with_queues(queue("q", quota_gpus=1, borrow_gpus=0, gpus_per_user=1))
    cell = Cell(fleet)
    cell.submit(*(asks(name, "0.4", queue="q", seq=at) for at, name in enumerate("abc")))
    cell.go_on(1.0)
    assert [cell.runs(name) for name in "abc"] == [True, True, False]
    holdings = cell.world.holdings()
    assert gpus_of(holdings.held[holdings.job_node(QueueId("q"))]) == 0.8
    assert detail(cell, "c") == ("user ada uses 0.8 of at most 1 GPU per user in queue q")


def test_the_bills_of_all_shares_sum_to_the_device():
    span = Ledger(productive=1_000_003, lost=7)
    parts = [span.times(milli) for milli in (333, 333, 334)]
    assert sum(part.total for part in parts) == span.times(1000).total


def test_the_live_scheduler_places_pods_as_the_replay_of_packing_does():
    """Forty nodes, two hundred pods of a mix like that of public traces: whole devices, parts of one, and none."""
    dice = random.Random(5)
    kinds = [(0, 500, 4), (0, 250, 2), (0, 810, 3), (1, 0, 8), (2, 0, 12), (4, 0, 24), (0, 0, 6)]
    pods = [
        TraceJob(id=f"p{at}", submit_s=0.0, duration_s=0.0, gpus=gpus, share_milli=milli, cpu_milli=cpus, memory_mib=0)
        for at, (gpus, milli, cpus) in enumerate(dice.choices(kinds, (9, 6, 7, 12, 3, 1, 4), k=200))
    ]
    names = [f"n{number:02}" for number in range(40)]
    nodes = [TraceNode(name=name, gpus=2 + at % 3, model="virtual", cpu_milli=32) for at, name in enumerate(names)]
    inflate = sum(pod.gpus * 1000 + pod.share_milli for pod in pods) / sum(node.gpus * 1000 for node in nodes)
    replay = replay_packing(pods, nodes, "default", inflate=inflate, seed=3)
    cell = Cell(make_fleet("r: " + " ".join(f"{name}={node.gpus}" for name, node in zip(names, nodes, strict=True))))
    for at, pod in enumerate(replay.jobs):
        gpus = str(pod.gpus) if pod.gpus else f"{pod.share_milli / 1000}" if pod.share_milli else "0"
        cell.submit(asks(f"j{at}", gpus, seq=at, cpus=pod.cpu_milli))
        cell.plan()
        if not cell.place_of(f"j{at}"):
            cell.end(f"j{at}")  # it does not wait there either
    placed = [cell.place_of(f"j{at}").partition(":")[0] for at in range(len(replay.jobs))]
    assert placed == [names[node] if node >= 0 else "" for node in replay.node_of]
    assert placed.count("") > 10
