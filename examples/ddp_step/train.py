"""Time a DDP step, to measure the overhead of a launch by Phalanx.

    torchrun --nproc-per-node 2 examples/ddp_step/train.py --out by-hand.json
    phalanx run --gpus 2 -- python examples/ddp_step/train.py --out "$PWD/launched.json"

Both use the same script. With `--report` it also calls `phalanx.torch` after each step, which counts as part of the step. Rank 0 writes
{"world_size", "report", "step_s": [...]} without the warm-up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Run the steps and write their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="samples per rank")
    parser.add_argument("--report", action="store_true", help="call report and should_stop after every step")
    parser.add_argument("--out", default=os.path.join(os.environ.get("PHALANX_OUTPUT_DIR", "."), "steps.json"))
    options = parser.parse_args()

    # Imported on demand: without --report the script runs without Phalanx.
    library = importlib.import_module("phalanx.torch") if options.report else None
    if library is not None:
        library.init()
        library.plan(steps_total=options.warmup + options.steps)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = select_device()
    torch.manual_seed(dist.get_rank())
    width = options.width
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(options.layers)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(options.batch, width, device=device)

    step_s: list[float] = []
    for step in range(1, options.warmup + options.steps + 1):
        began_s = time.perf_counter()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_value = float(loss.detach())  # waits for the device
        if library is not None:
            library.report(step=step, loss=loss_value, tokens=options.batch * dist.get_world_size())
            library.should_stop()
        step_s.append(time.perf_counter() - began_s)

    if dist.get_rank() == 0:
        record = {"world_size": dist.get_world_size(), "report": options.report, "step_s": step_s[options.warmup :]}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(record, file)
        ordered = sorted(record["step_s"])
        median_ms = 1e3 * ordered[len(ordered) // 2]
        print(f"median step {median_ms:.3f} ms over {len(ordered)} steps, {options.out}", flush=True)
    if library is not None:
        library.finish()
    else:
        dist.destroy_process_group()


def select_device() -> torch.device:
    """Return the device of this local rank; use one thread on a CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


if __name__ == "__main__":
    main()
