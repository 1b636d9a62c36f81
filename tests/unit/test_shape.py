"""What a request becomes on a fleet: one shape for every model that would do."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from phalanx.core.errors import NeverFits
from phalanx.core.fleet.summary import NodeKinds, node_kind, summary_from_counts, summary_of
from phalanx.core.scheduling.shape import acceptable_shapes, preferred_shape
from phalanx.core.work.gpus import GpuRequest, parse_gpus
from phalanx.core.work.spec import Role
from tests.builders import gpu, make_fleet, make_node, spec

MIXED = "r0: n0=h200:8 n1=h200:8 | r1: n2=h100:8 n3=h100:8 n4=h100:8 n5=h100:8 | r2: n6=a100-40gb:4 n7=a100-80gb:4"


def shapes(gpus, fleet=MIXED, **fields):
    """Each as `model NODESxDEVICES`, best first."""
    nodes = make_fleet(fleet).nodes.values()
    found = acceptable_shapes(spec(gpus=gpus, **fields).role, nodes)
    return [
        f"{one.model or 'any'} {one.nodes}{f'..{one.nodes_max}' if one.nodes_max else ''}x{one.devices}{f'+{one.last_node_devices}' if one.last_node_devices else ''}"
        for one in found
    ]


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        ("h200,h100:8", ["h200 1x8", "h100 1x8"]),
        ("h100,h200:8", ["h100 1x8", "h200 1x8"]),
        ("h200,h100:32", ["h100 4x8"]),  # two nodes of h200 do not hold it
        ("4xh200,h100:8", ["h100 4x8"]),
        ("a100-80gb,h100:4", ["a100 1x4", "h100 1x4"]),
        ("a100-80gb,h100:8", ["h100 1x8"]),  # only one node has the large cards
        ("a100:8", ["a100 2x4"]),
        ("h100,a100:8", ["h100 1x8", "a100 2x4"]),  # the shape differs by model
        ("2..8xh200,h100:8", ["h200 2..8x8", "h100 2..8x8"]),
        ("v100,h100:8", ["h100 1x8"]),  # a model that is not here is passed over
    ],
)
def test_kinds_are_taken_in_the_order_written(gpus, want):
    assert shapes(gpus) == want


@pytest.mark.parametrize(
    ("gpus", "want"),
    [
        ("8", ["h100 1x8", "h200 1x8", "a100 2x4"]),  # fewest nodes first, then by name
        ("4", ["a100 1x4", "h100 1x4", "h200 1x4"]),
        ("32", ["h100 4x8"]),
        ("2x8", ["h100 2x8", "h200 2x8"]),
        ("0", ["any 1x0"]),
    ],
)
def test_gang_without_a_model_takes_any_one(gpus, want):
    assert shapes(gpus) == want


def test_gang_never_mixes_models():
    """Six nodes of 8 are there, but no more than four of one model."""
    with pytest.raises(NeverFits) as refused:
        shapes("6x8")
    assert refused.value.message == (
        "6 nodes x 8 = 48 GPUs can never fit: the fleet has 8 nodes, a100: at most 4 on one node, 8 in total; h100: at most 8 on one node, 32 in total; "
        "h200: at most 8 on one node, 16 in total"
    )
    assert refused.value.hint == "4xh100:8 would fit"


def test_fleet_of_one_model_needs_no_name():
    assert shapes("16", "r: n0=h100:8 n1=h100:8") == ["any 2x8"]


def test_word_that_means_two_models_of_the_fleet_gives_one_shape_each():
    """`h100` is both, and a gang is of one: the fleet's own names part them."""
    plain, nvl = make_node("n0", "h100:8"), make_node("n1", "h100:8")
    nvl = replace(nvl, devices=tuple(replace(device, model="H100 NVL") for device in nvl.devices))
    found = acceptable_shapes(spec(gpus="h100:8").role, [plain, nvl])
    assert [(one.model, one.nodes, one.exact) for one in found] == [("H100 NVL", 1, True), ("h100", 1, True)]
    assert [one.accepts(plain.devices[0]) for one in found] == [False, True]


@pytest.mark.parametrize(
    ("total", "fleet", "want"),
    [
        (19, "n0=8 n1=8 n2=8", ["any 2x8+3"]),
        (16, "n0=8 n1=8", ["any 2x8"]),
        (5, "n0=8", ["any 1x5"]),
        (12, "n0=8 n1=4", ["any 1x8+4"]),
        (24, "n0=8 n1=4 n2=4 n3=4 n4=4 n5=4", ["any 6x4"]),  # one node of 8: the whole nodes are those of 4
        (25, "n0=8 n1=4 n2=4 n3=4 n4=4 n5=4 n6=4", ["any 6x4+1"]),
    ],
)
def test_uneven_gang_takes_whole_nodes_and_the_rest_on_one_more(total, fleet, want):
    assert shapes(gpu(total, uneven=True), fleet) == want


def test_uneven_gang_starts_tasks_by_part():
    one = preferred_shape(spec(gpus=gpu(19, uneven=True)).role, make_fleet("n0=8 n1=8 n2=8").nodes.values())
    assert (one.tasks, one.last_node_tasks, str(one)) == (8, 3, "2 nodes x 8 + 3 = 19 GPUs")


def test_uneven_gang_that_never_fits_says_so():
    with pytest.raises(NeverFits, match=r"^3 nodes x 8 \+ 1 = 25 GPUs can never fit: the fleet has 3 nodes"):
        shapes(gpu(25, uneven=True), "n0=8 n1=8 n2=8")


