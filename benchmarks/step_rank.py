"""A rank of `benchmarks.step_pairs`: DDP steps in slices, each of which begins when the benchmark says so.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python benchmarks/step_rank.py FOLDER

It reads the number of steps of a slice from the FIFO `go-RANK` of the folder, makes them, and writes `RANK SECONDS` to the FIFO `done`. It ends
at 0. Between two slices it waits in a read and takes no processor time. The model is the one of examples/ddp_step.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 512, 4, 128


def main() -> None:
    """Make slices of steps until told to end."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)
    done = os.open(os.path.join(folder, "done"), os.O_WRONLY)
    with open(os.path.join(folder, f"go-{rank}"), encoding="ascii") as orders:
        for order in orders:
            steps = int(order)
            if not steps:
                break
            began_s = time.perf_counter()
            for _ in range(steps):
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                float(loss.detach())
            os.write(done, f"{rank} {time.perf_counter() - began_s!r}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
