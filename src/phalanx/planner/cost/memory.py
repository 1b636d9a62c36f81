"""Device memory of the fullest rank under one layout, item by item.

Legend: T tokens of a micro-batch on this rank, d hidden, h k heads x features, g key-value heads, f MLP width, t tensor parallel ranks,
p stages, v runs per stage.
    states       per parameter: the multiplied copy, the gradient, the optimizer states; ZeRO 1, 2, 3 shard them from the right
    activations  per layer and token in bytes, 16-bit: block inputs and norm outputs 8 d, queries, keys, values 2 (h + 2 g) k / t,
                 attention's output 2 h k / t, MLP 2 to 6 f / t; in fp8 the inputs of the products take one byte instead of two;
                 without flash attention 5 bytes per score: h s / t
    in flight    in a pipeline the first stage stores p micro-batches, p (1 + (p - 1) / (p v)) with interleaving
    offload      states on the host, with them gradients (all but a bucket) where the stack sends them there, and weights (all but the layers in
                 use)
    paged        states that have no room beside the activations leave the device
    reference    frozen 16-bit weights, sharded like the trained ones; with adapters there are none, because the frozen model is the reference
    engine       what sleeps of an inference engine; or all that it needs beside weights and states while answers are written, if that is more
    adapters     frozen weights have neither gradients nor states; with 4-bit weights, embeddings, output and norms stay in 16 or 32 bits, and one
                 matrix at a time is unpacked, or a layer (`packed_weights.py`); the input of each adapter is kept
    update       copies and intermediate results of the optimizer, which can be larger than the activations that were there before
    loss         logits, their 32-bit copy and gradients, on the last stage
Sources: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equations 2 to 5 and section 4.3;
S. Rajbhandari et al., "ZeRO", 2020, section 3.1; E. Hu et al., "LoRA", 2021; T. Dettmers et al., "QLoRA", 2023 (4.127 bits a weight).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.work.layouts.layout import Layout, Recompute
from phalanx.planner.cost.coefficients import Stack
from phalanx.planner.cost.layer_time import ACTIVATION_BYTES, activation_bytes
from phalanx.planner.cost.machine import Gpu
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import Offload, optimizer_state_bytes
from phalanx.planner.cost.packed_weights import PACKED_FORMATS
from phalanx.planner.cost.training_task import (
    RankParameters,
    TrainingMethod,
    TrainingTask,
    gathers_parameters,
    layer_parameters,
    rank_parameters,
)

CONTEXT_BYTES: Final = 1.2e9
"""CUDA context, NCCL buffers and library workspaces outside the allocator. Source: our estimate for NCCL with eight channels on Hopper,
2026-11; `phalanx calibrate` on a real device replaces it."""
ALLOCATOR_OVERHEAD: Final = 1.04
"""Reserved over allocated memory of torch's caching allocator with expandable segments, and without them where the device has no room left.
Source: our estimate, 2026-11."""
HOST_GRADIENT_BYTES: Final = 4.0
"""On the host, per parameter that it updates, beside the states. Source: DeepSpeed docs/code-docs/source/memory.rst: 16 bytes a parameter with
the optimizer on the host, 18 with the parameters too, and up to half more for pinned buffers."""
PAGED_FILL: Final = 0.95
"""Share of the usable memory that is in use when paged states have left. Source: the share that layouts of a search leave free, and 1 % more."""
ENGINE_ASLEEP_BYTES: Final = 1.5e9
"""Device memory of an inference engine that has freed its weights and cache: context, CUDA graphs and collectives. Source: our estimate;
docs.vllm.ai features/sleep_mode (2026-11) has "over 90 %" of the memory freed."""
ERROR: Final = 1.10
"""Factor below and above the expected memory between which four of five runs are. A layout is refused only beyond it. The mean error of full
training is 6 %, which makes 10 % (benchmarks.planner)."""
ADAPTER_ERROR: Final = 1.16
"""The same with adapters, and with the stacks that most small tunings use (`Stack.memory_error`): with it, four of five published tunings are
inside, and three of four of each source. Their programs keep more or less than one another (benchmarks/tuning_measured.csv)."""


class MemoryItem(enum.StrEnum):
    """Kinds of content of device memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    BUFFERS = "buffers and update"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    REFERENCE = "reference model"
    ENGINE = "inference engine"
    OTHER = "context and fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank. `usable_bytes` is the memory that a program can use, `error` the factor to either end of the 80 % interval.

    `fragmentation`: share of the reserved memory that is in no tensor, while there is room (`Stack.fragmentation`).
    `host_bytes`: in the memory of the host, for this rank; `paged_bytes`: those of them that return to the device for the update;
    `pageable_bytes`: on the device, but free to leave it.
    """

    items: Mapping[MemoryItem, float]
    total_bytes: float
    usable_bytes: float
    error: float = ERROR
    fragmentation: float = 0.0
    host_bytes: float = 0.0
    paged_bytes: float = 0.0
    pageable_bytes: float = 0.0

    @property
    def low_bytes(self) -> float:
        """The lower end of the 80 % interval of `total_bytes`."""
        return self.total_bytes / self.error

    @property
    def high_bytes(self) -> float:
        """The upper end of that interval: what may be needed beyond the expected bytes moves states out where they are paged."""
        beyond = self.total_bytes * (self.error - 1.0)
        return self.total_bytes + max(0.0, beyond - self.pageable_bytes)

    @property
    def free_bytes(self) -> float:
        """Free bytes; negative if the layout does not fit."""
        return self.usable_bytes - self.total_bytes

    @property
    def resident_bytes(self) -> float:
        """Bytes that stay on the device between two steps."""
        return sum(self.items[item] for item in (MemoryItem.PARAMETERS, MemoryItem.STATES, MemoryItem.REFERENCE))

    @property
    def device_bytes(self) -> float:
        """Bytes that nvidia-smi shows: all that is reserved, and the CUDA context. They can be more than `total_bytes`, which the run needs."""
        tensors = self.total_bytes - self.items[MemoryItem.OTHER]
        shown = tensors / (1.0 - self.fragmentation) + CONTEXT_BYTES
        return max(self.total_bytes, min(shown, self.usable_bytes))

    @property
    def reserved_bytes(self) -> float:
        """Bytes that torch.cuda.max_memory_reserved reports: without the CUDA context."""
        return self.device_bytes - CONTEXT_BYTES


def estimate_memory(task: TrainingTask, layout: Layout, gpu: Gpu, stack: Stack) -> MemoryEstimate:
    """Return the memory of the fullest rank: on the first or the last stage."""
    return estimate_computed(task, task.computed(layout), gpu, stack)


def estimate_computed(task: TrainingTask, layout: Layout, gpu: Gpu, stack: Stack) -> MemoryEstimate:
    """Do the same for a layout of `TrainingTask.computed`, whose micro-batches are counted in sequences."""
    items = dict.fromkeys(MemoryItem, 0.0)
    host_bytes = _put_parameters(items, task, layout, stack) + _put_states(items, task, layout, stack)
    _put_activations(items, task, layout, stack)
    if task.offload is Offload.NONE:
        # The optimizer runs when activations and buffers are free again; it needs more only if its copies are larger than they.
        at_once = _updated(task, layout, stack, sharded=layout.zero >= 1)
        if layout.zero == 3 and stack.step_parameters:
            at_once = min(at_once, stack.step_parameters)
        stepping = stack.step_bytes * at_once
        buffers = _buffer_bytes(layout, stack)
        free = items[MemoryItem.ACTIVATIONS] + items[MemoryItem.LOSS] + buffers
        items[MemoryItem.BUFFERS] = buffers + max(0.0, stepping - free)
    if task.engine_bytes:
        idle = (MemoryItem.PARAMETERS, MemoryItem.STATES, MemoryItem.REFERENCE)
        writing = task.engine_bytes + sum(items[item] for item in idle)
        items[MemoryItem.ENGINE] = max(ENGINE_ASLEEP_BYTES, writing - sum(items.values()))
    usable, paged = usable_bytes(gpu), 0.0
    if task.optimizer.is_paged:
        over = CONTEXT_BYTES + ALLOCATOR_OVERHEAD * sum(items.values()) - PAGED_FILL * usable
        paged = max(0.0, min(items[MemoryItem.STATES], over / ALLOCATOR_OVERHEAD))
        items[MemoryItem.STATES] -= paged
    together = sum(items.values())
    items[MemoryItem.OTHER] = CONTEXT_BYTES + (ALLOCATOR_OVERHEAD - 1.0) * together
    return MemoryEstimate(
        items=items,
        total_bytes=together + items[MemoryItem.OTHER],
        usable_bytes=usable,
        error=max(stack.memory_error, ADAPTER_ERROR if task.method is not TrainingMethod.FULL else ERROR),
        fragmentation=stack.fragmentation,
        host_bytes=host_bytes + paged,
        paged_bytes=paged,
        pageable_bytes=items[MemoryItem.STATES] if task.optimizer.is_paged else 0.0,
    )


def _put_parameters(items: dict[MemoryItem, float], task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Add the weights of the device to `items`, and return the bytes of those on the host."""
    model = task.model
    held = _held(task, layout, stack)
    here, shared = held.total, held.sharded(layout)
    frozen = task.method is not TrainingMethod.FULL
    on_host = task.offload is Offload.PARAMETERS
    reference = 0.0
    if task.has_reference and not frozen:
        reference = (shared if gathers_parameters(task, layout) else here) * activation_bytes(layout.precision)
        items[MemoryItem.REFERENCE] = 0.0 if on_host else reference
    if task.method is TrainingMethod.QLORA:
        base = packed_model_bytes(model, layout, stack) / here
    else:
        base = max(stack.parameter_bytes, float(ACTIVATION_BYTES) if frozen else 0.0)
    if not gathers_parameters(task, layout):
        items[MemoryItem.PARAMETERS] = here * base
        if frozen:
            items[MemoryItem.PARAMETERS] += here * task.adapter_share * stack.parameter_bytes
        return 0.0
    # FSDP stores sharded parameters in the precision of the optimizer; they are the master copy, counted in `state_bytes`.
    stored = shared * (base if frozen else stack.shard_copy_bytes)
    at_once = 2.0 * layer_parameters(model, layout).total  # the running layer and the layer being gathered
    if stack.live_parameters and (on_host or layout.shard * layout.context > 1):
        # The output is gathered whole beside those that are kept.
        at_once = max(at_once, min(stack.live_parameters + model.vocab * model.hidden / layout.tensor, here))
    each: float = activation_bytes(layout.precision)
    if task.method is TrainingMethod.QLORA:
        each = PACKED_FORMATS[stack.packing].weight_bytes
    items[MemoryItem.GATHERED] = at_once * each
    if stack.keeps_ends_gathered and layout.shard * layout.context > 1:
        items[MemoryItem.GATHERED] += model.embedding_parameters * activation_bytes(layout.precision)
    items[MemoryItem.PARAMETERS] = 0.0 if on_host else stored
    return stored + reference if on_host else 0.0


