"""A small training for `test_kept`: two losses files, one on each node, under the same name; `phalanx.torch` does the rest."""

import os
import sys
import time

import torch

import phalanx.torch

STEPS = int(sys.argv[1])

run = phalanx.torch.init()
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saver = phalanx.torch.checkpoint(model, optimizer, every_steps=10)
resumed = saver.resume()
phalanx.torch.plan(steps_total=STEPS)
for step in range(resumed.step + 1, STEPS + 1):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
    phalanx.torch.report(step=step, loss=float(loss))
    if int(os.environ["LOCAL_RANK"]) == 0:
        with open(os.path.join(run.output_dir or ".", "losses.txt"), "a", encoding="ascii") as file:
            file.write(f"{step} {float(loss):.6f}\n")
    saver.save_if_due(step)
    if phalanx.torch.should_stop():
        break
phalanx.torch.finish()
