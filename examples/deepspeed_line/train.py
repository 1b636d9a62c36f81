"""DeepSpeed over all processes of the job: ZeRO stage 1, the optimizer's state is divided among them."""

from __future__ import annotations

import os
import time

import deepspeed
import torch

STEPS = 40
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,  # one of torch: those of DeepSpeed are compiled at the start
    "gradient_clipping": 0.0,
}

# Without GPUs DeepSpeed would compile this part at its first start. If that start is killed, its lock file stops all later ones.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(rank)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
print(f"rank {rank} of {size}, ZeRO stage {engine.zero_optimization_stage()}", flush=True)
for step in range(STEPS):
    x = torch.randn(8, 1, device=engine.device)
    loss = (engine(x) - 3.0 * x).square().mean()
    engine.backward(loss)
    engine.step()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
if rank == 0:
    print(f"done: weight {float(model.weight.detach()):.2f}", flush=True)
torch.distributed.destroy_process_group()
