"""`phalanx plan --explain`: each formula in symbols and in this plan's numbers, with its source. Pure.

Numbers come from `core.performance` where possible, so that printed and computed values agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.core.work.layouts.layout import Layout
from phalanx.planner.cost.coefficients import Physics, Stack
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.layer_time import best_flops, sustained_flops
from phalanx.planner.cost.machine import FactSource, Machine
from phalanx.planner.cost.memory import ALLOCATOR_OVERHEAD, micro_batches_in_flight, stored_activation_bytes
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.cost.optimizers import optimizer_state_bytes
from phalanx.planner.cost.step_time import StepItem, gather_bytes
from phalanx.planner.cost.training_task import TrainingMethod, TrainingTask, layer_parameters, rank_parameters
from phalanx.planner.search.evaluation import peak_flops
from phalanx.plans.amounts import (
    format_decimal_bytes,
    format_parameters,
    format_rounded,
    format_seconds,
    format_span,
    format_tokens,
)
from phalanx.plans.option_formulas import explain_options
from phalanx.plans.records import Formula, LayoutFigures

_KAPLAN: Final = 'J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020, table 1'
_PALM: Final = 'A. Chowdhery et al., "PaLM", 2022, appendix B; causal half: T. Dao et al., "FlashAttention", 2022'
_ZERO: Final = 'S. Rajbhandari et al., "ZeRO", 2020, section 3.1'
_KEPT: Final = (
    'V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equations 2 to 5'
)
_PIPELINE: Final = (
    'D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2'
)
_RING: Final = 'R. Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005, section 4'
_DALY: Final = 'J. T. Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 37'


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedLayout:
    """One evaluated layout with all inputs of the evaluation."""

    task: TrainingTask
    layout: Layout
    machine: Machine
    physics: Physics
    stack: Stack
    global_batch: int
    tokens: float | None
    figures: LayoutFigures
    mean_seq: int


def explain_layout(case: ExplainedLayout) -> tuple[Formula, ...]:
    """Return every formula behind this plan, in the order of the printed plan."""
    options = explain_options(case.task, case.stack, case.machine, case.figures)
    return (*_model(case), *_memory(case), *_step(case), *options, *_training(case), *_checkpoint(case))


def _model(case: ExplainedLayout) -> Iterator[Formula]:
    model, seq, frozen = case.task.model, case.mean_seq, case.task.method is not TrainingMethod.FULL
    numbers = (
        f"L {model.layers}, d {model.hidden}, h {model.heads} x k {model.head_dim}, g {model.kv_heads}, f {model.ffn}, "
        f"V {model.vocab}: N = {model.parameters:,}"
    )
    if model.mixture is not None:
        numbers += f", of which one token uses {model.active_parameters:,}"
    yield Formula(
        name="parameters",
        symbols=f"N = L (2 d h k + 2 d g k + {model.mlp_matrices} d f{' E' if model.mixture else ''}) + embeddings + norms",
        numbers=numbers,
        source=_KAPLAN,
    )
    yield Formula(
        name="FLOPs per token",
        symbols=f"C = {'4' if frozen else '6'} N' + 6 L s h k, with N' the parameters in matrix products; forward and backward, "
        f"no recomputation{', no weight gradients for frozen weights' if frozen else ''}",
        numbers=f"s {seq}: C = {model.flops_per_token(seq, frozen=frozen) / 1e9:,.4g} GFLOP",
        source=_PALM,
    )


def _memory(case: ExplainedLayout) -> Iterator[Formula]:
    layout, stack, task = case.layout, case.stack, case.task
    items = dict(case.figures.memory_bytes)
    here = rank_parameters(task.model, layout)
    trained = "" if task.method is TrainingMethod.FULL else f"; {task.adapter_share:.2%} of them trained"
    yield Formula(
        name="weights, gradients and optimizer states",
        symbols="n (w + g + o) bytes, n = parameters of one rank; ZeRO 1, 2, 3 shards o, g, w over the data parallel ranks",
        numbers=(
            f"n {here.total / 1e9:.4g}B over tp {layout.tensor} and pp {layout.pipeline}, w {stack.parameter_bytes:g} "
            f"g {stack.gradient_bytes:g} o {optimizer_state_bytes(stack, task.optimizer):.4g} ({stack.name}), zero {layout.zero} over {layout.shard} ranks{trained}: "
            f"{_sum(items, 'parameters', 'gradients', 'optimizer states', 'gathered parameters')}"
        ),
        source=_ZERO,
    )
    yield Formula(
        name="activations",
        symbols="in flight x L/p, rounded up, x (kept for the backward pass of one layer), plus the current layer",
        numbers=(
            f"{micro_batches_in_flight(layout):.3g} x {task.model.layers}/{layout.pipeline} x {format_decimal_bytes(stored_activation_bytes(task, layout, stack))} "
            f"(micro-batch {layout.micro_batch}, recompute {layout.recompute}): {_sum(items, 'activations', 'logits and loss')}"
        ),
        source=_KEPT,
    )
    yield Formula(
        name="free memory",
        symbols="GPU memory less 1 %, less all items and allocator waste",
        numbers=f"waste {ALLOCATOR_OVERHEAD - 1:.0%}: {format_decimal_bytes(case.figures.usable_bytes)} - {format_decimal_bytes(case.figures.used_bytes)} = "
        f"{format_decimal_bytes(case.figures.free_bytes)}",
        source=_fact_source(case.machine.gpu.fact),
    )


def _step(case: ExplainedLayout) -> Iterator[Formula]:
    layout, machine, physics = case.layout, case.machine, case.physics
    items = dict(case.figures.step_items_s)
    top = best_flops(machine.gpu, physics, layout.precision)
    rate = sustained_flops(machine, physics, layout.precision)
    measured = machine.measured is not None and layout.precision in machine.measured.flops
    source_text = (
        "measured by phalanx calibrate"
        if measured
        else f"{physics.matmul_share:.0%} of the best known rate, {top / 1e12:.4g}"
    )
    yield Formula(
        name="matrix products",
        symbols="2 M K N / R each, plus memory traffic that is not overlapped",
        numbers=f"R {rate / 1e12:.4g} TFLOP/s {layout.precision} ({source_text}): {_seconds(items, StepItem.MATMUL)}",
        source=f"roofline, S. Williams et al., CACM 52(4), 2009; rate: {_fact_source(machine.gpu.fact)}",
    )
    if layout.tensor > 1:
        yield _exchange(
            "tensor parallel",
            "four all-reduces (or gather and scatter) of T d per layer and micro-batch: 2 (t-1)/t n / B",
            f"t {layout.tensor}: {_seconds(items, StepItem.TENSOR)}",
            case,
        )
    if layout.zero == 3 and layout.shard > 1:
        layer = layer_parameters(case.task.model, layout)
        yield _exchange(
            "sharded parameters",
            "per layer (F-1)/F n / B to gather, again backward, and to reduce; little of it counts where it overlaps with compute",
            f"F {layout.shard}, n {format_decimal_bytes(layer.total * gather_bytes(case.task, layout, case.stack))} a layer: {_seconds(items, StepItem.SHARD)}",
            case,
        )
    if items.get(StepItem.GRADIENTS.value):
        yield _exchange(
            "gradients",
            "once a step: reduce and, if states are sharded, gather; overlapped with the last backward pass",
            f"{layout.data} data parallel ranks: {_seconds(items, StepItem.GRADIENTS)}",
            case,
        )
    if layout.pipeline > 1:
        yield Formula(
            name="pipeline bubble",
            symbols="(p - 1) / v of the time of one micro-batch on one stage; (p - 1) / (v m) of the step",
            numbers=f"p {layout.pipeline}, v {layout.interleave}, m {layout.micro_batches}: {_seconds(items, StepItem.BUBBLE)}",
            source=_PIPELINE,
        )
    low, high = case.figures.step_s.low, case.figures.step_s.high
    yield Formula(
        name="interval of the step",
        symbols="exp(+-1.28 sigma), sigma^2 = sum over items (share x spread of the item)^2 + spread of the stack^2",
        numbers=f"{format_seconds(low)} to {format_seconds(high)}; 80 % of steps lie inside",
        source="spreads set on published runs that were not used for the fit: benchmarks/planner.py",
    )


def _training(case: ExplainedLayout) -> Iterator[Formula]:
    figures, machine, task = case.figures, case.machine, case.task
    peak = peak_flops(machine.gpu)
    batch = case.global_batch * case.mean_seq * task.sequences
    yield Formula(
        name="MFU",
        symbols="C x tokens per second / (GPUs x dense peak of 16-bit products, for every precision)",
        numbers=(
            f"{task.model.flops_per_token(case.mean_seq, frozen=task.method is not TrainingMethod.FULL) / 1e9:,.4g} GFLOP x {format_rounded(figures.tokens_per_s)} / "
            f"({machine.gpus} x {peak / 1e12:.4g} TFLOP/s) = {figures.mfu:.1%}"
        ),
        source=_PALM,
    )
    if case.tokens is None or figures.train_s is None:
        return
    yield Formula(
        name="training",
        symbols="steps x time of a step = tokens / (tokens per step) x time of a step; GPU-hours x price",
        numbers=f"{format_tokens(case.tokens)} / {format_tokens(batch)} x {format_seconds(figures.step_s.mid)} = "
        f"{format_span(figures.train_s.mid)}",
        source="" if machine.price is None else f"price: {machine.price.offer}, {_fact_source(machine.price.fact)}",
    )


def _checkpoint(case: ExplainedLayout) -> Iterator[Formula]:
    saving, machine = case.figures.checkpoint_cost, case.machine
    if saving is None:
        return
    measured = None if machine.measured is None else machine.measured.storage_bytes_per_s
    storage = "measured by phalanx calibrate" if measured else _fact_source(machine.storage_fact)
    yield Formula(
        name="checkpoint",
        symbols="D / (nodes x W) to write; tau = sqrt(2 delta M) (1 + ...) - delta loses the least time",
        numbers=(
            f"{format_decimal_bytes(saving.bytes)} over {machine.nodes} x {(measured or machine.storage_bytes_per_s) / 1e9:.3g} GB/s = "
            f"{format_seconds(saving.write_s)}; tau {format_span(saving.interval_s)}, kept {saving.goodput:.1%}"
        ),
        source=f"{_DALY}; storage: {storage}",
    )


def _exchange(name: str, symbols: str, numbers: str, case: ExplainedLayout) -> Formula:
    machine, network = case.machine, RankNetwork(case.machine, case.physics)
    link = f"sustained B within a node {network.near_bytes_per_s / 1e9:.3g} GB/s"
    far = f", between nodes {network.far_bytes_per_s / 1e9:.3g} GB/s a GPU" if machine.nodes > 1 else ""
    source = f"{_RING}; network: {_fact_source(machine.network_fact)}" if machine.nodes > 1 else _RING
    return Formula(name=name, symbols=symbols, numbers=f"{numbers}; {link}{far}", source=source)


def _sum(items: Mapping[str, float], *names: str) -> str:
    return format_decimal_bytes(sum(items.get(name, 0.0) for name in names))


def _seconds(items: Mapping[str, float], item: StepItem) -> str:
    return f"{format_seconds(items.get(item.value, 0.0))} a step"


def _fact_source(fact: FactSource) -> str:
    return f"{fact.source} ({fact.date})" if fact.date else fact.source or "not stated"


def describe_model(model: ModelShape) -> str:
    """Format `llama-3-70b (70.6B parameters)`; for a mixture also the active parameters."""
    active = f", {format_parameters(model.active_parameters)} active" if model.mixture is not None else ""
    return f"{model.name} ({format_parameters(model.parameters)} parameters{active})"
