"""Short trainings under three layouts, because the time of a whole step differs from the sum of its measured parts.

In plain torch, with the same model and global batch: data parallel (DDP), tensor parallel inside nodes, pipeline across them.
The pipeline runs all micro-batches forward and then all backward, which has the same bubble as 1F1B.
Source: Y. Huang et al., "GPipe", 2019; D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, 2.2.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from phalanx.core.work.layouts.layout import Axis, Layout
from phalanx.planner.calibration.profile import RunMeasurement
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.torch.calibrate.gang import CalibrationGang
from phalanx.torch.calibrate.small_gpt import GptStage


def _gpt(name: str, *, layers: int, hidden: int, heads: int, vocab: int, positions: int) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        gated=False,
        positions=positions,
        norm_vectors=2,
    )


# 12 layers and 24 heads divide by 2, 3, 4, 6 and 12, and the heads by 8, so most fleets can be split evenly.
# 400 million parameters on an accelerator: initialized in a second, and wide enough for realistic products.
# 3 million on a CPU, so that a step of four ranks on two cores takes a fraction of a second.
_CUDA_MODEL: Final = _gpt("calibrate-cuda", layers=12, hidden=1536, heads=24, vocab=32768, positions=2048)
_CPU_MODEL: Final = _gpt("calibrate-cpu", layers=6, hidden=192, heads=12, vocab=1024, positions=128)
_PER_RANK: Final = 4
"""Sequences per rank and step: a pipeline of p stages has 4 p micro-batches of one sequence."""
_WARM_UP: Final = 2  # steps: allocate memory, open connections, let DDP order its buckets
_STEPS: Final = {True: 5, False: 15}  # by `quick`; medians
_ACROSS: Final = (Axis.TENSOR, Axis.CONTEXT, Axis.SHARD, Axis.REPLICATE, Axis.PIPELINE)
"""Innermost first: replicas of one stage share a node, stages are on different nodes."""


def layouts_for(gang: CalibrationGang) -> list[Layout]:
    """Return up to three layouts for the fleet; only one if nodes differ in size, or for a single rank."""
    model = _model(gang)
    ranks, local, nodes = gang.world_size, gang.devices[0], len(gang.devices)
    precision = "bf16" if gang.on_cuda else "fp32"
    found = [Layout(replicate=ranks, micro_batch=_PER_RANK, precision=precision)]
    if len(set(gang.devices)) > 1:
        return found
    ways = math.gcd(local, model.heads)
    if ways > 1:
        batch = _PER_RANK * ways
        found.append(Layout(tensor=ways, replicate=ranks // ways, micro_batch=batch, precision=precision))
    stages = math.gcd(nodes if nodes > 1 else local, model.layers)
    if stages > 1:
        found.append(
            Layout(
                pipeline=stages,
                replicate=ranks // stages,
                micro_batches=_PER_RANK * stages,
                precision=precision,
                order=_ACROSS,
            )
        )
    return found


def train(gang: CalibrationGang, layout: Layout) -> list[RunMeasurement]:
    """Train a few steps; rank 0 returns the result. Collective."""
    model = _model(gang)
    trainer = _Trainer.make(gang, layout, model)
    for _ in range(_WARM_UP):
        trainer.step()
    gang.barrier()
    taken = []
    for _ in range(_STEPS[gang.quick]):
        began_s = time.perf_counter()
        trainer.step()
        taken.append(gang.maximum(time.perf_counter() - began_s))
    median_s = statistics.median(taken)
    if gang.rank != 0:
        return []
    return [
        RunMeasurement(
            model=model,
            layout=layout,
            seq=model.positions,
            step_s=median_s,
            nodes=len(gang.devices),
            gpus_per_node=gang.devices[0],
            spread=(max(taken) - min(taken)) / median_s,
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """The training on one rank.

    Attributes:
        stage: its layers; wrapped in DDP if there is one micro-batch.
        replicas: group for averaging gradients after the last of several micro-batches, because DDP would exchange after each.
        previous, following: ranks of the stage before and after; None at the ends.
    """

    layout: Layout
    model: ModelShape
    stage: Any
    replicas: Any
    optimizer: Any
    device: Any
    dtype: Any
    previous: int | None
    following: int | None

    @classmethod
    def make(cls, gang: CalibrationGang, layout: Layout, model: ModelShape) -> _Trainer:
        here = layout.coordinates(gang.rank)
        groups = {axis: _group(gang.rank, layout, axis) for axis in (Axis.TENSOR, Axis.REPLICATE)}
        number, hop = here[Axis.PIPELINE], layout.stride(Axis.PIPELINE)
        torch.manual_seed(number)  # the ranks of a tensor group see the same tokens
        stage: Any = GptStage(
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
            previous=None if number == 0 else gang.rank - hop,
            following=None if number == layout.pipeline - 1 else gang.rank + hop,
        )

    def step(self) -> None:
        """Run all micro-batches forward, all backward, and the optimizer; wait for the device."""
        passes = [self._forward() for _ in range(self.layout.micro_batches)]
        for given, result in passes:
            self._backward(given, result)
        if self.replicas is not None:
            self._average_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self) -> tuple[Any, Any]:
        """Return the input and the output of one micro-batch."""
        shape = (self.layout.micro_batch, self.model.positions)
        tokens_BS = torch.randint(self.model.vocab, shape, device=self.device)
        given = tokens_BS
        if self.previous is not None:
            given = torch.empty(*shape, self.model.hidden, device=self.device, dtype=self.dtype)
            dist.recv(given, self.previous)
            given.requires_grad_()
        result = self.stage(given, tokens_BS)
        if self.following is not None:
            dist.send(result.detach().contiguous(), self.following)
        return given, result

    def _backward(self, given: Any, result: Any) -> None:
        if self.following is None:
            (result / self.layout.micro_batches).backward()
        else:
            gradient_BSD = torch.empty_like(result)
            dist.recv(gradient_BSD, self.following)
            result.backward(gradient_BSD)
        if self.previous is not None:
            dist.send(given.grad.contiguous(), self.previous)

    def _average_gradients(self) -> None:
        """Average all gradients in one message."""
        gradients = [weight.grad for weight in self.stage.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.replicas)
        flat /= self.layout.replicate
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()


def _group(rank: int, layout: Layout, axis: Axis) -> Any:
    """Return the group of this rank along an axis; None for a group of one. Collective: all ranks must create every group."""
    if layout.size(axis) == 1:
        return None
    mine = None
    for ranks in _lines(layout, axis):
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine


def _lines(layout: Layout, axis: Axis) -> list[list[int]]:
    """Return the lists of ranks that differ only along the axis."""
    stride, size = layout.stride(axis), layout.size(axis)
    return [
        [first + place * stride for place in range(size)]
        for first in range(layout.ranks)
        if first // stride % size == 0
    ]


def _model(gang: CalibrationGang) -> ModelShape:
    return _CUDA_MODEL if gang.on_cuda else _CPU_MODEL