def test_elastic_gang_fits_if_the_fewest_do():
    one = preferred_shape(spec(gpus="2..8x8").role, make_fleet("n0=8 n1=8 n2=8").nodes.values())
    assert (one.gpus, str(one)) == (16, "2..8 nodes x 8 = 16..64 GPUs")
    with pytest.raises(NeverFits, match=r"^4\.\.8 nodes x 8"):
        shapes("4..8x8", "n0=8 n1=8 n2=8")


@pytest.mark.parametrize(
    ("gpus", "fleet", "fields", "message", "hint"),
    [
        ("h200:1", "n0=4", {}, "no node has a GPU of model h200", "this fleet has: virtual"),
        ("h200,a100-80gb:1", "n0=4", {}, "no node has a GPU that is h200 or a100 of 80 GiB", "this fleet has: virtual"),
        (
            "3x8",
            "n0=8 n1=8 n2=4",
            {},
            "3 nodes x 8 = 24 GPUs can never fit: the fleet has 3 nodes, at most 8 matching GPUs on one node, 20 in total",
            "2x8 would fit",
        ),
        (
            "2x8",
            "n0=4 n1=4 n2=4 n3=4",
            {},
            "2 nodes x 8 = 16 GPUs can never fit: the fleet has 4 nodes, at most 4 matching GPUs on one node, 16 in total",
            "16 would fit as 4x4",
        ),
        (
            "64",
            "n0=8 n1=8",
            {},
            "64 GPUs can never fit: the fleet has 2 nodes, at most 8 matching GPUs on one node, 16 in total",
            "2x8 would fit",
        ),
        (
            "2x4",
            "n0=4 n1=4",
            {"cpus": 33},
            "2 nodes x 4 = 8 GPUs with 33 CPUs each can never fit: the fleet has 2 nodes, at most 4 matching GPUs on one node, 8 in total",
            "a node has at most 32 CPUs and 256 GiB",
        ),
        (
            gpu(nodes=3, per_node=0),
            "n0=4 n1=4",
            {},
            "3 nodes can never fit: the fleet has 2 nodes, at most 4 matching GPUs on one node, 8 in total",
            "request at most 2 nodes",
        ),
    ],
)
def test_refusal_says_what_there_is_and_what_would_fit(gpus, fleet, fields, message, hint):
    with pytest.raises(NeverFits) as refused:
        shapes(gpus, fleet, **fields)
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_node_with_cpus_and_another_with_gpus_are_told_apart():
    """Each of both asks is met somewhere, but by no one node."""
    nodes = [make_node("n0", 8, cpus=4), make_node("n1", 0, cpus=64)]
    with pytest.raises(NeverFits, match=r"^1 node x 8 = 8 GPUs with 16 CPUs each can never fit"):
        preferred_shape(spec(gpus=8, cpus=16).role, nodes)


def test_hint_can_be_typed_back():
    with pytest.raises(NeverFits) as refused:
        shapes("9xa100-80gb:4", "n0=a100-80gb:4 n1=a100-80gb:4")
    asked = refused.value.hint.split(" ")[0]
    assert parse_gpus(asked) == GpuRequest(total=8, nodes=2, per_node=4, model="a100", memory_gib=80)


def test_summary_counts_equal_nodes_together_and_sick_devices_not_at_all():
    fleet = make_fleet("r0: n0=8 n1=8 | r1: n2=4").sick("n1", 0)
    summary = summary_of(fleet.nodes.values())
    assert [(kind.devices[0][2], count) for kind, count in summary.kinds] == [(4, 1), (7, 1), (8, 1)]
    assert summary_of(reversed(fleet.nodes.values())) == summary
    assert summary.nodes == 3
    assert summary.sizes(None, 0) == {4: 1, 7: 1, 8: 1}


@given(
    st.lists(st.tuples(st.sampled_from(("h100", "h200")), st.integers(0, 8)), min_size=1, max_size=8),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_shape_fits_the_empty_fleet_and_a_refused_total_has_none(sizes, total, uneven):
    nodes = [make_node(f"n{at}", f"{model}:{count}") for at, (model, count) in enumerate(sizes)]
    role = Role(argv=("x",), gpus=GpuRequest(total=total, uneven=uneven))
    try:
        found = acceptable_shapes(role, summary_of(nodes))
    except NeverFits:
        found = ()
    assert found == (acceptable_shapes(role, nodes) if found else ())
    for one in found:
        assert one.gpus == total
        room = sorted((sum(one.accepts(device) for device in node.devices) for node in nodes), reverse=True)
        assert all(size >= one.devices for size in room[: one.nodes])
        assert len(room) >= one.nodes
        assert not one.last_node_devices or (len(room) > one.nodes and room[one.nodes] >= one.last_node_devices)
    if not uneven:
        for model in ("h100", "h200"):
            room = sorted((count for kind, count in sizes if kind == model), reverse=True)
            able = any(total % parts == 0 and room[parts - 1] >= total // parts for parts in range(1, len(room) + 1))
            assert able <= any(one.model in (None, model) for one in found)


def test_kind_of_a_node_does_not_know_its_name():
    assert node_kind(make_node("n0", 8)) == node_kind(make_node("n1", 8))
    assert node_kind(make_node("n0", 8)) != node_kind(make_node("n1", 8, cpus=64))


def test_the_kind_of_a_node_follows_its_record():
    kinds, one = NodeKinds(), make_node("n0", 2)
    before = summary_from_counts(kinds.count_kinds([one]))
    assert kinds.kind_of(one) is kinds.kind_of(one)
    smaller = replace(one, devices=one.devices[:1])
    assert summary_from_counts(kinds.count_kinds([smaller])) == summary_of([smaller]) != before
