"""Accelerate over all tasks of the job: `Accelerator()` reads the rank's environment."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator

STEPS = 40

accelerator = Accelerator(cpu=not torch.cuda.is_available())
print(f"process {accelerator.process_index} of {accelerator.num_processes}", flush=True)
model = torch.nn.Linear(1, 1, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
ones = torch.ones(8, 1, device=accelerator.device)
for step in range(STEPS):
    loss = ((2.0 * model(ones) - 6.0) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process and step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
print(f"done: weight {float(accelerator.unwrap_model(model).weight):.3f}", flush=True)
accelerator.end_training()
