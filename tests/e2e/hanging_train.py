"""A gang that hangs once, in step 30: by rank 1, in the way that is given. Run by `test_hangs`."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import phalanx.torch

HANGS_AT, STEPS = 30, 60


def fall_asleep():
    time.sleep(600)


run = phalanx.torch.init()
model = torch.nn.Linear(2, 2)
saver = phalanx.torch.checkpoint(model, torch.optim.SGD(model.parameters()), every_steps=10)
for step in range(saver.resume().step + 1, STEPS + 1):
    if step == HANGS_AT and run.rank == 1 and run.restart_count == 0:
        if sys.argv[1] == "sleeps":
            fall_asleep()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)  # so that a checkpoint is whole before the next
    dist.all_reduce(torch.ones(4))
    phalanx.torch.report(step=step)
    saver.save_if_due(step)
    if phalanx.torch.should_stop():
        break
phalanx.torch.finish()
