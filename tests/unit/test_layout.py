import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import (
    DEFAULT_AXIS_ORDER,
    Axis,
    Layout,
    Recompute,
    layout_from_json,
    layout_to_json,
    parse_layout,
    validated_layout,
)

degrees = st.integers(1, 16)


@st.composite
def layouts(draw):
    tensor, pipeline, shard = draw(degrees), draw(degrees), draw(degrees)
    return Layout(
        tensor=tensor,
        sequence=tensor > 1 and draw(st.booleans()),
        pipeline=pipeline,
        interleave=draw(degrees) if pipeline > 1 else 1,
        context=draw(st.integers(1, 4)),
        shard=shard,
        replicate=draw(st.integers(1, 4)),
        zero=draw(st.sampled_from([0, 1, 2, 3] if shard > 1 else [0, 1, 2])),
        micro_batch=draw(degrees),
        micro_batches=draw(degrees),
        recompute=draw(st.sampled_from(Recompute)),
        precision=draw(st.sampled_from(["bf16", "fp8"])),
        order=tuple(draw(st.permutations(DEFAULT_AXIS_ORDER))),
    )


@given(layouts())
def test_a_layout_survives_json(layout):
    assert layout_from_json(layout_to_json(layout)) == layout


@given(layouts())
def test_every_rank_has_a_place_of_its_own(layout):
    ranks = min(layout.ranks, 4096)
    places = {tuple(layout.coordinates(rank).items()) for rank in range(ranks)}
    assert len(places) == ranks


@given(layouts())
def test_a_neighbour_along_an_axis_is_one_stride_away(layout):
    for axis in Axis:
        if layout.size(axis) > 1:
            here, there = layout.coordinates(0), layout.coordinates(layout.stride(axis))
            assert {one for one in Axis if here[one] != there[one]} == {axis}


def test_tensor_neighbours_are_next_to_each_other_and_stages_far_apart():
    layout = parse_layout("tp=4,fsdp=2,pp=2")
    assert [layout.stride(axis) for axis in (Axis.TENSOR, Axis.SHARD, Axis.PIPELINE)] == [1, 4, 8]


@pytest.mark.parametrize(
    "text", ["tp=2,pp=2,fsdp=4", "tp=8,cp=2,sp=1", "dp=4", "pp=4,vpp=2,mbs=2,accumulate=8,recompute=full", "single"]
)
def test_what_is_printed_is_what_was_written(text):
    assert str(parse_layout(text)) == text


def test_sharding_means_all_three_unless_said_otherwise():
    assert (parse_layout("fsdp=4").zero, parse_layout("fsdp=4,zero=1").zero, parse_layout("dp=4").zero) == (3, 1, 0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tp", "not name=value"),
        ("tp=2,tp=4", "twice"),
        ("tensr=2", "did you mean"),
        ("tp=0", "must be 1"),
        ("tp=-2", "must be 1"),
        ("tp=two", "whole number"),
        ("zero=4", "0 to 3"),
        ("recompute=some", "none, selective, full"),
        ("precision=fp7", "bf16, fp16"),
        ("vpp=2", "needs a pipeline"),
        ("sp=1", "tp is 1"),
        ("ep=3", "does not divide"),
        ("fsdp=1,zero=3", "fsdp is 1"),
        ("order=tensor-context", "each of"),
        ("dp=1048576,tp=8", "more than the maximum"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text, line):
    with pytest.raises(BadRequest) as refused:
        parse_layout(text)
    told = f"{refused.value.message} {refused.value.hint}"
    assert line in told
    assert "\n" not in told


def test_a_rank_past_the_last_is_an_error():
    with pytest.raises(ValueError, match="rank 8 of 8"):
        parse_layout("tp=8").coordinates(8)


def test_checked_gives_the_layout_back():
    layout = Layout(tensor=2, replicate=4)
    assert validated_layout(layout) is layout
