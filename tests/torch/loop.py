"""A small training script for the tests: the loop of `phalanx.torch.session`, with knobs."""

import argparse
import resource
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.fsdp import fully_shard

import phalanx.torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--wrap", choices=["plain", "ddp", "fsdp"], default="fsdp")
parser.add_argument("--every-steps", type=int, default=0)
parser.add_argument(
    "--file-limit", type=int, default=0, help="RLIMIT_FSIZE in bytes after step 5, lifted after step 10"
)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--bad-extra", action="store_true")
parser.add_argument("--closing-stager", action="store_true", help="as in torch 2.11, where each copy closes the stager")
options = parser.parse_args()

if options.closing_stager:
    stage = DefaultStager.stage

    def stage_and_close(self, state):
        try:
            return stage(self, state)
        finally:
            self.close()

    DefaultStager.stage = stage_and_close

run = phalanx.torch.init()
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(8, options.width),
    torch.nn.Tanh(),
    torch.nn.Linear(options.width, options.width),
    torch.nn.Linear(options.width, 1),
)
if options.wrap == "fsdp":
    fully_shard(model)
elif options.wrap == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
saver = phalanx.torch.checkpoint(
    model, optimizer, stateful={"schedule": schedule}, every_steps=options.every_steps or None
)
resumed = saver.resume()
print("resumed", resumed.step, dict(resumed.extra), flush=True)
phalanx.torch.plan(steps_total=options.steps)

stop = phalanx.torch.StopReason.NONE
for step in range(resumed.step + 1, options.steps + 1):
    if options.file_limit and step in {6, 11}:
        limit = options.file_limit if step == 6 else resource.RLIM_INFINITY
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    y = x.sum(dim=1, keepdim=True).sin()
    share = slice(run.rank * 24 // run.world_size, (run.rank + 1) * 24 // run.world_size)
    loss = (model(x[share]) - y[share]).square().sum() / 24
    (loss * run.world_size).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    whole = loss.detach()
    dist.all_reduce(whole)
    time.sleep(options.pace_s)
    phalanx.torch.report(step=step, loss=whole, tokens=24)
    print("step", step, f"{float(whole):.9f}", flush=True)
    saver.save_if_due(step, extra={"seen": object() if options.bad_extra else 24 * step, "rank": run.rank})
    if stop := phalanx.torch.should_stop():
        print("stop", stop.name, "at", step, "durable", saver.durable_step, flush=True)
        break
phalanx.torch.finish()
print("end", saver.durable_step, flush=True)
