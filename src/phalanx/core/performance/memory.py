"""Device memory of the fullest rank under one layout, item by item.

Legend: T tokens of a micro-batch on this rank, d hidden, h k heads x features, g key-value heads, f MLP width, t tensor parallel ranks,
p stages, v runs per stage.
    states       per parameter: a copy to multiply, a gradient, the optimizer's states; sharded by ZeRO 1, 2, 3 from the right
    activations  per layer and token in bytes, 16-bit: block inputs and norm outputs 8 d, queries, keys, values 2 (h + 2 g) k / t,
                 attention's output 2 h k / t, MLP 2 to 6 f / t; all of a layer again in fp8 less half of the products' inputs;
                 without flash attention 5 bytes per score: h s / t
    in flight    of a pipeline: the first stage holds p micro-batches, p (1 + (p - 1) / (p v)) with interleaving
    loss         logits, their 32-bit copy and gradients, on the last stage
Sources: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equations 2 to 5 and section 4.3;
S. Rajbhandari et al., "ZeRO", 2020, section 3.1; E. Hu et al., "LoRA", 2021; T. Dettmers et al., "QLoRA", 2023 (4.127 bits a weight).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.performance.coefficients import Stack
from phalanx.core.performance.layer import BYTES, PACKED_BYTES, activation_bytes
from phalanx.core.performance.machine import Gpu
from phalanx.core.performance.step import Method, Task, layer_parameters, rank_parameters
from phalanx.core.work.layout import Layout, Recompute

CONTEXT_BYTES: Final = 1.2e9
"""CUDA context, NCCL buffers and library workspaces outside the allocator. Source: usual figure for NCCL with eight channels on
Hopper, our estimate, 2026-11; `phalanx calibrate` on a real device replaces it."""
SLACK: Final = 1.04
"""Reserved over allocated memory of torch's caching allocator with expandable segments, our estimate, 2026-11."""

REFUSED: Final = 1.10
"""A layout is refused when its expected memory is above the device's by more than the model's error: 10 % (benchmarks.planner)."""


class Part(enum.StrEnum):
    """What device memory holds."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    GATHERED = "gathered parameters"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    OTHER = "context and fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank. `usable_bytes` is what the device gives to a program."""

    items: Mapping[Part, float]
    total_bytes: float
    usable_bytes: float

    @property
    def room_bytes(self) -> float:
        """Left over; negative where it does not fit."""
        return self.usable_bytes - self.total_bytes

    @property
    def allocator_bytes(self) -> float:
        """As torch.cuda.max_memory_reserved says it: without the context."""
        return self.total_bytes - CONTEXT_BYTES


