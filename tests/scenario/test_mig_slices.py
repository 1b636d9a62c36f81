"""MIG slices, drawn: which device and memory slices a job gets, who waits and why, who makes room, and what the books say."""

from dataclasses import replace

import pytest

from phalanx.controller.requests.mig_checks import checked_slices
from phalanx.core.errors import BadRequest, NeverFits
from phalanx.core.fleet.mig import DeviceMig, MigSlice
from phalanx.core.ids import JobId, ProjectId
from phalanx.core.lifecycle.verify import rejection_reason
from phalanx.core.scheduling.outlook.slice_times import slices_free_at_s
from phalanx.core.scheduling.policies import POLICIES
from phalanx.core.scheduling.shape import acceptable_shapes
from phalanx.core.state.plan import Placement
from phalanx.core.work.gpus import parse_gpus, with_share_kind
from phalanx.core.work.spec import LaunchMode
from phalanx.planner.facts.mig import find_mig_gpu
from tests.builders import job, make_fleet, queue, spec
from tests.cell import Cell


def divided(fleet, *, on=True, foreign=(), closed=""):
    """All devices can be divided; `foreign`: slices of others on each."""
    nodes = {}
    for node_id, node in fleet.nodes.items():
        devices = []
        for device in node.devices:
            entry = find_mig_gpu(device.model)
            assert entry is not None, device.model
            profiles = entry.profiles if on else ()
            mig = DeviceMig(on=on, profiles=profiles, slices=tuple(foreign), closed_reason=closed)
            devices.append(replace(device, model=entry.name, memory_bytes=entry.memory_bytes, mig=mig))
        nodes[node_id] = replace(node, devices=tuple(devices))
    return replace(fleet, nodes=nodes)


def asks(name, gpus, *, share="", project="gpt", **fields):
    one = job(name, gpus=with_share_kind(parse_gpus(gpus), share), **fields)
    return replace(one, project=ProjectId(project))


def played(fleet, *jobs, **policy):
    cell = Cell(fleet, **policy)
    for number, one in enumerate(jobs):
        cell.submit(replace(one, seq=number))
        cell.go_on(1.0)
    return cell


def slices(cell, name):
    """`n0:0:3g.40gb@4`: node, device, profile and start of each slice of a running job, or `-`."""
    attempt = cell.world.attempts.get(JobId(name))
    if attempt is None:
        return "-"
    return " ".join(
        f"{grant.node_id}:{one.device}:{one.profile}@{one.start}"
        for grant in attempt.allocation.grants
        for one in grant.share.slices
    )


def detail(cell, name):
    why = cell.scheduler.wait_reason(cell.world.jobs[JobId(name)])
    return "" if why is None else why.detail


PLACES = [
    (
        "neighbours of any project on one device",
        "r: n0=h100:1",
        {"a": ("h100.3g.40gb", "p1"), "b": ("h100.4g.40gb", "p2"), "c": ("h100.1g.10gb", "p3")},
        "a n0:0:3g.40gb@4; b n0:0:4g.40gb@0; c -",
    ),
    (
        "slices gather, the second device stays whole",
        "r: n0=h100:2",
        {"a": ("h100.3g.40gb", "p"), "b": ("h100.3g.40gb", "p"), "c": ("h100.7g.80gb", "p")},
        "a n0:0:3g.40gb@4; b n0:0:3g.40gb@0; c n0:1:7g.80gb@0",
    ),
    (
        "two slices on each of two nodes",
        "r: n0=h100:1 n1=h100:1",
        {"a": ("2xh100.3g.40gb:2", "p"), "b": ("h100.1g.10gb", "p")},
        "a n0:0:3g.40gb@4 n0:0:3g.40gb@0 n1:0:3g.40gb@4 n1:0:3g.40gb@0; b -",
    ),
    (
        "more slices than one device has",
        "r: n0=h100:2",
        {"a": ("h100.4g.40gb:2", "p")},
        "a n0:0:4g.40gb@0 n0:1:4g.40gb@0",
    ),
    (
        "the smallest profile that holds the memory",
        "r: n0=h100:1",
        {"a": ("20GiB", "p"), "b": ("40GiB", "p"), "c": ("10GiB", "p")},
        "a n0:0:1g.20gb@6; b n0:0:3g.40gb@0; c n0:0:1g.10gb@5",
    ),
    (
        "the smallest profile that holds the part",
        "r: n0=h100:1",
        {"a": ("1/4", "p"), "b": ("1/2", "p"), "c": ("0.1", "p"), "d": ("0.6", "p")},
        "a n0:0:1g.20gb@6; b n0:0:3g.40gb@0; c n0:0:1g.10gb@5; d -",
    ),
    (
        "the model on which the part is the smallest",
        "r: n0=a100-40gb:1 n1=h100:1",
        {"a": ("20GiB", "p")},
        "a n1:0:1g.20gb@6",
    ),
    (
        "of the model asked for",
        "r: n0=a100:1 n1=h100:1",
        {"a": ("a100.1g.10gb", "p"), "b": ("h100.1g.10gb", "p")},
        "a n0:0:1g.10gb@6; b n1:0:1g.10gb@5",
    ),
    (
        "media extensions are there once",
        "r: n0=h100:1",
        {"a": ("h100.1g.10gb+me", "p"), "b": ("h100.1g.10gb+me", "p")},
        "a n0:0:1g.10gb+me@6; b -",
    ),
]


