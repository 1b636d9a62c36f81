"""The plan of a job: from `--plan` and `plan:` to the shape that it is placed in and the environment of its ranks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import BadRequest, PhalanxError
from phalanx.core.fleet.device import Device
from phalanx.core.fleet.node import Node, NodeState
from phalanx.core.ids import Epoch, Generation, JobId, NodeId
from phalanx.core.scheduling.submission import plan_notes, with_whole_tensor_groups
from phalanx.core.state.commands import PrepareTasks, StartTasks
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.gang_topology import (
    GangTopology,
    gang_topology,
    gang_topology_from_json,
    gang_topology_to_json,
    linked_run_length,
)
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.job_file.plan_key import layout_text, planned_layout, tensor_span
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.layouts.layout import (
    PRECISIONS,
    Axis,
    Layout,
    Recompute,
    layout_from_json,
    parse_layout,
    validated_layout,
)
from phalanx.node.logic.variables.environment import MemberFolders, NodeContext, rank_environment


def spec(**keys):
    return spec_from_mapping({"run": "python train.py", **keys}, workdir="/w")


def refused(**keys):
    with pytest.raises(PhalanxError) as caught:
        spec(**keys)
    return caught.value


def node(name, gpus, **labels):
    return Node(
        id=NodeId(name),
        engine="local",
        cpus=16,
        memory_bytes=1 << 36,
        state=NodeState.UP,
        labels=labels,
        devices=tuple(
            Device(index=index, uuid=f"{name}-{index}", model="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)
            for index in range(gpus)
        ),
    )


def test_layout_asks_for_as_many_gpus_as_it_has_ranks():
    assert spec(plan="tp=2,pp=2,fsdp=2").role.gpus == GpuRequest(total=8)
    assert spec(plan="tp=2,fsdp=4", nodes=2).role.gpus == GpuRequest(total=8, nodes=2, per_node=4)
    assert spec(plan="single").role.gpus == GpuRequest(total=1)


def test_auto_asks_for_nothing_by_itself():
    assert (spec(plan=" AUTO ").plan, spec(plan="auto").role.gpus.total) == ("auto", 0)
    assert spec(plan="auto", gpus=16).role.gpus.total == 16


def test_plan_is_kept_as_people_write_it():
    assert spec(plan="fsdp=2, TP=4,pp=1").plan == "tp=4,fsdp=2"
    assert spec().plan == ""


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=8, shard=4, zero=3, micro_batch=2, recompute=Recompute.FULL),
        Layout(shard=4, zero=0),
        Layout(shard=4, zero=1, pipeline=2, interleave=3, sequence=False, precision="fp8", micro_batches=16),
        Layout(
            tensor=2,
            replicate=4,
            sequence=True,
            order=(Axis.REPLICATE, Axis.TENSOR, Axis.CONTEXT, Axis.SHARD, Axis.PIPELINE),
        ),
    ],
)
def test_layout_in_words_reads_back_whole(layout):
    assert parse_layout(layout_text(layout)) == layout


degrees = st.sampled_from([1, 2, 3, 8])


@given(
    st.builds(
        Layout,
        tensor=degrees,
        sequence=st.booleans(),
        pipeline=degrees,
        interleave=degrees,
        context=degrees,
        expert=degrees,
        shard=degrees,
        replicate=degrees,
        zero=st.integers(0, 3),
        micro_batch=degrees,
        micro_batches=degrees,
        recompute=st.sampled_from(Recompute),
        precision=st.sampled_from(PRECISIONS),
        order=st.permutations(list(Axis)).map(tuple),
    )
)
def test_any_layout_that_can_be_reads_back_from_its_words(layout):
    try:
        validated_layout(layout)
    except BadRequest:
        return
    assert parse_layout(layout_text(layout)) == layout
    assert spec(plan=layout_text(layout)).role.gpus.total == layout.ranks


def test_ranks_must_be_the_gpus():
    error = refused(plan="tp=2,fsdp=2", gpus=8)
    assert error.message == "plan tp=2,fsdp=2 is for 4 ranks, but the job requests 8 GPUs"
    assert error.hint == "ask for 4 GPUs, or write fsdp=4"
    assert refused(plan="tp=3", gpus=8).hint == "ask for 3 GPUs, or leave them out"
    assert refused(plan="tp=2", gpus=8).hint == "ask for 2 GPUs, or write dp=4"
    assert "3 nodes" in refused(plan="tp=2", nodes=3).message


def test_tasks_of_a_job_on_cpus_are_ranks_too():
    assert spec(plan="tp=2,dp=2", tasks_per_node=4).role.gpus.total == 0
    assert "2 tasks" in refused(plan="tp=2,dp=2", tasks_per_node=2).message


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("fast", "neither auto nor a layout"),
        ("tp=0", "1 to"),
        ("tp=2,tp=4", "given twice"),
        ("tq=2", "unknown field"),
        ("vpp=2", "needs a pipeline"),
        ({"model": "x"}, "only a layout"),
    ],
)
def test_no_plan_is_refused_in_one_line(plan, words):
    error = refused(plan=plan)
    assert error.message.startswith("plan: ")
    assert words in error.message
    assert "\n" not in error.message


def test_words_of_others_lead_to_plan():
    assert refused(layout="tp=2").hint == "did you mean 'plan'?"


def test_tensor_groups_stay_inside_a_node():
    fleet = [node(f"n{at}", 8) for at in range(4)]
    shaped = with_whole_tensor_groups(spec(plan="tp=8,fsdp=2"), fleet)
    assert shaped.role.gpus == GpuRequest(total=16, nodes=2, per_node=8)
    assert plan_notes(shaped, fleet) == ["layout tp=8,fsdp=2: 16 ranks"]


def test_twelve_ranks_of_pairs_go_on_three_nodes_of_four():
    fleet = [node(f"n{at}", 4) for at in range(4)]
    assert with_whole_tensor_groups(spec(plan="tp=2,dp=6"), fleet).role.gpus == GpuRequest(
        total=12, nodes=3, per_node=4
    )


def test_pairs_on_nodes_of_three_leave_a_device_idle_rather_than_cross():
    fleet = [node(f"n{at}", 3) for at in range(4)]
    assert with_whole_tensor_groups(spec(plan="tp=2,dp=3"), fleet).role.gpus == GpuRequest(total=6, nodes=3, per_node=2)


def test_group_wider_than_a_node_is_told():
    fleet = [node(f"n{at}", 4) for at in range(4)]
    wide = with_whole_tensor_groups(spec(plan="tp=8,dp=2"), fleet)
    assert wide.role.gpus.nodes is None
    assert plan_notes(wide, fleet)[1] == "tensor parallel over 8 ranks crosses nodes: a node of this job has 4"
    racked = [node(f"n{at}", 4, nvlink="r0") for at in range(4)]
    assert plan_notes(wide, racked)[1].endswith("; within one NVLink domain this is as fast as within a node")


def test_shape_that_cuts_groups_is_told_and_kept():
    fleet = [node(f"n{at}", 4) for at in range(4)]
    asked = spec(plan="tp=2,dp=3", gpus="2x3")
    assert with_whole_tensor_groups(asked, fleet) == asked
    assert "some groups cross nodes" in plan_notes(asked, fleet)[1]


def test_group_spans_what_lies_inside_it():
    order = (Axis.SHARD, Axis.TENSOR, Axis.CONTEXT, Axis.PIPELINE, Axis.REPLICATE)
    assert tensor_span(Layout(tensor=2, shard=4, zero=3)) == 2
    assert tensor_span(Layout(tensor=2, shard=4, zero=3, order=order)) == 8


def test_auto_is_told():
    assert plan_notes(spec(plan="auto", gpus=8), []) == [
        "plan auto: the ranks choose the layout once the script provides its model"
    ]
    assert plan_notes(spec(gpus=8), []) == []


def allocation(*names, gpus=2):
    return Allocation(
        grants=tuple(
            NodeGrant(
                node_id=NodeId(name),
                node_rank=rank,
                devices=tuple(range(gpus)),
                cpus=1,
                memory_bytes=0,
                tasks=gpus,
                first_rank=rank * gpus,
            )
            for rank, name in enumerate(names)
        )
    )


def test_surroundings_are_what_the_gang_was_given():
    fleet = {name: node(name, 4, network="400gbit", nvlink=f"rack{name < 'c'}") for name in "abcd"}
    found = gang_topology(allocation(*"abcd"), fleet)
    assert found == GangTopology(
        gpu="NVIDIA H100 80GB HBM3",
        memory_bytes=80 << 30,
        virtual=False,
        nodes=4,
        gpus_per_node=2,
        linked_nodes=2,
        network_gbit=400.0,
    )
    assert gang_topology_from_json(json.loads(json.dumps(gang_topology_to_json(found)))) == found
    assert gang_topology(allocation("a", "gone"), fleet) is None


def test_network_is_told_where_all_nodes_say_the_same():
    named = gang_topology(
        allocation("a", "b"), {"a": node("a", 2, network="ib-ndr"), "b": node("b", 2, network="ib-ndr")}
    )
    assert named is not None
    assert (named.network, named.network_gbit) == ("ib-ndr", 0.0)
    mixed = gang_topology(allocation("a", "b"), {"a": node("a", 2, network="400gbit"), "b": node("b", 2)})
    assert mixed is not None
    assert (mixed.network, mixed.network_gbit) == ("", 0.0)


def test_nodes_of_unknown_place_are_linked_with_none():
    assert linked_run_length([node("a", 1), node("b", 1)]) == 1
    assert linked_run_length([node("a", 1, nvlink="r"), node("b", 1), node("c", 1, nvlink="r")]) == 1
    assert linked_run_length([node("a", 1, nvlink="r"), node("b", 1, nvlink="r")]) == 2


def test_later_releases_may_say_more_of_a_machine():
    base = {"gpu": "x", "memory_bytes": 1, "virtual": False, "nodes": 1, "gpus_per_node": 1}
    assert gang_topology_from_json({**base, "colour": "red"}).gpu == "x"
    with pytest.raises(BadRequest, match="PHALANX_MACHINE"):
        gang_topology_from_json({"gpu": "x"})
    with pytest.raises(BadRequest, match="not a whole number"):
        gang_topology_from_json({**base, "nodes": "two"})


def environment(plan):
    asked = spec(plan=plan, gpus=4)
    order = PrepareTasks(
        node_id=NodeId("a"),
        job_id=JobId("7"),
        epoch=Epoch(1),
        generation=Generation(0),
        spec=asked,
        allocation=allocation("a", "b"),
        addresses=("10.0.0.1", "10.0.0.2"),
        candidates=(),
        checkpoint_dir="/c",
        output_dir="/o",
        deadline_s=None,
        restarts=0,
        mtbf_s=1.0,
        surroundings=gang_topology(allocation("a", "b"), {"a": node("a", 2), "b": node("b", 2)}),
    )
    start = StartTasks(
        node_id=NodeId("a"), job_id=JobId("7"), epoch=Epoch(1), generation=Generation(0), port=29500, resume=None
    )
    view = NodeContext(
        base={"PHALANX_LAYOUT": "of another job"},
        devices=("u0", "u1"),
        virtual=False,
        folders=MemberFolders(hostfile="h", page="p", reports="r"),
    )
    return rank_environment(order, start, order.allocation.grants[0], 0, view)[0]


def test_ranks_find_the_layout_and_the_machine():
    env = environment("tp=2,fsdp=2")
    assert layout_from_json(json.loads(env["PHALANX_LAYOUT"])) == planned_layout("tp=2,fsdp=2")
    assert gang_topology_from_json(json.loads(env["PHALANX_MACHINE"])).nodes == 2
    assert environment("auto")["PHALANX_LAYOUT"] == "auto"


def test_job_without_a_plan_is_told_nothing():
    assert not {"PHALANX_LAYOUT", "PHALANX_MACHINE"} & set(environment(""))
