"""Data-parallel training by hand, with torch.distributed and the environment only. It does not use Phalanx.

It runs unchanged under Phalanx: `phalanx run --gpus 4 -- python examples/bare_allreduce/train.py`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
    torch.set_num_threads(1)

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(device)
truth = torch.randn(32, 1)

for step in range(1, steps + 1):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 32, generator=generator)
    y = torch.tanh(x @ truth)
    loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
    model.zero_grad()
    loss.backward()
    mean_loss = loss.detach()
    dist.all_reduce(mean_loss)
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.sub_(parameter.grad, alpha=0.1 / world_size)
    if rank == 0:
        print(f"step {step} loss {mean_loss.item() / world_size:.6f}", flush=True)

dist.destroy_process_group()
