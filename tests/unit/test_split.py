"""Whether a layout can split a model, in one line; and what becomes of a layout when ranks come or go."""

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.core.work.layouts.layout_split import (
    SplitLimits,
    check_split,
    layers_per_chunk,
    resize_layout,
)

GPT = SplitLimits(
    layers=8, heads=16, kv_heads=4, widths=(("mlp.up (columns)", 4096),), sequence=2048, batch=64, experts=1
)


@pytest.mark.parametrize(
    "layout", ["single", "tp=4", "pp=8,accumulate=8", "pp=2,vpp=4,accumulate=4", "cp=8", "tp=2,sp=1,cp=2", "fsdp=64"]
)
def test_layout_that_divides_what_it_splits_is_taken(layout):
    check_split(parse_layout(layout), GPT)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("tp=3", "16 heads cannot be shared by tp=3 ranks"),
        ("tp=8", "4 key-value heads cannot be shared by tp=8 ranks"),
        ("pp=16,accumulate=16", "8 layers are fewer than the 16 chunks of pp=16 x vpp=1"),
        ("pp=4,vpp=4,accumulate=4", "8 layers are fewer than the 16 chunks of pp=4 x vpp=4"),
        ("pp=4,accumulate=2", "pp=4 needs at least 4 micro-batches to fill its stages, but has 2"),
        ("pp=2,vpp=2,accumulate=5", "interleaved stages take 5 micro-batches in 2 rounds"),
        ("cp=3", "needs 6 equal pieces of a sequence, but 2048 positions do not divide"),
        ("fsdp=3", "global batch 64 is not divisible by 3 data-parallel ranks x 1 micro-batches"),
        ("dp=4,accumulate=3", "global batch 64 is not divisible by 4 data-parallel ranks x 3 micro-batches"),
    ],
)
def test_layout_that_does_not_divide_is_refused_with_the_two_numbers(layout, says):
    with pytest.raises(BadRequest) as refused:
        check_split(parse_layout(layout), GPT)
    assert says in refused.value.message
    assert refused.value.hint
    assert "\n" not in refused.value.message + refused.value.hint


def test_width_of_the_mlp_is_named():
    with pytest.raises(BadRequest, match=r"mlp.up \(columns\): 4096 features cannot be shared by tp=3"):
        check_split(parse_layout("tp=3"), SplitLimits(widths=GPT.widths))


def test_what_is_unknown_is_not_judged():
    check_split(parse_layout("tp=3,fsdp=5,cp=7"), SplitLimits())


def test_sequence_parallel_needs_positions_for_every_rank():
    with pytest.raises(BadRequest, match="splits 2050 positions over tp=4 x cp=1"):
        check_split(parse_layout("tp=4,sp=1"), SplitLimits(sequence=2050))


@pytest.mark.parametrize(
    ("layout", "ranks", "becomes"),
    [
        ("fsdp=8", 4, "fsdp=4,accumulate=2"),  # half the ranks, each with twice the micro-batches
        ("fsdp=4,accumulate=2", 8, "fsdp=8"),
        ("dp=8", 4, "dp=4,accumulate=2"),
        ("tp=2,fsdp=4", 4, "tp=2,fsdp=2,accumulate=2"),
        ("fsdp=4,dp=4", 8, "fsdp=4,dp=2,accumulate=2"),  # replicas first: no state moves
        ("fsdp=4,dp=4", 6, "fsdp=6"),  # 16 micro-batches are no multiple of 6: the global batch must follow
        ("tp=2,pp=2,fsdp=2,accumulate=4", 4, "tp=2,pp=2,accumulate=8"),
        ("pp=2,dp=2,accumulate=2", 8, "pp=2,dp=4,accumulate=2"),  # fewer could not fill the stages
        ("tp=4", 4, "tp=4"),
    ],
)
def test_ranks_that_come_or_go_change_data_parallelism_alone(layout, ranks, becomes):
    assert resize_layout(parse_layout(layout), ranks) == parse_layout(becomes)


def test_ranks_that_hold_no_whole_copy_of_the_model_are_refused():
    with pytest.raises(BadRequest, match="is for 8 ranks, but the job has 6; the number must be a multiple of 4"):
        resize_layout(parse_layout("tp=2,pp=2,fsdp=2,accumulate=2"), 6)


def test_layers_spread_evenly_and_the_first_stages_take_what_is_over():
    assert layers_per_chunk(8, 4) == (2, 2, 2, 2)
    assert layers_per_chunk(10, 4) == (3, 3, 2, 2)
    assert layers_per_chunk(3, 3) == (1, 1, 1)
