"""What the tests of layouts run on every rank: one GPT under many layouts, one after another in the same processes.

Each order on the command line is `NAME_PATTERN:LAYOUT`: train from the beginning, save after step 2, go on to step 4. Or it is
`NAME_PATTERN:LAYOUT<OTHER<ANOTHER`: load what OTHER saved after step 2 and go on, then the same with ANOTHER. The first and the last rank print
one JSON line for each run, so that both ends of a pipeline are seen to know the loss.
"""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import phalanx.torch
from phalanx.core.work.layouts.layout import parse_layout

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/gpt_layouts"))
model: Any = importlib.import_module("model")

BATCH, LENGTH, SAVED, STEPS = 8, 32, 2, 4

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--meta", action="store_true", help="build on the meta device")
parser.add_argument("--tied", action="store_true", help="embedding and head are one parameter")
parser.add_argument("--inner-norm", action="store_true", help="the norm before attention lies inside it")
parser.add_argument("orders", nargs="+")
options = parser.parse_args()


def data(step):
    """Bytes in steps of 1 to 8: there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(low, high, (BATCH, 1), generator=generator) for low, high in ((0, 256), (1, 9)))
    rows = (start + stride * torch.arange(LENGTH + 1)) % 256
    return rows[:, :-1], rows[:, 1:]


class NormedAttention(model.Attention):
    def forward(self, x):
        return super().forward(self.norm(x))


def build(layout):
    torch.manual_seed(1)
    with torch.device("meta" if options.meta else "cpu"):
        gpt = model.GPT(length=LENGTH)
    if options.tied:
        gpt.head.weight = gpt.embed.weight
    if options.inner_norm:
        for block in gpt.blocks:
            block.attention.__class__ = NormedAttention
            block.attention.norm, block.attention_norm = block.attention_norm, torch.nn.Identity()
        said = gpt.phalanx_parts()
        gpt.phalanx_parts = lambda: replace(said, tensor={"blocks.*.attention.norm": "whole", **said.tensor})
    return phalanx.torch.parallelize(
        gpt,
        loss=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        optimizer=lambda held: torch.optim.AdamW(held.parameters(), lr=3e-3, fused=True),
        layout=layout,
        clip=0.5,
        initialize=model.initialize if options.meta else None,
        sequence=LENGTH,
        batch=BATCH,
    )


def train(training, first, saver=None):
    losses = []
    for step in range(first, STEPS + 1):
        inputs, targets = data(step)
        mine = list(training.share(BATCH))
        losses.append((float(training.train_step(inputs[mine], targets[mine])), training.gradient_norm))
        if saver is not None and step == SAVED:
            saver.save(step, wait=True)
    return losses


def evaluated(training):
    inputs, targets = data(STEPS + 1)
    mine = list(training.share(BATCH))
    return float(training.evaluate(inputs[mine], targets[mine])), 0.0


def tell(training, losses, *, name, of=""):
    if run.rank in {0, run.world_size - 1}:
        held = sorted({name.split(".attention")[0].split(".mlp")[0] for name, _ in training.model.named_parameters()})
        print(json.dumps({"name": name, "of": of, "losses": losses, "held": held}), flush=True)


run = phalanx.torch.init()
for order in options.orders:
    name, _, rest = order.partition(":")
    words, *others = rest.split("<")
    training = build(replace(parse_layout(words), precision="bf16" if "bf16" in words else "fp32"))
    for other in others:
        resumed = phalanx.torch.checkpoint(training, directory=f"{options.checkpoints}/{other}").resume()
        tell(training, train(training, resumed.step + 1), name=name, of=other)
    if not others:
        saver = phalanx.torch.checkpoint(training, directory=f"{options.checkpoints}/{name}")
        tell(training, [*train(training, 1, saver), evaluated(training)], name=name)
phalanx.torch.finish()