def _put_states(items: dict[MemoryItem, float], task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Add gradients and optimizer states of the device to `items`, and return the bytes of those on the host."""
    trained = _updated(task, layout, stack, sharded=False)
    gradients = _updated(task, layout, stack, sharded=layout.zero >= 2) * stack.gradient_bytes
    alternating = (
        layout.zero >= 2 and layout.pipeline > 1
    )  # gradients of a pipeline's micro-batches are added up before they are reduced
    if (alternating or (layout.zero == 2 and stack.whole_gradients)) and layout.micro_batches > 1:
        gradients += trained * stack.reduce_bytes
    if layout.zero == 3 and stack.accumulates_whole and layout.micro_batches > 1:
        gradients = trained * stack.reduce_bytes  # shards come into being as the last backward pass frees these
    updated = _updated(task, layout, stack, sharded=layout.zero >= 1)
    states = updated * optimizer_state_bytes(stack, task.optimizer)
    if task.offload is Offload.NONE:
        items[MemoryItem.GRADIENTS], items[MemoryItem.STATES] = gradients, states
        return 0.0
    if stack.offloads_gradients and layout.zero != 1:
        layer = layer_parameters(task.model, layout).total * trained / rank_parameters(task.model, layout).total
        gradients = min(gradients, max(stack.bucket_parameters, layer) * stack.gradient_bytes)
    items[MemoryItem.GRADIENTS] = gradients
    return states + updated * HOST_GRADIENT_BYTES


def _put_activations(items: dict[MemoryItem, float], task: TrainingTask, layout: Layout, stack: Stack) -> None:
    """Add activations and logits of the fullest stage to `items`."""
    model = task.model
    layers = -(-model.layers // layout.pipeline)  # of the largest stage
    live = micro_batches_in_flight(layout)
    first = live * layers * stored_activation_bytes(task, layout, stack)
    working = temporary_bytes(task, layout, stack)
    if task.method is TrainingMethod.QLORA:
        working += _unpacked_bytes(model, layout, stack)
    last = working + loss_bytes(task, layout, stack)
    if layout.pipeline > 1:
        on_last = 1.0 if layout.interleave == 1 else 1.0 + (layout.interleave - 1) / layout.interleave
        ending = on_last * layers * stored_activation_bytes(task, layout, stack)
        first_total, last_total = first + working, ending + last
        items[MemoryItem.ACTIVATIONS] = first_total if first_total >= last_total else ending + working
        items[MemoryItem.LOSS] = 0.0 if first_total >= last_total else last - working
    else:
        items[MemoryItem.ACTIVATIONS] = first + working
        items[MemoryItem.LOSS] = last - working


def _held(task: TrainingTask, layout: Layout, stack: Stack) -> RankParameters:
    """Return the parameters of the largest stage, with the whole input embedding where tensor parallel ranks have copies of it."""
    held = rank_parameters(task.model, layout)
    if not stack.replicates_embedding:
        return held
    copied = task.model.vocab * task.model.hidden * (1.0 - 1.0 / layout.tensor)
    return replace(held, common=held.common + copied)


def _updated(task: TrainingTask, layout: Layout, stack: Stack, *, sharded: bool) -> float:
    """Return the trained parameters of this rank, all or those of its shard."""
    held = _held(task, layout, stack)
    share = 1.0 if task.method is TrainingMethod.FULL else task.adapter_share
    return share * (held.sharded(layout) if sharded else held.total)


def _buffer_bytes(layout: Layout, stack: Stack) -> float:
    """Return the buffers in which gradients are collected for their reduction."""
    return stack.reduce_buffers * stack.bucket_parameters * stack.reduce_bytes if layout.zero in {1, 2} else 0.0


def packed_model_bytes(model: ModelShape, layout: Layout, stack: Stack) -> float:
    """Return the bytes of the largest stage of a 4-bit model: the matrices of its layers packed, embeddings and output as the stack keeps them."""
    packed = layer_parameters(model, layout).total * -(-model.layers // layout.pipeline)
    ends = rank_parameters(model, layout).total - packed
    return packed * PACKED_FORMATS[stack.packing].weight_bytes + ends * stack.packed_ends_bytes


def _unpacked_bytes(model: ModelShape, layout: Layout, stack: Stack) -> float:
    """Return the bytes to unpack the widest matrix, and with them a whole layer where autograd keeps what was unpacked."""
    packed = PACKED_FORMATS[stack.packing]
    widest = max(k * n for k, n in model.layer_matrices.values()) / layout.tensor
    layer = layer_parameters(model, layout).total if packed.is_kept else 0.0
    kept = layer * (1.0 if layout.recompute is Recompute.FULL else -(-model.layers // layout.pipeline))
    return widest * packed.temporary_bytes + kept * ACTIVATION_BYTES


def usable_bytes(gpu: Gpu) -> float:
    """Return the device memory without the 1 % of the driver. Source: an 80 GB H100 shows 79.6 GiB of 81,559 MiB free."""
    return gpu.memory_bytes * 0.99


def micro_batches_in_flight(layout: Layout) -> float:
    """Return the number of micro-batches whose activations the first stage stores at once."""
    stages = layout.pipeline
    if stages == 1:
        return 1.0
    warm = min(float(stages), float(layout.micro_batches))
    return warm if layout.interleave == 1 else warm * (1.0 + (stages - 1) / (stages * layout.interleave))


def stored_activation_bytes(task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Return the bytes that one layer stores per micro-batch between its forward and its backward pass."""
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    block_input = tokens * 2.0 * model.hidden / (layout.tensor if layout.sequence else 1)
    wide = activation_bytes(layout.precision) / ACTIVATION_BYTES
    if layout.recompute is Recompute.FULL:
        if stored := stack.stored.get(task.method):
            block_input *= stored[2] / 2.0
        return wide * block_input
    if layout.recompute is Recompute.SELECTIVE and task.flash and model.latent is None:
        return wide * (0.55 * _layer_bytes(task, layout, stack) * stack.activations + 0.45 * block_input)
    return wide * _layer_bytes(task, layout, stack) * stack.activations


def temporary_bytes(task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Return the temporary bytes of the running layer: its recomputed activations and the gradients of the widest ones."""
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    width = _width(task)
    wide = activation_bytes(layout.precision) / ACTIVATION_BYTES
    grown = wide * tokens * 2.0 * (3.0 * model.hidden + 2.0 * width / layout.tensor)
    if not task.flash:
        grown += stack.score_gradient_bytes * tokens * task.seq * model.heads / layout.tensor
    if layout.recompute is Recompute.NONE:
        return grown
    # Every rank gathers the full inputs of the products of the running layer, although sequence parallel stores slices.
    gathered = tokens * 4.0 * model.hidden * (1.0 - 1.0 / layout.tensor) if layout.sequence else 0.0
    plain = Layout(
        tensor=layout.tensor, sequence=layout.sequence, context=layout.context, micro_batch=layout.micro_batch
    )
    return grown + wide * (_layer_bytes(task, plain, stack) + gathered)


def loss_bytes(task: TrainingTask, layout: Layout, stack: Stack) -> float:
    """Return the bytes of the logits and of the loss."""
    tokens = layout.micro_batch * task.seq / layout.context
    words = task.model.vocab / (1 if stack.whole_logits else layout.tensor)
    return tokens * words * stack.loss_bytes


def _layer_bytes(task: TrainingTask, layout: Layout, stack: Stack) -> float:
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    t = layout.tensor
    if (stored := stack.stored.get(task.method)) and task.flash and model.latent is None:
        per_token = stored[0] * model.hidden + stored[1] * _width(task) * (1.0 if model.gated else 0.5)
        per_token += 2.0 * 2.0 * model.kv_heads * model.head_dim + 2.0 * sum(inputs for inputs, _ in task.adapted)
        return tokens * (per_token + _packed_inputs(task, stack)) / t
    shared = t if layout.sequence else 1
    heads = model.heads * model.head_dim
    keys, values = 2 * model.kv_heads * model.head_dim, model.head_dim
    if model.latent is not None:
        mla = model.latent
        heads, values = model.heads * (model.head_dim + mla.rope_dim), mla.value_dim
        keys = model.heads * (model.head_dim + mla.rope_dim + mla.value_dim) + mla.query_rank + mla.kv_rank
        if layout.recompute is Recompute.SELECTIVE:  # queries, keys and values are recomputed from the latent vectors
            keys = mla.query_rank + mla.kv_rank + mla.rope_dim - heads
    each = {"fp8": 1.0, "nvfp4": 0.5625}.get(
        layout.precision, 2.0
    )  # bytes of a stored input of a product; nvfp4: a scale for 16
    norms = 2.0 * 2.0 * model.hidden  # inputs of both norms
    inputs = each * 2.0 * model.hidden  # inputs of the first products of attention and MLP
    # Inputs and output of the attention kernel; the next product shares the output.
    attention = 2.0 * (heads + keys) + 2.0 * model.heads * values
    inner = _width(task) * ((4.0 + each) if model.gated else (2.0 + each))
    if model.mixture is not None:
        inner += each * model.mixture.per_token * model.hidden  # tokens are copied to each of their experts
    dropout = 2.0 * model.hidden if not task.flash else 0.0  # older stacks: two masks per layer, one byte each
    bytes_ = tokens * ((norms + inputs + dropout) / shared + (attention + inner + _packed_inputs(task, stack)) / t)
    if not task.flash and layout.recompute is not Recompute.SELECTIVE:
        bytes_ += stack.score_bytes * tokens * task.seq * model.heads / t
    return bytes_


def _packed_inputs(task: TrainingTask, stack: Stack) -> float:
    """Return the bytes per token of the inputs that products with 4-bit weights keep; those of q, k and v, and of gate and up, are one tensor."""
    if task.method is not TrainingMethod.QLORA or not stack.keeps_packed_inputs:
        return 0.0
    sizes = task.model.layer_matrices
    return 2.0 * sum(sizes[name][0] for name in ("q", "o", "up", "down"))


def _width(task: TrainingTask) -> float:
    mixture = task.model.mixture
    return task.model.ffn if mixture is None else mixture.visited_ffn


def exceeds_memory(memory: MemoryEstimate) -> bool:
    """Return whether the layout exceeds the memory by more than the error of this model. Below that, with `free_bytes` < 0, it may run."""
    return memory.low_bytes > memory.usable_bytes
