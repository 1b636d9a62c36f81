"""One rank of the rank-order benchmark: a small GPT under tensor, pipeline and data parallel, each arm of each case in turn.

    python -m benchmarks.rank_order_rank '{"arms": [...], "rounds": 5, "steps": 2, "shape": {...}}'

Plain torch over gloo without `phalanx.torch`, so that only the order of the ranks matters. All arms alternate in the same processes, so
that other load on the machine affects them equally. Prints one JSON line per arm and round.

Shapes: B sequences of a micro-batch, S tokens, D width, H heads, V vocabulary; t is the number of tensor parallel ranks.
"""

# ruff: noqa: N803, N806, N812  # tensors carry a shape suffix, and F is torch's own habit
from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.core.work.layouts.layout import Axis, Layout, layout_from_json

PORT = os.environ.get("RANK_ORDER_INTERFACE", "eth0")
RATE = 0.1  # of learning; any that makes the loss move
REPEATS = 20  # of what `rates` times: some 0.5 s for the slowest
SENT = f"/sys/class/net/{PORT}/statistics/tx_bytes"


class CopyIn(torch.autograd.Function):
    """Before a column-parallel product: the input as it is; its gradients are summed over the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Store the group."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the parts."""
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class SumOut(torch.autograd.Function):
    """After a row-parallel product: partial outputs are summed over the tensor ranks; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Sum the parts."""
        del ctx
        whole = x.contiguous()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each part has the gradient of the sum."""
        del ctx
        return gradients[0], None


class Arm:
    """One layout on given seats: this process's groups, weights and data in it."""

    def __init__(self, record: dict[str, Any], shape: dict[str, int]) -> None:
        self.name: str = record["name"]
        self.layout: Layout = layout_from_json(record["layout"])
        self.seats: list[int] = record["seats"]
        self.shape = shape
        self.place = self.layout.coordinates(self.seats.index(dist.get_rank()))
        self.tensor_group = self._group(Axis.TENSOR)
        self.copies = self._group(Axis.REPLICATE)
        stage, stages = self.place[Axis.PIPELINE], self.layout.pipeline
        self.first, self.last = stage == 0, stage == stages - 1
        each = shape["layers"] // stages
        self.blocks = [self._block(stage * each + layer) for layer in range(each)]
        self.embedding_VD = self._weight("embedding", shape["vocabulary"], shape["width"])
        self.head_VD = self._weight("head", shape["vocabulary"], shape["width"])
        self.step_number = 0

    def step(self) -> float:
        """Run one step of all micro-batches; return the loss on the last stage, else 0."""
        self.step_number += 1
        passed = [self._forward(number) for number in range(self.layout.micro_batches)]
        for x_BSD, y in passed:
            self._backward(x_BSD, y)
        weights = [weight for weight in self._weights() if weight.grad is not None]
        if self.layout.replicate > 1:
            whole = torch.cat([weight.grad.flatten() for weight in weights]) / self.layout.replicate
            dist.all_reduce(whole, group=self.copies)
            for weight, gradient in zip(weights, whole.split([weight.numel() for weight in weights]), strict=True):
                weight.grad.copy_(gradient.view_as(weight))
        with torch.no_grad():
            for weight in weights:
                weight.sub_(weight.grad, alpha=RATE)
                weight.grad = None
        return sum(float(y.detach()) for _, y in passed) if self.last else 0.0

    def _forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, layout = self.shape, self.layout
        seed = (self.step_number * layout.micro_batches + number) * layout.replicate + self.place[Axis.REPLICATE]
        drawn = torch.Generator().manual_seed(seed)
        size = (layout.micro_batch, shape["sequence"] + 1)
        tokens_BS = torch.randint(shape["vocabulary"] // 4, size, generator=drawn)
        if self.first:
            x_BSD = start_BSD = F.embedding(tokens_BS[:, :-1], self.embedding_VD)
        else:
            start_BSD = torch.empty(layout.micro_batch, shape["sequence"], shape["width"])
            dist.recv(start_BSD, src=self._neighbour(-1))
            x_BSD = start_BSD.requires_grad_()
        for block in self.blocks:
            x_BSD = self._through(block, x_BSD)
        if not self.last:
            dist.send(x_BSD.detach(), dst=self._neighbour(+1))
            return start_BSD, x_BSD
        scores = F.layer_norm(x_BSD, (shape["width"],)) @ self.head_VD.T
        return start_BSD, F.cross_entropy(scores.flatten(0, 1), tokens_BS[:, 1:].flatten()) / layout.micro_batches

    def _backward(self, start_BSD: torch.Tensor, y: torch.Tensor) -> None:
        if self.last:
            y.backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, src=self._neighbour(+1))
            y.backward(gradient)
        if not self.first:
            dist.send(start_BSD.grad, dst=self._neighbour(-1))

    def _through(self, block: dict[str, torch.Tensor], x_BSD: torch.Tensor) -> torch.Tensor:
        width, group = self.shape["width"], self.tensor_group
        batch, sequence = x_BSD.shape[:2]
        heads = self.shape["heads"] // self.layout.tensor
        inner = CopyIn.apply(F.layer_norm(x_BSD, (width,)), group) @ block["qkv"].T
        q, k, v = inner.view(batch, sequence, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, sequence, -1)
        x_BSD = x_BSD + SumOut.apply(mixed @ block["out"].T, group)
        raised = F.gelu(CopyIn.apply(F.layer_norm(x_BSD, (width,)), group) @ block["up"].T)
        return x_BSD + SumOut.apply(raised @ block["down"].T, group)

    def _block(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the part of each matrix on this rank."""
        width, t, mine = self.shape["width"], self.layout.tensor, self.place[Axis.TENSOR]
        sizes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
        parts = {}
        for name, (rows, columns) in sizes.items():
            whole = self._weight(f"{name}{layer}", rows, columns).detach()
            if name == "qkv":  # each rank has its heads of all three
                part = whole.view(3, t, -1, width)[:, mine].reshape(-1, width)
            else:
                part = whole.chunk(t, dim=0 if name == "up" else 1)[mine]
            parts[name] = part.clone().requires_grad_()
        return parts

    def _weight(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Return a random weight that depends only on its name: equal in all processes and arms."""
        drawn = torch.Generator().manual_seed(int.from_bytes(name.encode().ljust(8)[:8], "little") >> 1)
        return (torch.randn(rows, columns, generator=drawn) * columns**-0.5).requires_grad_()

    def _weights(self) -> list[torch.Tensor]:
        return [weight for block in self.blocks for weight in block.values()] + [self.embedding_VD, self.head_VD]

    def _group(self, axis: Axis) -> Any:
        """Return the process group of this rank along the axis. Collective: all processes create all groups in the same order."""
        mine = None
        for rank in range(self.layout.ranks):
            if self.layout.coordinates(rank)[axis] == 0:
                members = [self.seats[rank + self.layout.stride(axis) * step] for step in range(self.layout.size(axis))]
                group = dist.new_group(members)
                mine = group if dist.get_rank() in members else mine
        return mine

    def _neighbour(self, step: int) -> int:
        """Return the process of a neighbouring stage."""
        return self.seats[self.seats.index(dist.get_rank()) + step * self.layout.stride(Axis.PIPELINE)]


def sent_bytes() -> int:
    """Return the bytes that this host has sent over its link."""
    with open(SENT, encoding="ascii") as file:
        return int(file.read())


def measure(arm: Arm, steps: int) -> dict[str, Any]:
    """Measure some steps of one arm, from a common start to the end on this rank."""
    dist.barrier()
    before = sent_bytes()
    began = time.perf_counter()
    loss = 0.0
    for _ in range(steps):
        loss = arm.step()
    took_s = time.perf_counter() - began
    dist.barrier()
    return {"arm": arm.name, "step_s": took_s / steps, "loss": loss, "sent_bytes": (sent_bytes() - before) / steps}


def rates(shape: dict[str, int], devices: int, micro_batch: int) -> dict[str, float]:
    """Measure the rates of this rank while all ranks are busy. They are the input of the planner; nothing is fitted to the step times."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, width = micro_batch * shape["sequence"], shape["width"]
    inside = [dist.new_group(list(range(first, first + devices))) for first in range(0, world, devices)]
    across = [dist.new_group(list(range(index, world, devices))) for index in range(devices)]
    x, w = torch.randn(tokens, width), torch.randn(width, 4 * width // devices)
    share = (devices - 1) / devices, (world // devices - 1) * devices / world
    sent_bytes = [2.0 * part * 4.0 * x.numel() for part in share]
    return {
        "flops": 2.0 * x.numel() * w.shape[1] / _each_s(lambda: x @ w),
        "memory_bytes_per_s": 2.0 * 4.0 * x.numel() / _each_s(lambda: x * 2.0),
        "within_bytes_per_s": sent_bytes[0] / _each_s(lambda: dist.all_reduce(x, group=inside[rank // devices])),
        "between_bytes_per_s": sent_bytes[1] / _each_s(lambda: dist.all_reduce(x, group=across[rank % devices])),
    }


def _each_s(what: Callable[[], Any]) -> float:
    """Return the seconds of one repeat; all ranks repeat at once."""
    what()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REPEATS):
        what()
    took_s = time.perf_counter() - began
    dist.barrier()
    return took_s / REPEATS


def main() -> None:
    """Run all arms in turn."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arms = [Arm(record, asked["shape"]) for record in asked["arms"]]
    for arm in arms:
        measure(arm, 1)  # connections and allocator
    found = rates(asked["shape"], asked["devices"], arms[0].layout.micro_batch)
    print(json.dumps({"arm": "rates", **found}), flush=True)
    for number in range(asked["rounds"]):
        turn = arms if number % 2 == 0 else arms[::-1]
        for arm in turn:
            print(json.dumps({"round": number, **measure(arm, asked["steps"])}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
