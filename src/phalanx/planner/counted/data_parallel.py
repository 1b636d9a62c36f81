"""Memory and step time of a counted network under data parallel layouts: `dp=N`, `fsdp=N`, and sharded in a node with copies across.

Legend: P parameters, t trained ones, A saved bytes of a micro-batch, F its FLOPs (forward and backward), X bytes of the kernels that are no
products, K its kernels, B bytes/s of memory, R sustained FLOP/s, m micro-batches per step.
    memory   dp: 4 P + 4 t (gradients) + 4 t (buckets of DDP) + 8 t (Adam), and 2 P of the 16-bit copy; fsdp: 16 t / N and two gathered blocks
    device   products F / R, convolutions the longer of F / R and their bytes / (share of B), the others X / (share of B): unfused, as
             eager torch runs them
    host     K kernels of some microseconds each, as eager torch issues them; the step takes the longer of device and host
    dp       one all-reduce of 4 t bytes per step, hidden behind the backward pass of the last micro-batch up to a rest
    fsdp     per micro-batch two gathers of 2 P bytes and one reduce-scatter of 4 t, hidden behind computing up to a rest
    adam     28 bytes per trained parameter of the rank
Sources: S. Rajbhandari et al., "ZeRO", 2020, section 3.1; S. Li et al., "PyTorch Distributed", VLDB 2020, section 4.2 (buckets);
Y. Zhao et al., "PyTorch FSDP", 2023, section 3. Coefficients of the machine are those of transformers (`cost.coefficients`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.planner.cost.coefficients import Physics
from phalanx.planner.cost.collectives import RankGroup, RankNetwork
from phalanx.planner.cost.layer_time import best_flops
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.memory import ALLOCATOR_OVERHEAD, CONTEXT_BYTES
from phalanx.planner.cost.uncertainty import Z_80

AXIS_COST: Final = (
    0.01  # of the step, for sharding: the simpler of two equally fast layouts is first (search.layout_search)
)
KERNEL_S: Final = 6e-6
"""Time in which eager torch issues one kernel. Source: our estimate for one core at 3 GHz, 2026-11; a compiled or captured step takes less."""
EXPOSED: Final = 0.1  # rest of the communication that is not hidden: the first and last bucket
BACKWARD: Final = 2.0 / 3.0  # share of the FLOPs of a training step
SPREAD: Final = 0.2
"""Spread of the logarithm of the step time. Nothing was fitted: six published rows of one GPU have 0.10 (benchmarks.counted_networks), and none
has several GPUs."""
MEMORY_ERROR: Final = 1.15  # factor on either side of the expected memory: allocator, workspaces of convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedNetwork:
    """What `count_module` counts of one micro-batch of `batch` samples; FLOPs are multiplications and additions."""

    name: str
    batch: int
    parameters: int
    trained: int
    largest_block: int
    flops: float
    convolution_flops: float
    convolution_bytes: float
    traffic_bytes: float
    kernels: int
    saved_bytes: float
    output_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlan:
    """One layout of a counted network. `step_items_s` and `memory_bytes` are parts of their sums; `low_s` and `high_s` the 80 % interval."""

    shard: int
    replicate: int
    micro_batches: int
    memory_bytes: Mapping[str, float]
    usable_bytes: float
    step_items_s: Mapping[str, float]
    samples_per_s: float
    mfu: float

    @property
    def used_bytes(self) -> float:
        """The sum of the memory."""
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """Whether it is expected to have room; the error of the memory model is not subtracted."""
        return self.used_bytes <= self.usable_bytes * MEMORY_ERROR

    @property
    def is_tight(self) -> bool:
        """Whether the memory of the GPU is inside the interval of what is used."""
        return self.used_bytes / MEMORY_ERROR <= self.usable_bytes < self.used_bytes * MEMORY_ERROR

    @property
    def step_s(self) -> float:
        """The step."""
        return sum(self.step_items_s.values())

    @property
    def low_s(self) -> float:
        """The lower end of the interval."""
        return self.step_s / math.exp(Z_80 * SPREAD)

    @property
    def high_s(self) -> float:
        """The upper end."""
        return self.step_s * math.exp(Z_80 * SPREAD)

    @property
    def text(self) -> str:
        """The layout as `--plan` takes it."""
        words = [f"fsdp={self.shard}"] if self.shard > 1 else []
        words += [f"dp={self.replicate}"] if self.replicate > 1 or not words else []
        return ",".join(words) + (f",accumulate={self.micro_batches}" if self.micro_batches > 1 else "")


def plan_counted(
    network: CountedNetwork, machine: Machine, physics: Physics, *, micro_batches: int, precision: str
) -> list[DataParallelPlan]:
    """Return the data parallel layouts, those that fit first, each group by step time.

    Raises:
        KeyError: the GPU does not have the precision.
    """
    gpus, per_node = machine.gpus, machine.gpus_per_node
    shards = {1, gpus} | ({per_node} if gpus % per_node == 0 and 1 < per_node < gpus else set())
    plans = [
        _plan(network, machine, physics, shard, micro_batches=micro_batches, precision=precision)
        for shard in sorted(shards)
    ]
    return sorted(plans, key=lambda one: (not one.fits, one.step_s * (1.0 + (one.shard > 1) * AXIS_COST), one.shard))


def _plan(
    network: CountedNetwork, machine: Machine, physics: Physics, shard: int, *, micro_batches: int, precision: str
) -> DataParallelPlan:
    gpus = machine.gpus
    items = _step_items(network, machine, physics, shard, micro_batches=micro_batches, precision=precision)
    seconds = sum(items.values())
    samples = network.batch * micro_batches * gpus / seconds
    peak = (
        machine.gpu.flops.get(precision) or machine.gpu.flops.get("fp16") or best_flops(machine.gpu, physics, precision)
    )
    return DataParallelPlan(
        shard=shard,
        replicate=gpus // shard,
        micro_batches=micro_batches,
        memory_bytes=_memory(network, machine, shard, precision),
        usable_bytes=float(machine.gpu.memory_bytes),
        step_items_s=items,
        samples_per_s=samples,
        mfu=network.flops * micro_batches / seconds / peak,
    )


def _memory(network: CountedNetwork, machine: Machine, shard: int, precision: str) -> dict[str, float]:
    half = precision != "fp32"
    size = 2.0 if half else 4.0
    if shard == 1:
        buckets = 4.0 * network.trained if machine.gpus > 1 else 0.0
        held = {
            "parameters": 4.0 * network.parameters + (2.0 * network.parameters if half else 0.0),
            "gradients": 4.0 * network.trained + buckets,
            "optimizer states": 8.0 * network.trained,
        }
    else:
        held = {
            "parameters": 4.0 * network.parameters / shard,
            "gradients": 4.0 * network.trained / shard,
            "optimizer states": 8.0 * network.trained / shard,
            "gathered parameters": 2.0 * network.largest_block * size + network.largest_block * 4.0,
        }
    held["activations"] = network.saved_bytes
    held["outputs and loss"] = 3.0 * network.output_bytes
    held["context and fragments"] = CONTEXT_BYTES + (ALLOCATOR_OVERHEAD - 1.0) * sum(held.values())
    return held


def _step_items(
    network: CountedNetwork, machine: Machine, physics: Physics, shard: int, *, micro_batches: int, precision: str
) -> dict[str, float]:
    rate = best_flops(machine.gpu, physics, precision) * physics.matmul_share
    dense = network.flops - network.convolution_flops
    band = machine.gpu.memory_bytes_per_s * physics.memory_share
    products = dense / rate + max(network.convolution_flops / rate, network.convolution_bytes / band)
    others = network.traffic_bytes / band
    device = products + others
    waiting = max(0.0, network.kernels * KERNEL_S - device)
    exchanged = _exchange_s(network, machine, physics, shard, device + waiting, micro_batches, precision)
    optimizer = 28.0 * network.trained / shard / band
    return {
        "products": products * micro_batches,
        "other kernels": others * micro_batches,
        "waiting for the host": waiting * micro_batches,
        "communication": exchanged,
        "optimizer": optimizer + physics.step_s,
    }


def _exchange_s(
    network: CountedNetwork,
    machine: Machine,
    physics: Physics,
    shard: int,
    computing_s: float,
    micro_batches: int,
    precision: str,
) -> float:
    """Return the communication that computing does not hide."""
    if machine.gpus == 1:
        return 0.0
    fabric = RankNetwork(machine, physics)
    copies = machine.gpus // shard
    gradient = 4.0 * network.trained
    if shard == 1:
        return _exposed(fabric.group(copies, 1).all_reduce_s(gradient), computing_s * BACKWARD)
    inner: RankGroup = fabric.group(shard, 1)
    size = 4.0 if precision == "fp32" else 2.0
    each = 2.0 * inner.all_gather_s(size * network.parameters) + inner.all_gather_s(gradient)
    total = _exposed(each, computing_s) * micro_batches
    if copies > 1:
        total += _exposed(fabric.group(copies, shard).all_reduce_s(gradient / shard), computing_s * BACKWARD)
    return total


def _exposed(seconds: float, hidden_behind_s: float) -> float:
    return max(EXPOSED * seconds, seconds - hidden_behind_s)
