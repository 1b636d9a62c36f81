"""Train a byte-level GPT under any layout. The script is the same for one rank, four or eight, and for every way to split the model.

    phalanx run --gpus 4 -- python examples/gpt_layouts/train.py
    phalanx run --plan tp=2,fsdp=2,precision=fp32 -- python examples/gpt_layouts/train.py
    torchrun --nproc-per-node 4 examples/gpt_layouts/train.py --layout pp=2,fsdp=2,accumulate=2,precision=fp32

The global batch and its samples do not depend on the ranks, so neither do the losses. A run can continue under another layout from its
checkpoint.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import model
import torch
import torch.nn.functional as F

import phalanx.torch


def main() -> None:
    """Train to the last step, or until a stop is requested."""
    options = parse_arguments()
    run = phalanx.torch.init()
    text = load_text()
    torch.manual_seed(options.seed)
    training = phalanx.torch.parallelize(
        model.GPT(width=options.width, layers=options.layers, heads=options.heads, length=options.length),
        loss=loss,
        optimizer=lambda own: torch.optim.AdamW(own.parameters(), lr=options.rate, betas=(0.9, 0.95)),
        layout=options.layout,
        clip=1.0,
        sequence=options.length,
        batch=options.batch,
    )
    saver = phalanx.torch.checkpoint(training, every_steps=options.save_every_steps, directory=options.checkpoints)
    resumed = saver.resume().step
    phalanx.torch.plan(steps_total=options.steps, tokens_total=options.steps * options.batch * options.length)
    if run.rank == 0:
        held = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"{held:,} parameters in the layers of rank 0, from step {resumed}", flush=True)

    began_s = time.monotonic()
    for step in range(resumed + 1, options.steps + 1):
        inputs_BT, targets_BT = batch(text, options, step, training.share(options.batch))
        mean = training.train_step(inputs_BT, targets_BT)
        phalanx.torch.report(step=step, loss=mean, tokens=options.batch * options.length)
        if run.rank == 0 and (step % options.print_every == 0 or step == options.steps):
            print(f"step {step} loss {float(mean):.4f}", flush=True)
        saver.save_if_due(step)
        if stop := phalanx.torch.should_stop():
            if run.rank == 0:
                print(f"stopped by {stop.name.lower()} with a checkpoint of step {saver.durable_step}", flush=True)
            break
    if run.rank == 0:
        print(f"{time.monotonic() - began_s:.1f} s", flush=True)
    phalanx.torch.finish()


def loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of its input; Phalanx averages over micro-batches and ranks."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def load_text() -> torch.Tensor:
    """Return the sources of the top-level modules of the Python standard library, as bytes."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batch(
    text: torch.Tensor, options: argparse.Namespace, step: int, samples: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of samples of the global batch. A sample depends only on its step and number."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - options.length - 1, (options.batch,), generator=generator)
    rows_BT = torch.stack([text[start : start + options.length + 1] for start in starts[list(samples)].tolist()]).long()
    return rows_BT[:, :-1], rows_BT[:, 1:]


def parse_arguments() -> argparse.Namespace:
    """Parse the options; the defaults are a model of a million parameters, for CPU ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layout", help="such as tp=2,pp=2,accumulate=4; by default from the plan, else fully sharded data parallel"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="samples of the whole gang per step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoints", help="folder; by default the one of the job")
    parser.add_argument("--save-every-steps", type=int, default=20)
    parser.add_argument("--print-every", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
