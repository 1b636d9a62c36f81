"""What a model declares, and which layout counts: judged before any process group is there."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import (
    DEFAULT_AXIS_ORDER,
    Layout,
    layout_to_json,
    parse_layout,
)
from phalanx.torch import Parts
from phalanx.torch.auto_layout import plan_layout, read_shape
from phalanx.torch.context_parallel import SequenceShare
from phalanx.torch.device_mesh import crossing_warning, rank_table
from phalanx.torch.layout_choice import choose_layout, default_layout
from phalanx.torch.model_stage import combine_stages, split_chain, stages_of_rank
from phalanx.torch.parts import (
    list_parts,
    read_declaration,
    splittable_sizes,
    tied_parameters,
)
from tests.torch.gang import ROOT

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def gpt():
    sys.path.insert(0, str(ROOT / "examples/gpt_layouts"))
    return importlib.import_module("model").GPT(width=32, layers=5, heads=4, length=16)


class Small(nn.Module):
    def __init__(self, **said):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.said = said

    def phalanx_parts(self):
        return Parts(**self.said)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"chain": ("embed", "block")}, "part 'block' of the chain is not in the model"),
        ({"chain": ("embed", "blocks")}, "parameter 'scale' is in no part of the chain"),
        ({"chain": ("embed", "blocks"), "tensor": {"blocks.*": "row"}}, "tensor role 'row'"),
        ({"chain": ("embed", "blocks"), "tensor": {"blocks.*.up": "rows"}}, "'blocks.*.up': no layer has that name"),
    ],
)
def test_declaration_that_does_not_fit_the_model_is_refused(said, says):
    with pytest.raises(BadRequest) as refused:
        read_declaration(Small(**said))
    assert says in refused.value.message


def test_model_that_declares_nothing_is_told_what_to_write():
    with pytest.raises(BadRequest, match="Linear does not declare its parts") as refused:
        read_declaration(nn.Linear(2, 2))
    assert "phalanx_parts" in refused.value.hint


def test_chain_is_cut_between_layers(gpt):
    parts = list_parts(gpt, read_declaration(gpt))
    pieces = [[part.name for part in piece] for piece in split_chain(parts, 3)]
    assert pieces == [
        ["embed", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3"],
        ["blocks.4", "norm", "head"],
    ]


def test_interleaved_stage_holds_every_other_run_under_the_names_of_the_whole(gpt):
    parts = list_parts(gpt, read_declaration(gpt))
    held = stages_of_rank(parts, parse_layout("pp=2,vpp=2,accumulate=2"), 1)
    assert [[part.name for part in stage.parts] for stage in held] == [["blocks.2"], ["blocks.4", "norm", "head"]]
    names = {name for name, _ in combine_stages(held).named_parameters()}
    whole = {name for name, _ in gpt.named_parameters()}
    assert names == {name for name in whole if name.startswith(("blocks.2.", "blocks.4.", "norm.", "head."))}


def test_stage_computes_what_the_model_computes(gpt):
    (stage,) = stages_of_rank(list_parts(gpt, read_declaration(gpt)), Layout(), 0)
    bytes_BT = torch.arange(16).view(2, 8)  # noqa: N806
    assert torch.equal(stage(bytes_BT), gpt(bytes_BT))


def test_widths_that_tensor_ranks_share_are_found_in_the_layers(gpt):
    found = splittable_sizes(gpt, read_declaration(gpt), parse_layout("tp=2"))
    assert (found.layers, found.heads) == (5, 4)
    assert ("blocks.0.mlp.up (columns)", 128) in found.widths
    assert ("blocks.0.mlp.down (rows)", 128) in found.widths
    assert ("head (columns)", 256) in found.widths


def test_shared_parameter_is_seen(gpt):
    model = Small(chain=())
    assert tied_parameters(model) == []
    model.head = nn.Linear(8, 16, bias=False)
    model.head.weight = model.embed.weight
    assert tied_parameters(model) == [("embed.weight", "head.weight")]


def test_shape_of_a_declared_model_is_the_planners(gpt):
    shape = read_shape(gpt, read_declaration(gpt))
    assert (shape.layers, shape.hidden, shape.heads, shape.head_dim, shape.ffn, shape.vocab) == (5, 32, 4, 8, 128, 256)
    assert (shape.gated, shape.tied, shape.kv_heads) == (False, False, 4)


def test_tensor_ranks_are_neighbours_and_pipeline_ranks_far_apart():
    table = rank_table(parse_layout("tp=2,pp=2,fsdp=2,accumulate=2"))  # (pipeline, replicate, shard, context, tensor)
    assert table.squeeze().tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_order_moves_ranks_and_not_the_names():
    order = (
        DEFAULT_AXIS_ORDER[2],
        DEFAULT_AXIS_ORDER[0],
        *(axis for axis in DEFAULT_AXIS_ORDER if axis not in {DEFAULT_AXIS_ORDER[0], DEFAULT_AXIS_ORDER[2]}),
    )
    table = rank_table(parse_layout(f"tp=2,fsdp=3,order={'-'.join(order)}"))
    assert table.squeeze().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensor_group_on_two_nodes_is_told():
    assert crossing_warning(parse_layout("tp=2,dp=3"), local_world_size=6) == ""
    assert "spans nodes of 3 ranks" in crossing_warning(parse_layout("tp=2,dp=3"), local_world_size=3)
    assert "spans nodes of 4 ranks" in crossing_warning(parse_layout("tp=8"), local_world_size=4)


def test_pieces_of_a_sequence_join_to_the_whole():
    whole = torch.arange(12)
    shares = [SequenceShare(3, place).take(whole, 0) for place in range(3)]
    assert [share.tolist() for share in shares] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert torch.equal(SequenceShare(3, 0).join(shares, 0), whole)


def never(_machine):
    raise AssertionError("the planner was asked")


def test_without_a_plan_all_ranks_share_the_states():
    assert (
        choose_layout(None, "", "", ranks=4, plan_layout=never)
        == default_layout(4)
        == parse_layout("fsdp=4,precision=fp32")
    )
    assert choose_layout(None, "", "", ranks=1, plan_layout=never) == parse_layout("precision=fp32")


def test_plan_comes_as_json_or_words():
    layout = parse_layout("tp=2,fsdp=2")
    assert choose_layout(None, json.dumps(layout_to_json(layout)), "", ranks=4, plan_layout=never) == layout
    assert choose_layout(None, "tp=2,fsdp=2", "", ranks=4, plan_layout=never) == layout


def test_plan_for_more_ranks_than_came_shrinks_and_a_written_one_does_not():
    assert choose_layout(None, "tp=2,fsdp=4", "", ranks=4, plan_layout=never).shard == 2
    with pytest.raises(BadRequest, match="is for 8 ranks, but there are 4"):
        choose_layout("tp=2,fsdp=4", "", "", ranks=4, plan_layout=never)


def test_auto_asks_the_planner_with_the_machine():
    asked = []

    def choose(machine):
        asked.append(machine)
        return parse_layout("tp=4")

    assert choose_layout(None, "auto", '{"gpu": "virtual"}', ranks=4, plan_layout=choose) == parse_layout("tp=4")
    assert choose_layout("auto", "dp=4", "", ranks=4, plan_layout=choose) == parse_layout("tp=4")
    assert asked == [{"gpu": "virtual"}, None]
    with pytest.raises(BadRequest, match="PHALANX_MACHINE is not valid JSON"):
        choose_layout(None, "auto", "{", ranks=4, plan_layout=choose)


def test_planner_chooses_what_can_be_run_for_the_devices_that_are_there(gpt):
    there = {"gpu": "virtual", "memory_bytes": 2 << 30, "virtual": True, "nodes": 2, "gpus_per_node": 2}
    layout = plan_layout(gpt, 4, there, local=2, sequence=16, batch=8)
    assert (layout.ranks, layout.precision, layout.global_batch) == (4, "fp32", 8)
    with pytest.raises(BadRequest, match="needs the length of a sample and the batch"):
        plan_layout(gpt, 4, there, local=2, sequence=0, batch=0)
