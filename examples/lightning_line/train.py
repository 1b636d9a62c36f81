"""Lightning over all tasks of the job: it reads the rank's environment; the shape is given to the Trainer."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = 40


class Line(lightning.LightningModule):
    """A line through the origin, whose slope should become 3."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """One step; slow enough to be watched."""
        time.sleep(0.1)
        if self.global_rank == 0 and index % 10 == 0:
            print(f"step {index}", flush=True)
        return ((self.model(batch[0]) - 3.0 * batch[0]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.2)


model = Line()
trainer = lightning.Trainer(
    accelerator="auto",
    num_nodes=int(os.environ["PHALANX_NNODES"]),
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = TensorDataset(torch.ones(STEPS * trainer.world_size * 4, 1))
print(f"rank {trainer.global_rank} of {trainer.world_size}", flush=True)
trainer.fit(model, DataLoader(data, batch_size=4))
print(f"done: weight {float(model.model.weight):.3f}", flush=True)
