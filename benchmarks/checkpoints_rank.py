"""A rank of `benchmarks.checkpoints`: saves a model of some MiB a few times, each time with other values."""

import sys
from typing import Any

import torch

import phalanx.torch

SIZE_MIB, SAVES = int(sys.argv[1]), int(sys.argv[2])

run = phalanx.torch.init()
torch.manual_seed(run.rank)
model = torch.nn.ParameterList([torch.randn(SIZE_MIB << 18)])
own = {"part": model[0].detach() + run.rank}  # of this rank only, so that each rank's file has the whole size


class Part:
    """State of one rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"part": own["part"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        own["part"] = state["part"]


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saver = phalanx.torch.checkpoint(model, optimizer, stateful={"part": Part()}, every_steps=1 << 30)
saver.resume()
for step in range(1, SAVES + 1):
    own["part"] += 1.0
    phalanx.torch.report(step=step)
    saver.save(step, wait=True)
phalanx.torch.finish()
