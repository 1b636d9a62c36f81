"""Kills, freezes and changes (four times 50 in `make prove`) among 1, 2, 3, 4 and 6 ranks: every sample once an epoch, in one global order, with the losses of one process."""

import glob
import json
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx.torch
from tests.effort import size

ROOT = Path(__file__).parents[2]
DISTURBANCES = size(40, 50)
RUNS = size(1, 4)

pytestmark = [pytest.mark.serial, pytest.mark.torch, pytest.mark.timeout(900)]


def losses_alone(batches):
    """What one process computes without a break."""
    import torch

    from tests.torch.elastic_training import GLOBAL_BATCH, RATE, SAMPLES, WIDTH, dataset

    inputs, targets, _ = dataset().tensors
    order = phalanx.torch.sampler(SAMPLES, 11, GLOBAL_BATCH, rank=0, world_size=1)
    weights, losses = torch.zeros(WIDTH, dtype=torch.float64), []
    for batch in range(batches):
        mine = order.indices(batch)
        errors = inputs[mine] @ weights - targets[mine]
        losses.append(errors.square().mean().item())
        weights = weights - RATE * 2 * (errors @ inputs[mine]) / len(mine)
    return losses


@pytest.mark.parametrize("drawn_by", range(1, RUNS + 1))
def test_every_sample_once_an_epoch_in_one_order_with_the_same_losses(tmp_path, drawn_by):
    words = [sys.executable, "-m", "tests.torch.elastic_training", str(tmp_path), str(drawn_by), str(DISTURBANCES)]
    said = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=800, check=False)
    assert said.returncode == 0, said.stderr[-3000:]
    counts = json.loads(said.stdout.splitlines()[-1])
    assert counts["killed"] + counts["frozen"] + counts["changed"] >= DISTURBANCES
    assert set(counts["worlds"]) == {"1", "2", "3", "4", "6"}
    trained, losses = {}, {}
    for start in range(counts["starts"]):
        here: dict[int, list] = {}
        for path in sorted(glob.glob(f"{tmp_path}/ranks-{start}-*"), key=lambda name: int(name.rpartition("-")[2])):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    if not line.endswith("\n"):
                        continue  # killed in the middle of it
                    position, indices, loss = json.loads(line)
                    here.setdefault(position, []).append((indices, loss))
        trained.update(
            {position: [index for indices, _ in parts for index in indices] for position, parts in here.items()}
        )
        losses.update({position: loss for position, parts in here.items() for _, loss in parts})
    last = max(trained) - 1  # of the very last a rank may have been killed before it wrote
    order = phalanx.torch.sampler(997, 11, 24, rank=0, world_size=1)
    length = len(order)
    assert sorted(trained)[:last] == list(range(1, last + 1)), "no batch is left out"
    for position in range(1, last + 1):
        assert trained[position] == order.global_indices(position - 1), f"batch {position}"
    for epoch in range(last // length):
        seen = [index for position in range(epoch * length, (epoch + 1) * length) for index in trained[position + 1]]
        assert sorted(seen) == list(range(997)), f"epoch {epoch}"
    alone = losses_alone(last)
    worst = max(abs(losses[position] - alone[position - 1]) for position in range(1, last + 1))
    print(f"{counts}; {last} batches, {last // length} epochs, largest difference of a loss {worst:.1e}")
    assert last // length >= 5
    assert worst < 1e-5
