"""Run by two ranks of a gang: the calibration's own GPT, split and whole, must compute the same. Rank 0 prints what differed."""

from dataclasses import replace

import torch
import torch.distributed as dist

import phalanx.torch
from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.torch.calibrate.gang import CalibrationGang
from phalanx.torch.calibrate.small_gpt import GptBlock, GptStage
from phalanx.torch.calibrate.trainings import _lines, _Trainer

MODEL = ModelShape(
    name="tiny",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=4,
    head_dim=4,
    ffn=32,
    vocab=20,
    gated=False,
    positions=8,
    norm_vectors=2,
)


def main():
    me = phalanx.torch.init()
    gang = CalibrationGang.join(me, quick=True)
    print("block", largest_difference(block_differences(gang)))
    print("replicas", largest_difference(replica_differences(gang)))
    print("pipeline", largest_difference(pipeline_differences(gang)))
    assert _lines(Layout(tensor=2, replicate=2), Axis.REPLICATE) == [[0, 2], [1, 3]]
    phalanx.torch.finish()


def block_differences(gang):
    """Half of the heads and of the width in each rank, against all of them in one."""
    torch.manual_seed(0)
    whole = GptBlock(MODEL, None, 1)
    split = GptBlock(MODEL, gang.within, 2)
    half = slice(gang.rank, None, 2)  # rank 0 has every other row: which ones does not matter to a sum
    heads = torch.arange(3 * 16).view(3, 4, 4)[:, half].flatten()
    with torch.no_grad():
        split.qkv.weight.copy_(whole.qkv.weight[heads])
        split.out.weight.copy_(whole.out.weight[:, torch.arange(16).view(4, 4)[half].flatten()])
        split.up.weight.copy_(whole.up.weight[half])
        split.down.weight.copy_(whole.down.weight[:, half])
    x = torch.randn(3, 8, 16)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    split(mine).square().sum().backward()
    whole(theirs).square().sum().backward()
    return [
        mine.grad - theirs.grad,
        split.qkv.weight.grad - whole.qkv.weight.grad[heads],
        split.down.weight.grad - whole.down.weight.grad[:, half],
        split.attention_norm.weight.grad - whole.attention_norm.weight.grad,
    ]


def pipeline_differences(gang):
    """One step over two stages, four micro-batches, against the same weights in one process. Both ranks know both stages."""
    layout = Layout(pipeline=2, micro_batches=4, precision="fp32")
    trainer = _Trainer.make(gang, layout, MODEL)
    stages = []
    for number in range(2):
        torch.manual_seed(number)
        stages.append(GptStage(MODEL, number=number, stages=2, group=None, ways=1))
    mine = stages[gang.rank]
    mine.load_state_dict(trainer.stage.state_dict())
    states = [stage.state_dict() for stage in stages]
    for rank, state in enumerate(states):
        for tensor in state.values():
            dist.broadcast(tensor, rank)
    torch.manual_seed(7)
    tokens = [torch.randint(MODEL.vocab, (1, MODEL.positions)) for _ in range(4)]
    trainer = replace(trainer, optimizer=Nothing())
    torch.manual_seed(7)  # the trainer draws the same tokens in both ranks
    trainer.step()
    for one in tokens:
        (stages[1](stages[0](one), one) / 4).backward()
    return [piped.grad - plain.grad for piped, plain in zip(trainer.stage.parameters(), mine.parameters(), strict=True)]


def replica_differences(gang):
    """Two micro-batches in each of two replicas, other tokens in each, against all four in one process."""
    trainer = replace(
        _Trainer.make(gang, Layout(replicate=2, micro_batches=2, precision="fp32"), MODEL), optimizer=Nothing()
    )
    plain = GptStage(MODEL, number=0, stages=1, group=None, ways=1)
    plain.load_state_dict(trainer.stage.state_dict())
    for rank in range(2):
        torch.manual_seed(rank)
        for _ in range(2):
            tokens = torch.randint(MODEL.vocab, (1, MODEL.positions))
            (plain(tokens, tokens) / 4).backward()
    torch.manual_seed(gang.rank)
    trainer.step()
    return [mine.grad - whole.grad for mine, whole in zip(trainer.stage.parameters(), plain.parameters(), strict=True)]


class Nothing:
    """An optimizer that leaves weights and gradients as they are."""

    def step(self):
        pass

    def zero_grad(self):
        pass


def largest_difference(differences):
    return f"{max(float(difference.abs().max()) for difference in differences):.1e}"


main()
