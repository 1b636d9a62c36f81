"""A torch script for torchrun; it starts as it is with `torchrun train.py`, without options."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

STEPS = 40

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {size}, local rank {os.environ['LOCAL_RANK']}", flush=True)
weight = torch.zeros(1)
for step in range(STEPS):
    gradient = 4.0 * (2.0 * weight - 6.0 - (rank - (size - 1) / 2))
    dist.all_reduce(gradient)
    weight -= 0.05 * gradient / size
    if rank == 0 and step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
print(f"done: weight {float(weight):.3f}", flush=True)
dist.destroy_process_group()
