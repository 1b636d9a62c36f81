"""Time of one training step under one layout, item by item.

Legend: m micro-batches per step, p pipeline stages, v runs of layers per stage, L layers, n ranks that sum gradients.
    one micro-batch on the busiest stage   F + B of its L / p layers, plus the output's products and the loss on the last one
    the pipeline                           m of those, and (p - 1) / v times the mean stage, in which ranks wait (the bubble)
    a layer under sharded data parallel    the longer of computing and gathering the next one; hidden gathering slows computing by `interference`
    host                                   if the host issues kernels slower than the device runs them, the step takes the time of the host
    gradients and parameters, once a step  reduce-scatter, and gather of the updated parameters; hidden behind the last backward pass,
                                           except `data_exposed` of it and the part longer than that pass
    scoring                                a forward pass of a frozen model over every sequence, where the loss has one; for answers that the
                                           model wrote, some stacks ask the model itself too
    rollout                                the model writes the answers, and gets its new weights before (`planner.serving.rollout`)
    uneven answers                         what padding, or waiting for the rank with the longest ones, adds to training and scoring
    optimizer                              states read and written at memory bandwidth
Sources: bubble of 1F1B and interleaved 1F1B, D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, section 2.2; sharded data parallel, Y. Zhao et al., "PyTorch FSDP", 2023, section 3; states, S. Rajbhandari et al.,
"ZeRO", 2020, section 3.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.layouts.layout import Axis, Layout, Recompute
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.host_memory import copy_s, cpu_update_s
from phalanx.planner.cost.layer_time import (
    NARROW,
    LayerTime,
    SustainedRates,
    activation_bytes,
    layer_time,
)
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.memory import estimate_computed
from phalanx.planner.cost.optimizers import NARROW_UPDATE_SHARE, Offload
from phalanx.planner.cost.packed_weights import KERNEL_S, PACKED_FORMATS, PackedFormat
from phalanx.planner.cost.training_task import (
    Objective,
    TrainingMethod,
    TrainingTask,
    gathers_parameters,
    layer_parameters,
    rank_parameters,
    updated_parameters,
)

OVERLAP_EXPONENT = 6.0
"""Exponent with which overlapping computing and gathering combine: nearly the longer of the two. Prefetching is never perfect."""
MIXTURE_KERNELS = 2.0
"""Kernels of a mixture layer per kernel of a dense layer: router, permutation and groups in addition to the products."""
EXPERT_CASTS = 3.0
"""Kernels issued for one expert in fp8 per kernel in 16 bits: both operands of each product are cast and transposed, expert by expert."""
HIDING_SHARE = 0.7
"""Share of the time of one micro-batch that can hide the exchange of gradients: its backward pass."""


class StepItem(enum.StrEnum):
    """Kinds of work in a training step."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "small kernels"
    RECOMPUTATION = "recomputation"
    LOSS = "output and loss"
    TENSOR = "tensor parallel"
    CONTEXT = "context parallel"
    EXPERT = "expert all-to-all"
    SHARD = "sharded parameters"
    GRADIENTS = "gradients"
    HOST_COPIES = "host copies"
    PIPELINE = "pipeline sends"
    BUBBLE = "pipeline bubble"
    HOST = "host"
    OPTIMIZER = "optimizer"
    REFERENCE = "scoring"
    ROLLOUT = "rollout"
    WEIGHTS = "weights to the engine"
    UNEVEN = "uneven answers"
    FIXED = "per step"


_LINEAR: Final = (
    StepItem.MATMUL,
    StepItem.ELEMENTWISE,
    StepItem.RECOMPUTATION,
    StepItem.LOSS,
    StepItem.TENSOR,
    StepItem.CONTEXT,
    StepItem.EXPERT,
    StepItem.PIPELINE,
    StepItem.REFERENCE,
)
"""Items that grow with the tokens of a step; attention grows with their squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeconds:
    """What surrounds the training on answers that the model writes.

    Attributes:
        write_s, handover_s: of the answers, and of the engine and its weights before.
        reference_s: to fetch the reference.
        linear, square: time of a pass over all answers relative to as many of mean length: of products, and of attention.
        updates: optimizer steps in one step.
    """

    write_s: float
    handover_s: float
    reference_s: float = 0.0
    linear: float = 1.0
    square: float = 1.0
    updates: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step. `stages`: time of one micro-batch on a middle stage and on the last stage."""

    items: Mapping[StepItem, float]
    total_s: float
    stages: tuple[float, float]


