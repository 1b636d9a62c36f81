"""Short trainings under three layouts: what a whole step takes, which no sum of measured parts quite says.

In plain torch, and the same model and global batch in each: data parallel (DDP), tensor parallel inside nodes, pipeline across them.
The pipeline runs all micro-batches forward and then all backward, whose bubble is 1F1B's.
Source: Y. Huang et al., "GPipe", 2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, 2.2.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.performance.model import Model
from phalanx.core.performance.profile import RunFound
from phalanx.core.work.layout import Axis, Layout
from phalanx.torch.calibrate.gang import Gang
from phalanx.torch.calibrate.gpt import Stage

# 12 layers and 24 heads divide by 2, 3, 4, 6 and 12, and the heads by 8: most fleets can be split evenly.
# 400 million parameters on an accelerator: there in a second, and wide enough for the products to be real.
_CUDA_MODEL: Final = Model(
    name="calibrate-cuda", layers=12, hidden=1536, heads=24, kv_heads=24, head_dim=64, ffn=6144, vocab=32768,
    gated=False, positions=2048, norm_vectors=2,
)  # fmt: skip
# 3 million on a CPU, so that a step of four ranks on two cores is a fraction of a second.
_CPU_MODEL: Final = Model(
    name="calibrate-cpu", layers=6, hidden=192, heads=12, kv_heads=12, head_dim=16, ffn=768, vocab=1024,
    gated=False, positions=128, norm_vectors=2,
)  # fmt: skip
_PER_RANK: Final = 4
"""Sequences of a step per rank: the pipeline of p stages has 4 p micro-batches of one."""
_WARM_UP: Final = 2  # steps: memory is taken, connections are made, DDP orders its buckets
_STEPS: Final = {True: 5, False: 15}  # by `quick`; medians
_ACROSS: Final = (Axis.TENSOR, Axis.CONTEXT, Axis.SHARD, Axis.REPLICATE, Axis.PIPELINE)
"""Innermost first: replicas of one stage share a node, stages are on different ones."""


def layouts_for(gang: Gang) -> list[Layout]:
    """Up to three that fit the fleet. One alone where nodes differ in size, or there is one rank only."""
    model = _model(gang)
    ranks, local, nodes = gang.world_size, gang.devices[0], len(gang.devices)
    precision = "bf16" if gang.on_cuda else "fp32"
    found = [Layout(replicate=ranks, micro_batch=_PER_RANK, precision=precision)]
    if len(set(gang.devices)) > 1:
        return found
    ways = _divisor(local, model.heads)
    if ways > 1:
        batch = _PER_RANK * ways
        found.append(Layout(tensor=ways, replicate=ranks // ways, micro_batch=batch, precision=precision))
    stages = _divisor(nodes if nodes > 1 else local, model.layers)
    if stages > 1:
        found.append(
            Layout(
                pipeline=stages, replicate=ranks // stages, micro_batches=_PER_RANK * stages, precision=precision,
                order=_ACROSS,
            )
        )  # fmt: skip
    return found


def train(gang: Gang, layout: Layout) -> list[RunFound]:
    """A few steps; what rank 0 found, for its ranks wait for each other in every step. Collective."""
    model = _model(gang)
    trainer = _Trainer.make(gang, layout, model)
    for _ in range(_WARM_UP):
        trainer.step()
    gang.barrier()
    taken = []
    for _ in range(_STEPS[gang.quick]):
        began_s = time.perf_counter()
        trainer.step()
        taken.append(gang.worst(time.perf_counter() - began_s))
    median_s = statistics.median(taken)
    if gang.rank != 0:
        return []
    return [
        RunFound(
            model=model, layout=layout, seq=model.positions, step_s=median_s, nodes=len(gang.devices),
            gpus_per_node=gang.devices[0], spread=(max(taken) - min(taken)) / median_s,
        )
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """One rank's part of the training.

    Attributes:
        stage: its layers; in DDP where there is one micro-batch.
        replicas: group to average gradients in after the last of several micro-batches, for DDP would send after each.
        back, on: ranks with the stage before and after; None at the ends.
    """

    layout: Layout
    model: Model
    stage: Any
    replicas: Any
    optimizer: Any
    device: Any
    dtype: Any
    back: int | None
    on: int | None

    @classmethod
    def make(cls, gang: Gang, layout: Layout, model: Model) -> _Trainer:
        here = layout.coordinates(gang.rank)
        groups = {axis: _group(gang.rank, layout, axis) for axis in (Axis.TENSOR, Axis.REPLICATE)}
        number, hop = here[Axis.PIPELINE], layout.stride(Axis.PIPELINE)
        torch.manual_seed(number)  # the ranks of a tensor group see the same tokens
        stage: Any = Stage(
            model, number=number, stages=layout.pipeline, group=groups[Axis.TENSOR], ways=layout.tensor
        ).to(gang.device, torch.bfloat16 if gang.on_cuda else torch.float32)
        dtype = next(stage.parameters()).dtype
        replicas = groups[Axis.REPLICATE]
        if replicas is not None and layout.micro_batches == 1:
            stage, replicas = DistributedDataParallel(stage, process_group=replicas), None
        return cls(
            layout=layout,
            model=model,
            stage=stage,
            replicas=replicas,
            optimizer=torch.optim.AdamW(stage.parameters(), lr=1e-4),
            device=gang.device,
            dtype=dtype,
            back=None if number == 0 else gang.rank - hop,
            on=None if number == layout.pipeline - 1 else gang.rank + hop,
        )

    def step(self) -> None:
        """All micro-batches forward, all backward, the optimizer; the device is idle at the end."""
        kept = [self._forward() for _ in range(self.layout.micro_batches)]
        for given, made in kept:
            self._backward(given, made)
        if self.replicas is not None:
            self._average_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self) -> tuple[Any, Any]:
        """What came in and what went out."""
        shape = (self.layout.micro_batch, self.model.positions)
        tokens_BS = torch.randint(self.model.vocab, shape, device=self.device)
        given = tokens_BS
        if self.back is not None:
            given = torch.empty(*shape, self.model.hidden, device=self.device, dtype=self.dtype)
            dist.recv(given, self.back)
            given.requires_grad_()
        made = self.stage(given, tokens_BS)
        if self.on is not None:
            dist.send(made.detach().contiguous(), self.on)
        return given, made

    def _backward(self, given: Any, made: Any) -> None:
        if self.on is None:
            (made / self.layout.micro_batches).backward()
        else:
            gradient_BSD = torch.empty_like(made)
            dist.recv(gradient_BSD, self.on)
            made.backward(gradient_BSD)
        if self.back is not None:
            dist.send(given.grad.contiguous(), self.back)

    def _average_gradients(self) -> None:
        """All of them in one message."""
        gradients = [weight.grad for weight in self.stage.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.replicas)
        flat /= self.layout.replicate
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()


def _group(rank: int, layout: Layout, axis: Axis) -> Any:
    """This rank's group along an axis; None for a group of one. Every rank takes part in the making of every group."""
    if layout.size(axis) == 1:
        return None
    mine = None
    for ranks in _lines(layout, axis):
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine


def _lines(layout: Layout, axis: Axis) -> list[list[int]]:
    """Ranks that differ in their place along the axis alone."""
    stride, size = layout.stride(axis), layout.size(axis)
    return [
        [first + place * stride for place in range(size)]
        for first in range(layout.ranks)
        if first // stride % size == 0
    ]


def _divisor(count: int, of: int) -> int:
    """The largest divisor of `count` that divides `of`, too."""
    return max(ways for ways in range(1, count + 1) if count % ways == 0 and of % ways == 0)


def _model(gang: Gang) -> Model:
    return _CUDA_MODEL if gang.on_cuda else _CPU_MODEL
