"""Time of one layer for one micro-batch on one rank: products, attention, the small kernels between them, and communication.

Legend: T tokens of the micro-batch on this rank, d hidden, h heads, g key-value heads, k features per head, f MLP width, s sequence,
t tensor parallel ranks.
    product M x K x N    2 M K N / R + w (M K + K N + M N) 2 / B     R sustained FLOP/s, B bytes/s of memory, w the share that is not hidden
    flash attention      2 T s h k / t, half of the square: forward; 2.5 times that backward (five products instead of two); a kernel reaches
                         its rate times s / (s + r), with r tokens for half of it
    unfused attention    the whole square at matrix rate, and the score matrix written and read by scale, softmax and dropout
    small kernels        about 10 passes over T d forward and 13 backward, 2.5 to 5.5 over T f / t
    an adapter           of K inputs and N outputs, as peft computes it beside a frozen matrix: its input read (2 K), its output written, scaled and
                         added (12 N); backward 8 K + 8 N; where adapters have 32 bits, casts there and back (12 K, 14 K); bytes per token
    unpacking            4-bit weights read and 16 bits written, as the format does it (`packed_weights.py`), in every pass that has not kept them
    experts              products of the tokens of one expert, padded to whole tiles, and `expert_product_s` for each
    expert all-to-all    T copies of d features to the ranks of a token's experts and back. Of k experts on N nodes, N (1 - (1 - 1/N)^k)
                         nodes are visited; a stack that sends a token once per node, and from there to each rank once, sends that many.
                         Where a router limits the groups of experts of a token, N is the number of nodes with those groups
    tensor parallel      two all-reduces of T d forward and two backward; as gather and scatter where sequence parallel (same bytes)
Sources: roofline with partial overlap after S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009; flash attention's FLOPs
T. Dao, "FlashAttention-2", 2023, section 4.1; tensor parallel V. Korthikanti et al., 2022, section 4. The passes are our own count of
the kernels of a pre-norm block; `Physics.elementwise` corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.core.work.layouts.layout import Axis, Layout, Recompute
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.machine import Gpu, Machine, peak_of, rate_of
from phalanx.planner.cost.model_shape import MixtureOfExperts, ModelShape
from phalanx.planner.cost.packed_weights import PackedFormat

ACTIVATION_BYTES: int = 2
"""Size of one activation in bf16 or fp16."""

NARROW: tuple[str, ...] = ("fp8", "nvfp4")
"""Precisions whose products have operands of a byte or less, cast from 16 bits. Everything else stays in 16 bits."""

_UNTUNED_MOST: float = 0.95
"""Most of its peak that a GPU is taken to reach in products. Source: an L20 reaches 0.88 to 0.96, see `untuned_at_tflop_per_watt` in coefficients.csv."""

TILE_ROWS: float = 128.0
"""Rows of one tile of a matrix product. Each expert's last tile is half empty on average. Source: 128 x 128 and 128 x 256 tiles of CUTLASS."""