def step_time(task: TrainingTask, layout: Layout, machine: Machine, physics: Physics, stack: Stack) -> StepTime:
    """Return the expected step time. To evaluate many layouts of one task, use `StepTimeCalculator`, which caches layer costs."""
    return StepTimeCalculator(task, machine, physics, stack).step_time(layout)


class StepTimeCalculator:
    """Compute step times of many layouts of one task. Caches the cost of a layer for each way to split it."""

    def __init__(
        self,
        task: TrainingTask,
        machine: Machine,
        physics: Physics,
        stack: Stack,
        rollout: Callable[[Layout, float], RolloutSeconds] | None = None,
    ) -> None:
        """`rollout` returns the times around the answers that are written, for a layout and its resident bytes on a device."""
        self.rollout = rollout
        self.task, self.machine, self.physics, self.stack = task, machine, physics, stack
        self.network = RankNetwork(machine, physics)
        self._layers: dict[object, tuple[LayerTime, LayerTime]] = {}
        self._rates: dict[str, SustainedRates] = {}

    def step_time(self, layout: Layout) -> StepTime:
        """Return the expected step time of one layout."""
        layout = self.task.computed(layout)
        physics = self.physics
        micro_batches, stages, runs = layout.micro_batches, layout.pipeline, layout.interleave
        items = dict.fromkeys(StepItem, 0.0)
        spent = [
            self._layer_items(layer, layout, mixture=mixture)
            for layer, mixture in zip(self._layer(layout), (False, True), strict=True)
        ]
        layers = self.task.model.layers
        shares = [count / layers for count in self._counts()]
        layer_s = sum(share * sum(one.values()) for share, one in zip(shares, spent, strict=True))
        output_s, embed_s = self._ends(layout)
        sends_s = self._sends_s(layout)
        per_stage, busiest_s = _busiest_stage(layers, layout, layer_s, output_s, embed_s)
        for share, one in zip(shares, spent, strict=True):
            for item, seconds in one.items():
                items[item] += per_stage * share * micro_batches * seconds
        stage_s = per_stage * layer_s
        mean_s = layers / stages * layer_s + (output_s + embed_s) / stages
        items[StepItem.LOSS] = micro_batches * (busiest_s - stage_s)
        items[StepItem.PIPELINE] = micro_batches * sends_s
        items[StepItem.BUBBLE] = (stages - 1) / runs * (mean_s + sends_s)
        items[StepItem.GRADIENTS] = self._gradients_s(layout, stage_s)
        items[StepItem.HOST_COPIES] += self._host_copies_s(layout, stage_s)
        items[StepItem.OPTIMIZER] = self._optimizer_s(layout)
        items[StepItem.FIXED] = physics.step_s
        if self.task.has_reference:
            passes = self.stack.scoring_passes if self.task.objective is Objective.GRPO else 1
            items[StepItem.REFERENCE] = passes * self._reference_s(layout, output_s)
        if self.rollout is not None:
            held = estimate_computed(self.task, layout, self.machine.gpu, self.stack)
            _put_rollout(items, self.rollout(layout, held.resident_bytes))
        return StepTime(items=items, total_s=sum(items.values()), stages=(stage_s, max(stage_s, busiest_s)))

    def _layer(self, layout: Layout) -> tuple[LayerTime, LayerTime]:
        """Return the costs of a dense layer and of a mixture layer."""
        split = (layout.tensor, layout.sequence, layout.context, layout.expert)
        strides = (layout.stride(Axis.TENSOR), layout.stride(Axis.CONTEXT))
        key = (split, strides, layout.micro_batch, layout.recompute, layout.precision)
        known = self._layers.get(key)
        if known is None:
            dense = self._compute_layer(layout, mixture=False)
            mixed = dense if self.task.model.mixture is None else self._compute_layer(layout, mixture=True)
            known = self._layers[key] = (dense, mixed)
        return known

    def _compute_layer(self, layout: Layout, *, mixture: bool) -> LayerTime:
        return layer_time(
            self.task.model,
            layout,
            self.task.seq,
            mixture=mixture,
            machine=self.machine,
            physics=self.physics,
            stack=self.stack,
            network=self.network,
            flash=self.task.flash,
            frozen=self.task.method is not TrainingMethod.FULL,
            packed=self._packed,
            adapted=self.task.adapted,
            attended=self.task.attended,
        )

    def _counts(self) -> tuple[int, int]:
        model = self.task.model
        return (model.dense_layers, model.layers - model.dense_layers)

    def _layer_items(self, layer: LayerTime, layout: Layout, *, mixture: bool) -> dict[StepItem, float]:
        """Return seconds of one layer and micro-batch by item."""
        forward, backward = layer.forward, layer.backward
        gather_s, reduce_s = self._shard_s(layout)
        copy_there_s, copy_back_s = self._layer_copies_s(layout)
        gather_s, reduce_s = gather_s + copy_there_s, reduce_s + copy_back_s
        copied = (2.0 * copy_there_s + copy_back_s) / (2.0 * gather_s + reduce_s) if copy_there_s else 0.0
        run = forward.total_s
        back = backward.total_s + layer.recompute_s
        shown = _overlapped(run, gather_s, self.physics.interference) - run
        shown += _overlapped(back, gather_s + reduce_s, self.physics.interference) - back
        device = run + back + shown
        passes = 3.0 if layout.recompute is Recompute.FULL else 2.0
        host = passes * self._host_s(layout, mixture=mixture) + self._unpack_host_s(passes)
        sharp = self.physics.host_sharpness
        longest = max(device, host)
        whole: float = longest * ((device / longest) ** sharp + (host / longest) ** sharp) ** (1.0 / sharp)
        return {
            StepItem.MATMUL: forward.matmul + backward.matmul,
            StepItem.ATTENTION: forward.attention + backward.attention,
            StepItem.ELEMENTWISE: forward.elementwise + backward.elementwise,
            StepItem.RECOMPUTATION: layer.recompute_s,
            StepItem.TENSOR: forward.tensor + backward.tensor,
            StepItem.CONTEXT: forward.context + backward.context,
            StepItem.EXPERT: forward.expert + backward.expert,
            StepItem.SHARD: shown * (1.0 - copied),
            StepItem.HOST_COPIES: shown * copied,
            StepItem.HOST: whole - device,
        }

    def _reference_s(self, layout: Layout, output_s: float) -> float:
        """Return the time of a forward pass over all micro-batches, in the same pipeline. The output's product is one of three (or two)."""
        gather_s = self._shard_s(layout)[0] + self._layer_copies_s(layout)[0]
        layer_s = 0.0
        for layer, count, mixture in zip(self._layer(layout), self._counts(), (False, True), strict=True):
            device_s = _overlapped(layer.forward.total_s, gather_s, self.physics.interference)
            layer_s += count * max(device_s, self._host_s(layout, mixture=mixture))
        whole_s = layer_s + output_s / (3.0 if self.task.method is TrainingMethod.FULL else 2.0)
        stages = layout.pipeline
        return whole_s / stages * (layout.micro_batches + (stages - 1) / layout.interleave)

    def _host_s(self, layout: Layout, *, mixture: bool) -> float:
        """Return the time to issue one pass through one layer. A mixture issues the products of each of its experts on this rank."""
        seconds = self.stack.host_s + self.physics.adapter_s * len(self.task.adapted)
        if gathers_parameters(self.task, layout):
            seconds += self.stack.shard_host_s
        if not mixture or self.task.model.mixture is None:
            return seconds
        casts = EXPERT_CASTS if layout.precision in NARROW else 1.0
        local = self.task.model.mixture.experts / layout.expert
        return seconds * MIXTURE_KERNELS + self.physics.expert_host_s * casts * local

    @property
    def _packed(self) -> PackedFormat | None:
        return PACKED_FORMATS[self.stack.packing] if self.task.method is TrainingMethod.QLORA else None

    def _unpack_host_s(self, passes: float) -> float:
        """Return the time to issue the kernels that unpack the matrices of a layer, in all passes that have not kept them."""
        if self._packed is None:
            return 0.0
        unpacks = passes - 1.0 if self._packed.is_kept else passes
        return unpacks * KERNEL_S * self._packed.kernels * len(self.task.model.layer_matrices)

    def _shard_s(self, layout: Layout) -> tuple[float, float]:
        """Return the time to gather the sharded parameters of one layer, and to reduce its gradients."""
        if layout.zero < 3 or layout.shard * layout.context == 1:
            return 0.0, 0.0
        group = self.network.axes(layout, Axis.CONTEXT, Axis.SHARD)
        few = max(1, layout.shard * layout.context // layout.expert)
        experts = self.network.group(few, layout.stride(Axis.CONTEXT) * layout.expert)
        held = layer_parameters(self.task.model, layout)
        gather = gather_bytes(self.task, layout, self.stack)
        reduce = reduce_bytes(layout, self.stack) * self._trained()
        return (
            group.all_gather_s(held.common * gather) + experts.all_gather_s(held.routed * gather),
            group.all_gather_s(held.common * reduce) + experts.all_gather_s(held.routed * reduce),
        )

    def _ends(self, layout: Layout) -> tuple[float, float]:
        """Return the time of one micro-batch in the output and loss with gradients, and in the embedding."""
        rates = self._rates_of(layout.precision)
        model, tokens = self.task.model, layout.micro_batch * self.task.seq / layout.context
        words = model.vocab / layout.tensor
        products = 3.0 if self.task.method is TrainingMethod.FULL else 2.0
        logits = self.physics.loss * tokens * words * (2.0 + 4.0 * 5.0) / rates.bytes
        output = products * rates.product_s(tokens, model.hidden, words, linear=False) + logits
        return output, self.physics.loss * tokens * model.hidden * rates.width * 6.0 / rates.bytes

    def _sends_s(self, layout: Layout) -> float:
        if layout.pipeline == 1:
            return 0.0
        tokens = layout.micro_batch * self.task.seq / layout.context
        bytes_ = tokens * self.task.model.hidden * activation_bytes(layout.precision)
        bytes_ /= layout.tensor if layout.sequence else 1
        hop = bytes_ / self.network.hop_bytes_per_s(layout.stride(Axis.PIPELINE)) + self.network.near_latency_s
        return 2.0 * layout.interleave * hop * self.physics.pipeline_exposed

    def _gradients_s(self, layout: Layout, stage_s: float) -> float:
        """Return the exchange once per step.

        ZeRO 2 also reduces after every other micro-batch, as it stores only a shard of the gradients. In a pipeline, whose micro-batches
        alternate, and in stacks that add up whole gradients, it reduces once.
        """
        stack, network = self.stack, self.network
        if layout.zero == 3:
            group = network.axis(layout, Axis.REPLICATE)
            count = rank_parameters(self.task.model, layout).sharded(layout) * self._trained()
            return stack.data_exposed * group.all_reduce_s(count * reduce_bytes(layout, stack))
        whole = network.axes(layout, Axis.CONTEXT, Axis.SHARD, Axis.REPLICATE)
        if whole.size == 1:
            return 0.0
        few = max(1, whole.size // layout.expert)
        experts = network.group(few, layout.stride(Axis.CONTEXT) * layout.expert)
        held = rank_parameters(self.task.model, layout)
        sent_bytes = reduce_bytes(layout, stack)
        back = _returned_bytes(layout, stack) if layout.zero else sent_bytes
        reduce, gather = (
            self._trained() * (whole.all_gather_s(held.common * sent) + experts.all_gather_s(held.routed * sent))
            for sent in (sent_bytes, back)
        )
        seconds = max(stack.data_exposed * (reduce + gather), reduce + gather - HIDING_SHARE * stage_s)
        if stack.data_exposed >= 1.0:
            seconds = reduce + gather
        if layout.zero == 2 and layout.pipeline == 1 and not stack.whole_gradients:
            seconds += (layout.micro_batches - 1) * self.physics.interference * reduce
        return seconds

    def _optimizer_s(self, layout: Layout) -> float:
        """Return the time to read and write states, read gradients and write parameters, and to clear or cast gradients.

        On the host the CPU updates, while parameters that are done return to the device.
        """
        held = rank_parameters(self.task.model, layout)
        count = held.total * self._trained()
        own = updated_parameters(self.task, layout)
        rates = self._rates_of(layout.precision)
        update = own * (30.0 if layout.zero < 3 else 32.0)
        rest_s = self.physics.optimizer * count * (4.0 if layout.zero < 3 else 0.0) / rates.bytes
        if self.task.offload is not Offload.NONE:
            update_s = cpu_update_s(own, layout, self.machine)
            if self.task.offload is Offload.OPTIMIZER:
                update_s = max(update_s, copy_s(own * self.stack.gather_bytes, layout, self.machine))
            return update_s + rest_s
        share = NARROW_UPDATE_SHARE if self.task.optimizer.is_narrow else 1.0
        return self.physics.optimizer * share * update / rates.bytes + rest_s

    def _host_copies_s(self, layout: Layout, stage_s: float) -> float:
        """Return the time, once a step, of pages that leave the device and return, or of gradients that go to the host.

        Gradients leave after every micro-batch where the stack keeps none on the device, and from the second on, their sum returns first.
        The backward passes hide them.
        """
        if self.task.optimizer.is_paged:
            paged_bytes = estimate_computed(self.task, layout, self.machine.gpu, self.stack).paged_bytes
            return 2.0 * copy_s(paged_bytes, layout, self.machine)
        if self.task.offload is not Offload.OPTIMIZER:
            return 0.0
        once_s = copy_s(updated_parameters(self.task, layout) * reduce_bytes(layout, self.stack), layout, self.machine)
        if not self.stack.offloads_gradients or layout.zero == 1:
            return once_s
        copies = 2 * layout.micro_batches - 1
        return max(0.0, copies * once_s - HIDING_SHARE * layout.micro_batches * stage_s)

    def _layer_copies_s(self, layout: Layout) -> tuple[float, float]:
        """Return the time to fetch this rank's shard of a layer from the host, and to send its gradients there."""
        if self.task.offload is not Offload.PARAMETERS:
            return 0.0, 0.0
        held = layer_parameters(self.task.model, layout).sharded(layout)
        there = self.stack.host_copy_bytes if self._packed is None else self._packed.weight_bytes
        back = reduce_bytes(layout, self.stack) * self._trained()
        return copy_s(held * there, layout, self.machine), copy_s(held * back, layout, self.machine)

    def _trained(self) -> float:
        return 1.0 if self.task.method is TrainingMethod.FULL else self.task.adapter_share

    def _rates_of(self, precision: str) -> SustainedRates:
        if precision not in self._rates:
            self._rates[precision] = SustainedRates(self.machine, self.physics, self.stack, precision)
        return self._rates[precision]


def _put_rollout(items: dict[StepItem, float], found: RolloutSeconds) -> None:
    """Add what surrounds the training on written answers. Each update fills and empties the pipeline, and exchanges gradients."""
    for item in (StepItem.BUBBLE, StepItem.GRADIENTS, StepItem.OPTIMIZER, StepItem.FIXED):
        items[item] *= found.updates
    uneven = (found.linear - 1.0) * sum(items[item] for item in _LINEAR)
    items[StepItem.UNEVEN] = uneven + (found.square - 1.0) * items[StepItem.ATTENTION]
    items[StepItem.REFERENCE] += found.reference_s
    items[StepItem.ROLLOUT], items[StepItem.WEIGHTS] = found.write_s, found.handover_s


def _busiest_stage(layers: int, layout: Layout, layer_s: float, output_s: float, embed_s: float) -> tuple[float, float]:
    """Return the layers of a middle stage, and the time of one micro-batch on the busiest stage.

    Layers that the stages (and their runs) divide are shared equally. Others are laid out by hand in practice: the last stage, which has the
    output, gets fewer of them, so that the busiest stage is as short as possible.
    """
    stages = layout.pipeline
    if stages == 1:
        return layers, layers * layer_s + output_s + embed_s
    if layers % (stages * layout.interleave) == 0:
        return layers / stages, layers / stages * layer_s + max(output_s, embed_s)
    most = -(-layers // stages)

    def busiest(last: int) -> tuple[float, float]:
        middle = -(-(layers - last) // (stages - 1))
        return max(middle * layer_s + embed_s, last * layer_s + output_s), middle

    longest_s, middle = min(busiest(last) for last in range(most + 1))
    return middle, longest_s


def gather_bytes(task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Return bytes sent per parameter to gather it; packed weights are unpacked by the receiver."""
    if task.method is TrainingMethod.QLORA:
        return PACKED_FORMATS[stack.packing].weight_bytes
    return _returned_bytes(layout, stack)


def reduce_bytes(layout: Layout, stack: Stack) -> float:
    """Return bytes sent per parameter to reduce its gradient: at least the width of the products."""
    return max(stack.reduce_bytes, float(activation_bytes(layout.precision)))


def _returned_bytes(layout: Layout, stack: Stack) -> float:
    """Return bytes sent per updated parameter: at least the width of the products."""
    return max(stack.gather_bytes, float(activation_bytes(layout.precision)))


def _overlapped(compute_s: float, exchange_s: float, interference: float) -> float:
    if not exchange_s:
        return compute_s
    longest = max(compute_s, exchange_s)
    both: float = longest * (
        (compute_s / longest) ** OVERLAP_EXPONENT + (exchange_s / longest) ** OVERLAP_EXPONENT
    ) ** (1.0 / OVERLAP_EXPONENT)
    return both + interference * min(compute_s, exchange_s)
