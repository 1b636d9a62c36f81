"""A small training that is killed, frozen and given another number of ranks again and again; run by test_elastic_sampler.py.

    python -m tests.torch.elastic_training FOLDER SEED DISTURBANCES

The process imports torch once and forks the ranks of each start, so that a start takes milliseconds. Each rank appends the indices that it trained,
rank 0 the loss of the global batch and the checkpoint, whose only trace of the data is the sampler's position.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import phalanx.torch

SAMPLES, GLOBAL_BATCH, WIDTH, RATE = 997, 24, 8, 0.01
WORLDS = (1, 2, 3, 4, 6)


def dataset() -> TensorDataset:
    """Return inputs, targets and the index of each sample, the same in every process."""
    chance = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, WIDTH, generator=chance, dtype=torch.float64)
    targets = inputs.sin().sum(dim=1) + torch.randn(SAMPLES, generator=chance, dtype=torch.float64)
    return TensorDataset(inputs, targets, torch.arange(SAMPLES))


def train(folder: str, rank: int, world: int, start: int) -> None:
    """Train until killed, or asked by SIGTERM to end after the step."""
    torch.set_num_threads(1)
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(1))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{start}", rank=rank, world_size=world)
    order = phalanx.torch.sampler(SAMPLES, 11, GLOBAL_BATCH, rank=rank, world_size=world)
    weights = torch.zeros(WIDTH, dtype=torch.float64)
    if os.path.exists(f"{folder}/checkpoint"):
        saved = torch.load(f"{folder}/checkpoint", weights_only=True)
        weights = saved["weights"]
        order.load_state_dict(saved["sampler"])
    loader = DataLoader(dataset(), batch_sampler=order)
    with open(f"{folder}/ranks-{start}-{rank}", "a", buffering=1, encoding="utf-8") as log:
        while True:
            for inputs, targets, indices in order.counted(loader):
                errors = inputs @ weights - targets
                share = order.weight / world / len(errors)  # of the mean over the global batch
                sums = torch.cat([2 * share * (errors @ inputs), (share * errors.square().sum()).reshape(1)])
                stops = torch.tensor([float(len(ends))], dtype=torch.float64)
                dist.all_reduce(sums)
                weights = weights - RATE * sums[:-1]
                trained = indices.tolist() if order.weight else []
                log.write(json.dumps([order.position, trained, float(sums[-1])]) + "\n")
                dist.all_reduce(stops)  # all ranks have written: what is saved now is in the logs
                if rank == 0:
                    torch.save({"weights": weights, "sampler": order.state_dict()}, f"{folder}/checkpoint.part")
                    os.replace(f"{folder}/checkpoint.part", f"{folder}/checkpoint")
                if stops.item():
                    return


def fork(folder: str, rank: int, world: int, start: int) -> int:
    """Start a rank."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(folder, rank, world, start)
            code = 0
        finally:
            os._exit(code)
    return pid


def disturb(folder: str, chance: random.Random, disturbances: int) -> dict[str, Any]:
    """Start, disturb and end the training so many times; return how often each way."""
    counts = {"killed": 0, "frozen": 0, "changed": 0}
    worlds: dict[int, int] = {}
    start = 0
    while sum(counts.values()) < disturbances:
        world = chance.choice(WORLDS)
        worlds[world] = worlds.get(world, 0) + 1
        pids = [fork(folder, rank, world, start) for rank in range(world)]
        time.sleep(chance.uniform(0.0, 0.6))
        while chance.random() < 0.3:
            victim = chance.choice(pids)
            os.kill(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0.02, 0.2))
            os.kill(victim, signal.SIGCONT)
            counts["frozen"] += 1
        if chance.random() < 0.6:
            os.kill(chance.choice(pids), signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.05))
            counts["killed"] += 1
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            counts["changed"] += 1
        for pid in pids:
            os.waitpid(pid, 0)
        start += 1
    return {**counts, "starts": start, "worlds": worlds}


if __name__ == "__main__":
    print(json.dumps(disturb(sys.argv[1], random.Random(int(sys.argv[2])), int(sys.argv[3]))))