def activation_bytes(precision: str) -> int:
    """Return the size of one activation; fp8 and nvfp4 training store 16 bits between products."""
    return 2 * ACTIVATION_BYTES if precision == "fp32" else ACTIVATION_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPass:
    """Seconds of one pass through one layer, by kind of work. `tensor`, `context` and `expert` are communication."""

    matmul: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    expert: float

    @property
    def total_s(self) -> float:
        """The sum of all fields, which already exclude hidden communication."""
        return self.matmul + self.attention + self.elementwise + self.tensor + self.context + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of both passes; `recompute_s` is the recomputation before the backward pass."""

    forward: LayerPass
    backward: LayerPass
    recompute_s: float


class SustainedRates:
    """Sustained rates of one GPU under one stack, in FLOP/s and bytes/s."""

    def __init__(self, machine: Machine, physics: Physics, stack: Stack, precision: str) -> None:
        gpu = machine.gpu
        self.matmul = sustained_flops(machine, physics, precision if precision in {"fp16", "fp32"} else "bf16")
        self.linear = self.matmul
        self.cast = 0.0
        if precision in NARROW and (precision in gpu.flops or precision in gpu.best_flops):
            self.linear = sustained_flops(machine, physics, precision) * physics.fp8_share
            self.cast = physics.fp8_cast
        if machine.measured is not None and machine.measured.memory_bytes_per_s:
            self.bytes = machine.measured.memory_bytes_per_s
        else:
            self.bytes = gpu.memory_bytes_per_s * physics.memory_share
        self.flash = self.matmul / physics.matmul_share * stack.flash_share(gpu.name)
        self.uncovered = physics.matmul_bytes
        self.width = activation_bytes(precision)

    def product_s(self, m: float, k: float, n: float, *, linear: bool = True) -> float:
        """Return the seconds of one product; `linear` ones run in fp8 if the stack trains in fp8."""
        seconds = 2.0 * m * k * n / (self.linear if linear else self.matmul)
        seconds += self.uncovered * self.width * (m * k + k * n + m * n) / self.bytes
        if linear and self.cast:
            seconds += self.cast * (3.0 * m * k + k * n) / self.bytes
        return seconds


def sustained_flops(machine: Machine, physics: Physics, precision: str) -> float:
    """Return the sustained FLOP/s of large products."""
    measured = machine.measured
    if measured is not None and measured.flops.get(precision):
        return measured.flops[precision]
    return best_flops(machine.gpu, physics, precision) * physics.matmul_share


def best_flops(gpu: Gpu, physics: Physics, precision: str) -> float:
    """Return the best published FLOP/s, else the usual share of the peak; bf16 and fp16 replace each other where one is missing."""
    best = rate_of(gpu.best_flops, precision)
    return best if best is not None else peak_of(gpu, precision) * _untuned_share(gpu, physics)


def _untuned_share(gpu: Gpu, physics: Physics) -> float:
    """Return the share of its peak that a GPU without a published rate reaches: less, the more of it comes from a watt, because clocks fall.

    Known for NVIDIA's GPUs with bf16, from a third of a teraflop per watt to two; others get one share.
    """
    if "bf16" not in gpu.flops or gpu.link_kind == "xgmi" or not gpu.watts or gpu.virtual:
        return physics.untuned_share
    return min(
        _UNTUNED_MOST,
        physics.untuned_at_tflop_per_watt - physics.untuned_fall * math.log(gpu.flops["bf16"] / 1e12 / gpu.watts),
    )


def layer_time(
    model: ModelShape,
    layout: Layout,
    seq: int,
    *,
    mixture: bool,
    machine: Machine,
    physics: Physics,
    stack: Stack,
    network: RankNetwork,
    flash: bool = True,
    frozen: bool = False,
    packed: PackedFormat | None = None,
    adapted: Sequence[tuple[int, int]] = (),
    attended: float = 1.0,
) -> LayerTime:
    """Return the time of one mixture or dense layer. `frozen` weights need no gradients (LoRA); `packed` is the format of 4-bit ones (QLoRA).

    `adapted` are the inputs and outputs of the matrices with an adapter; `attended` is the share of the scores that fused attention computes.
    """
    rates = SustainedRates(machine, physics, stack, layout.precision)
    tokens = layout.micro_batch * seq / layout.context
    products = [*_attention_products(model, layout, tokens), *_mlp_products(model, layout, tokens, mixture=mixture)]
    matmul = sum(rates.product_s(*one) for one in products)
    matmul_back = sum(_backward_s(rates, one, frozen=frozen) for one in products)
    if mixture and model.mixture is not None:
        experts = tuple(_expert_products(model, layout, tokens, physics))
        extra = physics.expert_product_s
        matmul += sum(count * (rates.product_s(*one) + extra) for count, one in experts)
        matmul_back += sum(
            count * (_backward_s(rates, one, frozen=frozen) + (1.0 if frozen else 2.0) * extra)
            for count, one in experts
        )
    attend, attend_back = _attention_s(model, layout, tokens, seq, rates, physics, flash=flash)
    if flash:
        ramp = attended * (1.0 + stack.flash_ramp / max(1.0, attended * seq))
        attend, attend_back = ramp * attend, ramp * attend_back / stack.flash_backward
    if mixture and layout.expert > 1:  # while tokens are sent beside it, products and attention have fewer processors
        slower = 1.0 / (1.0 - stack.expert_processors)
        matmul, matmul_back, attend, attend_back = (slower * one for one in (matmul, matmul_back, attend, attend_back))
    small, small_back = _small_s(model, layout, tokens, rates, physics, stack, mixture=mixture)
    inputs, outputs = (tokens / layout.tensor * sum(one[side] for one in adapted) / rates.bytes for side in (0, 1))
    cast, cast_back = (12.0, 14.0) if stack.casts_adapters else (0.0, 0.0)
    small += (2.0 + cast) * inputs + 12.0 * outputs
    small_back += (8.0 + cast_back) * inputs + 8.0 * outputs
    if packed is not None:
        unpack = _unpack_s(model, layout, rates, packed, physics, mixture=mixture)
        small += unpack
        small_back += 0.0 if packed.is_kept else unpack
    tensor = _tensor_s(model, layout, tokens, network) * stack.tensor_exposed
    context = _context_s(model, layout, tokens, network) * physics.context_exposed
    expert = _expert_s(model, layout, tokens, network, physics, stack) * stack.expert_exposed if mixture else 0.0
    forward = LayerPass(
        matmul=matmul, attention=attend, elementwise=small, tensor=tensor, context=context, expert=expert
    )
    backward = LayerPass(
        matmul=matmul_back,
        attention=attend_back,
        elementwise=small_back,
        tensor=tensor,
        context=2.0 * context,  # keys and values, and their gradients, which frozen weights need too
        expert=expert,
    )
    again = _again_s(layout, forward, flash=flash)
    return LayerTime(forward=forward, backward=backward, recompute_s=again)


def _again_s(layout: Layout, forward: LayerPass, *, flash: bool) -> float:
    if layout.recompute is Recompute.FULL:
        return forward.total_s
    if layout.recompute is Recompute.SELECTIVE:
        # Without flash attention only attention is recomputed; with it, every second product and the small kernels (torch's per-op policy).
        return 0.35 * forward.matmul + 0.4 * forward.elementwise if flash else forward.attention
    return 0.0


def _backward_s(rates: SustainedRates, one: tuple[float, float, float], *, frozen: bool) -> float:
    m, k, n = one
    inputs = rates.product_s(m, n, k)
    return inputs if frozen else inputs + rates.product_s(k, m, n)


def _attention_products(model: ModelShape, layout: Layout, tokens: float) -> Iterable[tuple[float, float, float]]:
    d, h, k, t = model.hidden, model.heads, model.head_dim, layout.tensor
    if model.latent is not None:
        mla = model.latent
        wide = h * (k + mla.rope_dim) / t
        down = mla.query_rank + mla.kv_rank + mla.rope_dim  # not split: every rank computes the latent vectors
        yield tokens, d, down if mla.query_rank else mla.kv_rank + mla.rope_dim
        yield tokens, mla.query_rank or d, wide
        yield tokens, mla.kv_rank, h * (k + mla.value_dim) / t
        yield tokens, h * mla.value_dim / t, d
        return
    yield tokens, d, (h + 2 * model.kv_heads) * k / t
    yield tokens, h * k / t, d


def _mlp_products(
    model: ModelShape, layout: Layout, tokens: float, *, mixture: bool
) -> Iterable[tuple[float, float, float]]:
    d, t = model.hidden, layout.tensor
    width = model.ffn
    if mixture and model.mixture is not None:
        yield tokens, d, model.mixture.experts
        width = model.mixture.shared_ffn
    if width:
        yield tokens, d, (model.mlp_matrices - 1) * width / t
        yield tokens, width / t, d


def _expert_products(
    model: ModelShape, layout: Layout, tokens: float, physics: Physics
) -> Iterable[tuple[float, tuple[float, float, float]]]:
    """Yield the number of experts on this rank with each product of one of them. Its tokens come from all ranks that share the experts."""
    mixture = model.mixture
    if mixture is None:
        return
    local = mixture.experts / layout.expert
    rows = tokens * layout.expert * mixture.per_token / mixture.experts * physics.expert_imbalance + TILE_ROWS / 2.0
    width = mixture.ffn / layout.tensor
    yield local, (rows, model.hidden, (model.mlp_matrices - 1) * width)
    yield local, (rows, width, model.hidden)


def _attention_s(
    model: ModelShape, layout: Layout, tokens: float, seq: int, rates: SustainedRates, physics: Physics, *, flash: bool
) -> tuple[float, float]:
    heads = model.heads / layout.tensor
    both = 2 * model.head_dim
    if model.latent is not None:
        both = model.head_dim + model.latent.rope_dim + model.latent.value_dim
    if flash:
        # FLOPs of the causal half of scores and values, in layers with a window of the part inside it
        forward = tokens * model.attended(seq) * heads * both / rates.flash
        return forward, 2.5 * forward
    products = 2.0 * tokens * seq * heads * both
    square = products / (0.8 * rates.matmul)  # 0.8: batched products of the width of one head are small
    scores = physics.unfused_attention * tokens * seq * heads * rates.width / rates.bytes
    return square + 6.5 * scores, 2.0 * square + 9.0 * scores


def _small_s(
    model: ModelShape,
    layout: Layout,
    tokens: float,
    rates: SustainedRates,
    physics: Physics,
    stack: Stack,
    *,
    mixture: bool,
) -> tuple[float, float]:
    t = layout.tensor
    d = model.hidden / (t if layout.sequence else 1)
    heads = (model.heads + model.kv_heads) * model.head_dim / t
    forward, backward = 10.0 * d + 2.0 * heads, 13.0 * d + 2.0 * heads
    width = model.ffn / t
    if mixture and model.mixture is not None:
        width = model.mixture.visited_ffn / t
        moved = model.mixture.per_token * d  # tokens are copied to their experts and back, and summed
        forward += 4.0 * physics.expert_moves * moved
        backward += 4.0 * physics.expert_moves * moved
    forward += (3.5 if model.gated else 2.5) * width
    backward += (5.5 if model.gated else 3.5) * width
    each = physics.elementwise * stack.elementwise * tokens * rates.width / rates.bytes
    return each * forward, each * backward


def _unpack_s(
    model: ModelShape, layout: Layout, rates: SustainedRates, packed: PackedFormat, physics: Physics, *, mixture: bool
) -> float:
    """Return the time to unpack the 4-bit weights of a layer to 16 bits."""
    mlp = model.dense_mlp_parameters
    if mixture and model.mixture is not None:
        mlp = model.expert_parameters // layout.expert + model.mlp_matrices * model.hidden * model.mixture.shared_ffn
    moved = packed.moved_bytes or physics.unpack * (packed.weight_bytes + ACTIVATION_BYTES)
    return (model.attention_parameters + mlp) / layout.tensor * moved / rates.bytes


def _tensor_s(model: ModelShape, layout: Layout, tokens: float, network: RankNetwork) -> float:
    return 4.0 * network.axis(layout, Axis.TENSOR).all_gather_s(
        tokens * model.hidden * activation_bytes(layout.precision)
    )


def _context_s(model: ModelShape, layout: Layout, tokens: float, network: RankNetwork) -> float:
    """Return the time to send keys and values once round the ring; latent attention sends the expanded ones."""
    if layout.context == 1:
        return 0.0
    features = 2 * model.kv_heads * model.head_dim
    group = network.axis(layout, Axis.CONTEXT)
    hop = group.bytes_per_s if group.size <= group.near else network.far_bytes_per_s
    return (layout.context - 1) * tokens * features / layout.tensor * activation_bytes(layout.precision) / hop


def _expert_s(
    model: ModelShape, layout: Layout, tokens: float, network: RankNetwork, physics: Physics, stack: Stack
) -> float:
    """Return the time to send tokens to their experts and back. Experts lie on neighbouring ranks that process different tokens."""
    if model.mixture is None or layout.expert == 1:
        return 0.0
    group = network.group(layout.expert, layout.stride(Axis.CONTEXT))
    near, far = expert_copies(group.size, group.near, model.mixture, once=stack.dispatch_once)
    token = tokens / layout.tensor * model.hidden * activation_bytes(layout.precision) * physics.expert_imbalance
    return 2.0 * network.all_to_all_s(group, token * near, token * far)


def expert_copies(ranks: int, near: int, mixture: MixtureOfExperts, *, once: bool) -> tuple[float, float]:
    """Return how many copies of one token are sent within link domains of `near` ranks, and between them, for evenly chosen experts.

    With `once`, a token is sent once to each other node, and inside each node once to each rank, whatever the number of its experts there.
    Only then does a limit of the router to some groups of experts, and so to fewer nodes, save copies.
    Source: DeepSeek-AI, "DeepSeek-V3", 2024, sections 2.1.2 and 3.2.2.
    """
    per_token = mixture.per_token
    if not once:
        return per_token * (near - 1) / ranks, per_token * (ranks - near) / ranks
    nodes = ranks / near
    others = (ranks - 1) / ranks * visited_places(ranks, mixture)
    return others, (nodes - 1.0) / nodes * visited_places(nodes, mixture)


def visited_places(places: float, mixture: MixtureOfExperts) -> float:
    """Return on how many of equal places (nodes or ranks), over which experts lie in order, the experts of a token are.

    k experts are on a (1 - (1 - 1/a)^k) of the a places that may be visited: those with one of m of G groups.
    """
    groups, limit = mixture.groups, mixture.group_limit
    open_places = places
    if places >= groups > limit:
        open_places = places * limit / groups  # a group lies on several places
    elif groups > limit:  # a place has several groups
        closed = 1.0
        for drawn in range(limit):
            closed *= max(0.0, 1.0 - groups / places / (groups - drawn))
        open_places = places * (1.0 - closed)
    return open_places * (1.0 - (1.0 - 1.0 / max(1.0, open_places)) ** mixture.per_token)
