"""What no layout does to a model is refused in one line, before the first step."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import parse_layout
from phalanx.torch import Parts
from phalanx.torch.assembly import check_supported
from phalanx.torch.parts import list_parts, read_declaration
from phalanx.torch.tensor_parallel import parallel_styles
from tests.torch.gang import Gang

pytestmark = [pytest.mark.torch, pytest.mark.serial]


class Attention(nn.Module):
    """Two split layers, and a norm over each head between them."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(8, 8)
        self.head_norm = nn.RMSNorm(2)
        self.out = nn.Linear(8, 8)


class Decoder(nn.Module):
    def __init__(self, *, tie=False, said=None):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Attention()])
        self.head = nn.Linear(8, 16, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.said = said or {}

    def phalanx_parts(self):
        tensor = {"blocks.*.value": "columns", "blocks.*.out": "rows"}
        return Parts(**{"chain": ("embed", "blocks", "head"), "tensor": tensor} | self.said)


@pytest.mark.parametrize(
    ("layout", "model", "says"),
    [
        ("dp=2,precision=fp8", Decoder(), "phalanx.torch does not support precision=fp8"),
        ("dp=2,precision=fp16", Decoder(), "phalanx.torch does not support precision=fp16"),
        ("dp=2,ep=2", Decoder(), "phalanx.torch does not support expert parallel yet"),
        ("cp=2", Decoder(), "Decoder does not declare its buffers of positions"),
        ("tp=2", Decoder(said={"tensor": {}}), "tp=2: Decoder does not declare how its layers split"),
        ("tp=2", Decoder(tie=True), "embed.weight and head.weight are one parameter"),
        ("pp=2,accumulate=2", Decoder(tie=True), "embed.weight and head.weight are one parameter"),
    ],
)
def test_kind_of_split_that_is_not_built_is_named(layout, model, says):
    with pytest.raises(BadRequest) as refused:
        check_supported(parse_layout(layout), read_declaration(model), model)
    assert says in refused.value.message
    assert refused.value.hint


def test_tied_parameters_are_fine_where_ranks_hold_the_whole_chain():
    model = Decoder(tie=True)
    check_supported(parse_layout("fsdp=2"), read_declaration(model), model)


def test_layer_among_split_ones_must_say_what_it_sees():
    model = Decoder()
    part = list_parts(model, read_declaration(model))[1]
    with pytest.raises(BadRequest, match=r"blocks\.0\.head_norm is in a block with sharded layers") as refused:
        parallel_styles(part, read_declaration(model), sequence=False)
    assert "shared" in refused.value.hint


def test_parameter_beside_layers_must_move_into_one():
    model = Decoder()
    model.blocks[0].register_parameter("scale", nn.Parameter(nn.init.ones_(model.head.weight.new_empty(8))))
    part = list_parts(model, read_declaration(model))[1]
    with pytest.raises(BadRequest, match=r"blocks\.0 has parameters outside its layers"):
        parallel_styles(part, read_declaration(model), sequence=False)


SCRIPT = """
import sys
import torch
import phalanx.torch
from tests.torch.test_layouts_refused import Attention, Decoder

run = phalanx.torch.init()
torch.manual_seed(run.rank if sys.argv[1] == "unequal" else 0)
model = Decoder()
model.blocks.append(Attention())
if sys.argv[1] == "meta":
    model.head.to("meta")
phalanx.torch.parallelize(model, loss=None, optimizer=None, layout=sys.argv[2])
"""


UNEQUAL = "phalanx: the ranks built different models; call torch.manual_seed with the same number on every rank before you build the model"
TOO_FEW = (
    "phalanx: layout tp=4 is for 4 ranks, but there are 2; start 4 ranks, or use a layout whose sizes multiply to 2"
)
EMPTY = "phalanx: part 'head' is on the meta device, and there is no initialize function; pass parallelize(initialize=...), a function of a part"


@pytest.mark.parametrize(
    ("built", "layout", "line"),
    [
        ("unequal", "fsdp=2,precision=fp32", UNEQUAL),
        ("equal", "tp=4", TOO_FEW),
        ("meta", "pp=2,accumulate=2,precision=fp32", EMPTY),  # the part is on the second stage alone
    ],
)
def test_refusal_is_one_line_of_one_rank(tmp_path, built, layout, line):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Gang(tmp_path, tmp_path / "script.py", built, layout, world_size=2, supervised=False) as gang:
        assert gang.finish() == [1, 1]
        assert [gang.log(rank) for rank in (0, 1)] == [f"{line}\n", ""]
