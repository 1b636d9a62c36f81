"""Train a byte-level GPT with FSDP2 on the sources of the Python standard library.

    phalanx run --gpus 4 -- python examples/train_gpt/train.py
    torchrun --nproc-per-node 2 examples/train_gpt/train.py
    python examples/train_gpt/train.py --steps 100

The global batch does not depend on the number of ranks, and a sample depends only on its step and number. So a run that failed and resumed,
even on another number of ranks, repeats the losses of the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from typing import Any

import model
import text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import phalanx.torch

WARMUP_STEPS = 10
LAST_RATE_SHARE = 0.1
OWN_SHARD_PARAMETERS = 1_000_000
"""Smallest block with its own collective. With 4 CPU ranks a step of the default model took 73 ms as one group, 107 to 159 ms block by
block (two runs, busy machine)."""
TABLE_RATE = 8.0
"""Learning rate of embeddings and head relative to the blocks: a step updates only few of their rows."""


def main() -> None:
    """Train to the last step, or until a stop is requested."""
    options = parse_arguments()
    run = phalanx.torch.init()
    if options.batch < run.world_size:
        raise SystemExit(
            f"--batch {options.batch} is less than the {run.world_size} ranks; use at least one sample per rank"
        )
    corpus = text.load(options.corpus_bytes)
    gpt = build(options, run)
    optimizer = build_optimizer(gpt, options.lr)
    saver = phalanx.torch.checkpoint(gpt, optimizer, every_steps=options.save_every_steps or None)
    resumed = saver.resume()
    digest = text.digest(corpus)
    if run.rank == 0 and resumed.extra.get("corpus", digest) != digest:
        print("the standard library differs from the one at the start of this run; losses will not repeat", flush=True)
    phalanx.torch.plan(steps_total=options.steps, tokens_total=options.steps * options.batch * options.seq)
    if run.rank == 0:
        parameters = sum(parameter.numel() for parameter in gpt.parameters())
        print(
            f"{parameters:,} parameters on {run.world_size} ranks ({run.device.type}), from step {resumed.step}",
            flush=True,
        )

    loss, began_s = resumed.extra.get("loss", math.nan), time.monotonic()
    stop = phalanx.torch.StopReason.NONE
    for step in range(resumed.step + 1, options.steps + 1):
        loss = train_step(gpt, optimizer, corpus, options, run, step)
        phalanx.torch.report(step=step, loss=loss, tokens=options.batch * options.seq)
        if run.rank == 0 and (step % options.print_every == 0 or step == options.steps):
            print(f"step {step} loss {loss:.6f}", flush=True)
        saver.save_if_due(step, extra={"corpus": digest, "loss": loss})
        if stop := phalanx.torch.should_stop():
            break
    if stop:
        if run.rank == 0:
            print(f"stopped by {stop.name.lower()} with a checkpoint of step {saver.durable_step}", flush=True)
    else:
        write_results(gpt, options, run, loss, resumed.step, time.monotonic() - began_s)
    phalanx.torch.finish()


def train_step(gpt: Any, optimizer: Any, corpus: Any, options: argparse.Namespace, run: Any, step: int) -> float:
    """Train one step of the whole gang; return the mean loss over the global batch.

    Ranks may have unequal shares of the batch, so each divides its sum by the global batch, and the mean of FSDP over ranks is undone.
    """
    set_rates(optimizer, options.lr, step, options.steps)
    samples = range(run.rank * options.batch // run.world_size, (run.rank + 1) * options.batch // run.world_size)
    inputs_BT, targets_BT = text.batch(corpus, seed=options.seed, step=step, samples=samples, length=options.seq)
    logits_BTV = gpt(inputs_BT.to(run.device))
    sum_of_losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.to(run.device).flatten(), reduction="sum")
    share = sum_of_losses / (options.batch * options.seq)
    (share * run.world_size).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = share.detach()
    dist.all_reduce(loss)
    return float(loss)


def build(options: argparse.Namespace, run: Any) -> Any:
    """Build the model, equal on all ranks by its seed, and shard it: large blocks each with their own collective."""
    torch.manual_seed(options.seed)
    gpt = model.GPT(width=options.d_model, layers=options.layers, heads=options.heads)
    gpt.initialize()
    gpt.to(run.device)
    for block in gpt.blocks:
        if sum(parameter.numel() for parameter in block.parameters()) >= OWN_SHARD_PARAMETERS:
            fully_shard(block)
    fully_shard(gpt)
    return gpt


def build_optimizer(gpt: Any, rate: float) -> Any:
    """Return AdamW, with a separate rate for byte tables (embeddings and head)."""
    tables = [parameter for name, parameter in gpt.named_parameters() if name.startswith(("embeddings.", "head."))]
    blocks = [parameter for name, parameter in gpt.named_parameters() if not name.startswith(("embeddings.", "head."))]
    groups = [{"params": blocks, "share": 1.0}, {"params": tables, "share": TABLE_RATE}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)


def set_rates(optimizer: Any, rate: float, step: int, steps: int) -> None:
    """Set the rates: linear warm-up, then linear decay. They depend only on the step, so there is no scheduler to restore."""
    factor = min(1.0, step / WARMUP_STEPS) * max(LAST_RATE_SHARE, 1.0 - step / steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * factor * group["share"]


def write_results(
    gpt: Any, options: argparse.Namespace, run: Any, loss: float, resumed_from: int, wall_s: float
) -> None:
    """Write a text sample and the figures to the folder that survives the job, on rank 0. All ranks must generate."""
    sample = generate(gpt, options, run)
    if run.rank != 0:
        return
    print(f"--- sample after {options.steps} steps ---\n{sample}\n---", flush=True)
    folder = run.output_dir or os.path.join(os.path.dirname(os.path.abspath(__file__)), "output")
    os.makedirs(folder, exist_ok=True)
    result = {
        "steps": options.steps,
        "final_loss": loss,
        "world_size": run.world_size,
        "resumed_from": resumed_from,
        "tokens_per_step": options.batch * options.seq,
        "wall_s_this_attempt": round(wall_s, 3),
    }
    with open(os.path.join(folder, "sample.txt"), "w", encoding="utf-8") as file:
        file.write(sample)
    with open(os.path.join(folder, "result.json"), "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


@torch.no_grad()
def generate(gpt: Any, options: argparse.Namespace, run: Any) -> str:
    """Continue a prompt byte by byte. FSDP gathers the weights from all ranks, so all ranks generate, with equal seeds."""
    for module in gpt.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.set_reshard_after_forward(False, recurse=False)  # gather once, not once per byte
    generator = torch.Generator(device=run.device).manual_seed(options.seed)
    so_far = list(b"def ")
    for _ in range(options.sample_bytes):
        window_BT = torch.tensor([so_far[-options.seq :]], device=run.device)
        logits_V = gpt(window_BT)[0, -1].float() / options.temperature
        so_far.append(int(torch.multinomial(logits_V.softmax(0), 1, generator=generator)))
    return bytes(so_far).decode("utf-8", errors="replace")


def parse_arguments() -> argparse.Namespace:
    """Parse the options; the defaults suit 4 ranks on 2 CPU cores: 300 steps in about half a minute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--d-model", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples of the whole gang per step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--save-every-steps", type=int, default=0, help="0: at the interval of Young and Daly")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--sample-bytes", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.6)
    return parser.parse_args()


if __name__ == "__main__":
    main()
