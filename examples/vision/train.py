"""Train a small convolutional network on handwritten digits, data-parallel, and go on from the checkpoint after a death.

The 1,797 pictures are the test set of UCI's "Optical Recognition of Handwritten Digits", which scikit-learn brings. Every fifth is held out.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import phalanx.torch

mpl.use("Agg")
import matplotlib.pyplot as plt


def network() -> nn.Module:
    """Return the network, for pictures of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def main() -> None:
    """Train, test, and write `result.json` and `picture.png` into the job's output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32, help="of all ranks together")
    options = parser.parse_args()
    run = phalanx.torch.init()
    digits = load_digits()
    pictures_N1HW = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels_N = torch.tensor(digits.target)
    held_out_N = torch.arange(len(labels_N)) % 5 == 0
    dataset = TensorDataset(pictures_N1HW[~held_out_N], labels_N[~held_out_N])

    torch.manual_seed(18)
    model = DistributedDataParallel(network().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    order = phalanx.torch.sampler(len(dataset), seed=18, global_batch=options.batch)
    saver = phalanx.torch.checkpoint(model, optimizer, stateful={"order": order}, every_steps=50)
    resumed = saver.resume()
    step, losses = resumed.step, list(resumed.extra.get("losses", []))
    if run.rank == 0:
        print(f"{run.world_size} ranks, from step {step}", flush=True)
    while order.epoch < options.epochs:
        for inputs_B1HW, targets_B in order.counted(DataLoader(dataset, batch_sampler=order)):
            loss = F.cross_entropy(model(inputs_B1HW.to(run.device)), targets_B.to(run.device)) * order.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(float(loss))
            phalanx.torch.report(step=step, loss=losses[-1])
            if run.rank == 0 and step % 20 == 0:
                print(f"step {step} loss {losses[-1]:.4f}", flush=True)
            saver.save_if_due(step, extra={"losses": losses})
            if phalanx.torch.should_stop():
                phalanx.torch.finish()
                return
    if run.rank == 0:
        finish(model.module, run, pictures_N1HW[held_out_N], labels_N[held_out_N], losses, resumed.step)
    phalanx.torch.finish()


@torch.no_grad()
def finish(model: Any, run: Any, pictures: torch.Tensor, labels: torch.Tensor, losses: list[float], since: int) -> None:
    """Test on the pictures that were held out, and draw."""
    shares = model.eval()(pictures.to(run.device)).softmax(1).cpu()
    accuracy = float((shares.argmax(1) == labels).float().mean())
    folder = Path(run.output_dir or "output")
    os.makedirs(folder, exist_ok=True)
    result = {"accuracy": accuracy, "losses": losses, "resumed_from": since, "world_size": run.world_size}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    figure, places = plt.subplots(2, 8, figsize=(9, 3), layout="constrained")
    doubtful = shares.gather(1, labels[:, None]).squeeze(1).argsort()[:16]  # wrong ones first, then the least sure
    for axes, number in zip(places.flat, doubtful.tolist(), strict=True):
        axes.imshow(pictures[number, 0], cmap="gray_r")
        guess, truth = int(shares[number].argmax()), int(labels[number])
        axes.set_title(
            f"{guess} ({float(shares[number, guess]):.0%})", color="black" if guess == truth else "#b00020", fontsize=9
        )
        axes.axis("off")
    figure.suptitle(
        f"the 16 hardest of {len(labels)}: answer (share), red if wrong; accuracy {accuracy:.1%}", fontsize=10
    )
    figure.savefig(folder / "picture.png", dpi=110)
    print(f"accuracy {accuracy:.4f} on {len(labels)} pictures after {len(losses)} steps", flush=True)


if __name__ == "__main__":
    main()