@pytest.mark.parametrize(("fleet", "jobs", "where"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_where_slices_go(fleet, jobs, where):
    def share(gpus):
        return "" if "g." in gpus else "mig"

    cell = played(
        divided(make_fleet(fleet)),
        *(asks(name, gpus, share=share(gpus), project=project) for name, (gpus, project) in jobs.items()),
    )
    assert "; ".join(f"{name} {slices(cell, name)}" for name in jobs) == where


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_fills_a_device_and_no_further(name):
    cell = played(
        divided(make_fleet("r: n0=h100:2")),
        *(asks(f"j{number}", "h100.1g.10gb", submit_s=0.0) for number in range(16)),
        name=name,
    )
    cell.go_on(120.0)
    assert len(cell.world.attempts) == 14
    assert len({slices(cell, name) for name in cell.world.attempts}) == 14


def test_what_others_occupy_is_not_granted():
    taken = MigSlice(profile="3g.40gb", start=4, memory_slices=4)
    cell = played(
        divided(make_fleet("r: n0=h100:1"), foreign=[taken]), asks("a", "h100.4g.40gb"), asks("b", "h100.1g.10gb")
    )
    assert [slices(cell, name) for name in "ab"] == ["n0:0:4g.40gb@0", "-"]
    assert detail(cell, "b") == "needs 1 x 1g.10gb; 1 GPU has MIG mode on, none has room for such a slice"


def test_the_reason_names_the_room_that_is_left():
    cell = played(
        divided(make_fleet("r: n0=h100:1 n1=h100:1")),
        asks("a", "h100.3g.40gb"),
        asks("b", "2xh100.3g.40gb"),
        asks("c", "h100.2g.20gb:3"),
    )
    assert detail(cell, "c") == (
        "needs 3 x 2g.20gb; 2 GPUs have MIG mode on, room for 2 in total, at most 2 on one node (n1)"
    )


def test_a_divided_device_is_not_granted_as_a_whole_nor_by_mps():
    fleet = divided(make_fleet("r: n0=h100:1"))
    mixed = replace(fleet, nodes=fleet.nodes | make_fleet("r: n1=h100:1").nodes)
    cell = played(mixed, asks("a", "h100:1"), asks("b", "h100:1"), asks("c", "h100:1/2"), asks("d", "h100.1g.10gb"))
    assert [cell.place_of(name) for name in "abc"] == ["n1:0", "", ""]
    assert slices(cell, "d") == "n0:0:1g.10gb@5"


def test_a_node_may_have_divided_and_whole_devices():
    fleet = divided(make_fleet("r: n0=h100:2"))
    node = fleet.nodes["n0"]
    first = replace(node.devices[0], mig=replace(node.devices[0].mig, on=False, profiles=()))
    mixed = replace(fleet, nodes={"n0": replace(node, devices=(first, node.devices[1]))})
    cell = played(mixed, asks("a", "h100.1g.10gb"), asks("b", "h100:1"), asks("c", "h100.7g.80gb"), asks("d", "h100:1"))
    assert slices(cell, "a") == "n0:1:1g.10gb@5"
    assert [cell.place_of(name) for name in "bcd"] == ["n0:0", "", ""]


def test_a_victim_frees_all_its_slices():
    cell = played(
        divided(make_fleet("r: n0=h100:1")), asks("a", "h100.1g.10gb", priority=9), asks("b", "h100.1g.20gb:3")
    )
    assert len(slices(cell, "b").split()) == 3
    cell.go_on(4000.0)
    cell.submit(asks("c", "h100.3g.40gb", priority=5))
    cell.go_on(1.0)
    assert slices(cell, "a") != "-"
    assert slices(cell, "b") == "-"
    assert slices(cell, "c") == "n0:0:3g.40gb@0"


def test_quotas_count_memory_slices():
    """Two halves by memory are the user's whole GPU, although they have all processors of one only together."""
    cell = played(
        divided(make_fleet("r: n0=h100:2").with_queues(queue("q", gpus_per_user=1))),
        asks("a", "h100.3g.40gb", queue="q"),
        asks("b", "h100.4g.40gb", queue="q"),
        asks("c", "h100.1g.10gb", queue="q"),
    )
    assert [cell.world.attempts[JobId(name)].allocation.milli for name in "ab"] == [500, 500]
    assert detail(cell, "c") == "user ada uses 1 of at most 1 GPU per user in queue q"


def test_a_scheduler_that_begins_again_knows_the_slices():
    cell = played(divided(make_fleet("r: n0=h100:1")), asks("a", "h100.3g.40gb"), asks("b", "h100.1g.10gb"))
    before = [slices(cell, name) for name in "ab"]
    cell.scheduler = type(cell.scheduler)(cell.policy)
    cell.submit(asks("c", "h100.2g.20gb", seq=7), asks("d", "h100.2g.20gb", seq=8))
    cell.go_on(1.0)
    assert [slices(cell, name) for name in "ab"] == before
    assert len({slices(cell, name) for name in "abcd"} - {"-"}) >= 3
    cell.end("a")
    cell.go_on(1.0)
    assert "-" not in [slices(cell, name) for name in "bcd"]
    assert cell.world.usage["n0"].slices


def test_the_last_slice_leaves_nothing_in_the_books():
    cell = played(divided(make_fleet("r: n0=h100:1")), asks("a", "h100.3g.40gb:2"))
    cell.end("a")
    cell.go_on(1.0)
    usage = cell.world.usage.get("n0")
    assert usage is None or (not usage.devices and not usage.shares and not usage.slices)


NEVER = [
    ("h100.1g.10gb", {"on": False}, "no node has MIG mode on for its h100-80gb", "nvidia-smi -i GPU -mig 1"),
    ("h100.1g.11gb", {}, "h100-80gb has no MIG profile 1g.11gb", "did you mean 1g.10gb?"),
    ("a100.1g.10gb", {}, "no node has a GPU of model a100 that MIG can divide", "this fleet has: h100-80gb"),
    (
        "h100:1",
        {},
        "every GPU of model h100 has MIG mode on, so it is granted in slices only",
        "7g.80gb for a whole h100-80gb",
    ),
    ("h100:1/2", {}, "every GPU of model h100 has MIG mode on", "1g.10gb for a small part of it"),
    (
        "h100.4g.40gb:3",
        {},
        "1 node x 3 MIG slices 4g.40gb can never fit: the fleet has 1 node, at most 2 such MIG slices",
        "",
    ),
    (
        "h100.1g.10gb",
        {"closed": "no permission"},
        "GPUs of model h100 have MIG mode on, but no slices can be made there: no permission",
        "list the nodes",
    ),
    ("h100:1", {"closed": "no permission"}, "have MIG mode on, but no slices can be made there", "list the nodes"),
]


@pytest.mark.parametrize(("gpus", "state", "why", "hint"), NEVER, ids=[f"{row[0]} {row[1]}" for row in NEVER])
def test_what_can_never_fit_is_refused_with_the_next_step(gpus, state, why, hint):
    fleet = divided(make_fleet("r: n0=h100:2"), **state)
    with pytest.raises(NeverFits) as refused:
        acceptable_shapes(spec(gpus=parse_gpus(gpus)).role, fleet.nodes.values())
    assert why in refused.value.message
    assert hint in str(refused.value.hint)


WRONG = [
    ("another start", {"start": 1}, "has no profile 3g.40gb at memory slice 1"),
    ("a profile that it lacks", {"profile": "3g.71gb"}, "has no profile 3g.71gb"),
    ("of another size", {"memory_slices": 2}, "has no profile 3g.40gb"),
]


@pytest.mark.parametrize(("change", "why"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_placement_that_the_device_cannot_have_is_rejected(change, why):
    cell = played(divided(make_fleet("r: n0=h100:1")), asks("a", "h100.3g.40gb"))
    placed = cell.world.attempts[JobId("a")].allocation
    cell.fails("a")
    grant = placed.grants[0]
    assert rejection_reason(cell.world, Placement(job_id=JobId("a"), allocation=placed)) == ""
    other = replace(grant.share, slices=(replace(grant.share.slices[0], **change),))
    wrong = replace(placed, grants=(replace(grant, share=other),))
    assert why in rejection_reason(cell.world, Placement(job_id=JobId("a"), allocation=wrong))
    off = replace(cell.world.nodes["n0"], devices=divided(make_fleet("r: n0=h100:1"), on=False).nodes["n0"].devices)
    cell.put(off)
    assert "MIG mode is off" in rejection_reason(cell.world, Placement(job_id=JobId("a"), allocation=placed))


def test_when_slices_become_free_is_known_from_the_jobs_that_hold_them():
    cell = played(
        divided(make_fleet("r: n0=h100:1")),
        asks("a", "h100.4g.40gb"),
        asks("b", "h100.1g.20gb:2"),
        asks("c", "7g.80gb"),
    )
    board = cell.scheduler.board
    ends = dict(zip((cell.scheduler.entries[JobId(name)].seq for name in "ab"), (100.0, 40.0), strict=True))
    before = [slices(cell, name) for name in "ab"]

    def free_at_s(name, ahead=()):
        (need,) = cell.scheduler.needs_of(asks("x", name))
        return slices_free_at_s(board, [need], 0, ahead, lambda entry: ends[entry.seq])

    waiting = [cell.scheduler.entries[JobId("c")]]
    assert [free_at_s(name) for name in ("1g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")] == [40.0, 40.0, 100.0, 100.0]
    assert free_at_s("1g.10gb", waiting) == float("inf")
    assert [slices(cell, name) for name in "ab"] == before
    assert board.find(waiting[0]) is None


CHECKED = [
    ("h100.1g.11gb", "has no MIG profile 1g.11gb", "did you mean 1g.10gb?"),
    ("a100.1g.11gb", "a100 has no MIG profile 1g.11gb", "did you mean"),
    ("9g.99gb", "no GPU has a MIG profile 9g.99gb", "the model has 1g.10gb"),
    ("1g.10gb", "1g.10gb is ambiguous: a100-80gb and h100-80gb have it", "name the model: a100-80gb.1g.10gb"),
]


@pytest.mark.parametrize(("gpus", "why", "hint"), CHECKED, ids=[row[0] for row in CHECKED])
def test_a_wrong_profile_is_refused_with_the_nearest(gpus, why, hint):
    nodes = divided(make_fleet("r: n0=h100:1 n1=a100:1" if gpus == "1g.10gb" else "r: n0=h100:1")).nodes.values()
    with pytest.raises(BadRequest) as refused:
        checked_slices(spec(gpus=parse_gpus(gpus)).role, nodes, has_steps=False)
    assert why in refused.value.message
    assert hint in str(refused.value.hint)


def test_what_a_slice_takes_is_recorded_at_submit():
    nodes = divided(make_fleet("r: n0=h100:1")).nodes.values()
    checked = checked_slices(spec(gpus=parse_gpus("2xh100.3g.40gb:2")).role, nodes, has_steps=False)
    assert checked.gpus.milli == 2000
    unknown = checked_slices(spec(gpus=parse_gpus("b200.3g.90gb")).role, nodes, has_steps=False)
    assert unknown.gpus.milli == 500


def test_one_process_for_several_slices_is_refused_unless_it_is_a_batch_script():
    role = replace(spec(gpus=parse_gpus("h100.1g.10gb:2")).role, launch=LaunchMode.PER_NODE)
    with pytest.raises(BadRequest, match="a process can use only one"):
        checked_slices(role, (), has_steps=False)
    assert checked_slices(role, (), has_steps=True).gpus.milli == 250
    two_tasks = replace(role, launch=LaunchMode.FIXED, tasks_per_node=2)
    assert checked_slices(two_tasks, (), has_steps=False).gpus.milli == 250


def test_a_device_that_breaks_or_loses_its_mode_under_its_slices_stops_no_scheduler():
    cell = played(divided(make_fleet("r: n0=h100:2")), asks("a", "h100.4g.40gb"), asks("b", "h100.7g.80gb"))
    node = cell.world.nodes["n0"]
    first, second = node.devices
    for devices in (
        (replace(first, healthy=False), second),
        divided(make_fleet("r: n0=h100:2"), on=False).nodes["n0"].devices,
    ):
        cell.put(replace(node, devices=tuple(devices)))
        cell.submit(asks(f"c{len(cell.world.jobs)}", "h100.1g.10gb"))
        cell.go_on(10.0)
        assert [cell.runs(name) for name in "ab"] == [True, True]
    cell.put(node)
    cell.go_on(10.0)
    assert slices(cell, "c2") != slices(cell, "c3")
    for name in ("a", "b", "c2", "c3"):
        cell.end(name)
    cell.go_on(10.0)
    assert not cell.world.usage["n0"].slices