def memory_of(task: Task, layout: Layout, gpu: Gpu, stack: Stack) -> Memory:
    """Memory of the fullest rank: first or last stage, whichever needs more."""
    model = task.model
    held = rank_parameters(model, layout)
    here, shared = held.total, held.sharded(layout)
    share = 1.0 if task.method is Method.FULL else task.adapter_share
    trained = here * share
    items = dict.fromkeys(Part, 0.0)
    layers = -(-model.layers // layout.pipeline)  # of the stage that has most
    base = PACKED_BYTES if task.method is Method.QLORA else stack.parameter_bytes
    if layout.zero == 3:
        # FSDP keeps sharded parameters in the optimizer's precision, which is their master copy too: 4 of `state_bytes`.
        items[Part.PARAMETERS] = shared * (0.0 if task.method is Method.FULL else base)
        at_once = 2.0  # the one that runs and the one being gathered
        items[Part.GATHERED] = at_once * layer_parameters(model, layout).total * activation_bytes(layout.precision)
    else:
        items[Part.PARAMETERS] = here * base
        if task.method is not Method.FULL:
            items[Part.PARAMETERS] += trained * stack.parameter_bytes
    items[Part.GRADIENTS] = (shared * share if layout.zero >= 2 else trained) * stack.gradient_bytes
    late = layout.zero == 2 or (layout.zero == 3 and layout.pipeline > 1)
    if late and stack.whole_gradients and layout.micro_batches > 1:
        items[Part.GRADIENTS] += trained * stack.reduce_bytes
    items[Part.STATES] = (shared * share if layout.zero >= 1 else trained) * stack.state_bytes
    live = in_flight(layout)
    first = live * layers * kept_bytes(task, layout, stack)
    working = working_bytes(task, layout)
    last = working + loss_bytes(task, layout, stack)
    if layout.pipeline > 1:
        on_last = 1.0 if layout.interleave == 1 else 1.0 + (layout.interleave - 1) / layout.interleave
        ending = on_last * layers * kept_bytes(task, layout, stack)
        first_total, last_total = first + working, ending + last
        items[Part.ACTIVATIONS] = first_total if first_total >= last_total else ending + working
        items[Part.LOSS] = 0.0 if first_total >= last_total else last - working
    else:
        items[Part.ACTIVATIONS] = first + working
        items[Part.LOSS] = last - working
    together = sum(items.values())
    items[Part.OTHER] = CONTEXT_BYTES + (SLACK - 1.0) * together
    return Memory(items=items, total_bytes=together + items[Part.OTHER], usable_bytes=usable_bytes(gpu))


def usable_bytes(gpu: Gpu) -> float:
    """What remains of the device's memory after the driver's part: 1 %. Source: an 80 GB H100 shows 79.6 GiB of 81,559 MiB free."""
    return gpu.memory_bytes * 0.99


def in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage holds at once."""
    stages = layout.pipeline
    if stages == 1:
        return 1.0
    warm = min(float(stages), float(layout.micro_batches))
    return warm if layout.interleave == 1 else warm * (1.0 + (stages - 1) / (stages * layout.interleave))


def kept_bytes(task: Task, layout: Layout, stack: Stack) -> float:
    """Of one layer and micro-batch, from its forward to its backward pass."""
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    block_input = tokens * 2.0 * model.hidden / (layout.tensor if layout.sequence else 1)
    wide = activation_bytes(layout.precision) / BYTES
    if layout.recompute is Recompute.FULL:
        return wide * block_input
    if layout.recompute is Recompute.SELECTIVE and task.flash and model.latent is None:
        return wide * (0.55 * _layer_bytes(task, layout) * stack.activations + 0.45 * block_input)
    return wide * _layer_bytes(task, layout) * stack.activations


def working_bytes(task: Task, layout: Layout) -> float:
    """Beside what is kept: the layer in hand, made again in full, with the gradients of its widest activations."""
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    width = _width(task)
    wide = activation_bytes(layout.precision) / BYTES
    grown = wide * tokens * 2.0 * (3.0 * model.hidden + 2.0 * width / layout.tensor)
    if layout.recompute is Recompute.NONE:
        return grown
    # Of the layer in hand, the inputs of its products are whole on every rank even where sequence parallel keeps slices.
    gathered = tokens * 4.0 * model.hidden * (1.0 - 1.0 / layout.tensor) if layout.sequence else 0.0
    plain = Layout(
        tensor=layout.tensor, sequence=layout.sequence, context=layout.context, micro_batch=layout.micro_batch
    )
    return grown + wide * (_layer_bytes(task, plain) + gathered)


def loss_bytes(task: Task, layout: Layout, stack: Stack) -> float:
    """Logits and what the loss makes of them."""
    tokens = layout.micro_batch * task.seq / layout.context
    words = task.model.vocab / (1 if stack.whole_logits else layout.tensor)
    return tokens * words * stack.loss_bytes


def _layer_bytes(task: Task, layout: Layout) -> float:
    model = task.model
    tokens = layout.micro_batch * task.seq / layout.context
    t = layout.tensor
    shared = t if layout.sequence else 1
    heads = model.heads * model.head_dim
    keys, values = 2 * model.kv_heads * model.head_dim, model.head_dim
    if model.latent is not None:
        mla = model.latent
        heads, values = model.heads * (model.head_dim + mla.rope_dim), mla.value_dim
        keys = model.heads * (model.head_dim + mla.rope_dim + mla.value_dim) + mla.query_rank + mla.kv_rank
        if layout.recompute is Recompute.SELECTIVE:  # queries, keys and values are made again from the latent vectors
            keys = mla.query_rank + mla.kv_rank + mla.rope_dim - heads
    each = 1.0 if layout.precision == "fp8" else 2.0  # fp8 keeps the products' inputs in one byte
    norms = 2.0 * 2.0 * model.hidden  # inputs of both norms
    inputs = each * 2.0 * model.hidden  # inputs of the first products of attention and MLP
    attention = (
        2.0 * (heads + keys) + 2.0 * model.heads * values
    )  # to and from the kernel; the next product shares its output
    inner = _width(task) * ((4.0 + each) if model.gated else (2.0 + each))
    if model.mixture is not None:
        inner += each * model.mixture.per_token * model.hidden  # tokens are copied to each of their experts
    dropout = 2.0 * model.hidden if not task.flash else 0.0  # masks of one byte, two per layer, of the older stacks
    bytes_ = tokens * ((norms + inputs + dropout) / shared + (attention + inner) / t)
    if not task.flash and layout.recompute is not Recompute.SELECTIVE:
        bytes_ += 5.0 * tokens * task.seq * model.heads / t
    return bytes_


def _width(task: Task) -> float:
    mixture = task.model.mixture
    return task.model.ffn if mixture is None else mixture.visited_ffn


def refused(memory: Memory) -> bool:
    """Whether it would not run even if the model were wrong by its usual error; between that and `room_bytes` of 0 it may."""
    return memory.total_bytes > REFUSED * memory.usable_bytes
