"""`phalanx plan --explain`: each formula in symbols and in this plan's numbers, with its source. Pure.

Numbers come from `core.performance` where possible, so that printed and computed values agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from phalanx.cli.plan.amounts import gb_shown, parameters_shown, round_shown, seconds_shown, span_shown, tokens_shown
from phalanx.cli.plan.figures import Figures, Formula
from phalanx.core.layouts.judge import peak_flops
from phalanx.core.performance.coefficients import Physics, Stack
from phalanx.core.performance.collectives import Network
from phalanx.core.performance.layer import best, sustained
from phalanx.core.performance.machine import Fact, Machine
from phalanx.core.performance.memory import SLACK, in_flight, kept_bytes
from phalanx.core.performance.model import Model
from phalanx.core.performance.step import Item, Method, Task, gathered_bytes, layer_parameters, rank_parameters
from phalanx.core.work.layout import Layout

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
class Case:
    """One evaluated layout with all inputs of the evaluation."""

    task: Task
    layout: Layout
    machine: Machine
    physics: Physics
    stack: Stack
    global_batch: int
    tokens: float | None
    figures: Figures


def formulas_of(case: Case) -> tuple[Formula, ...]:
    """Return every formula behind this plan, in the order of the printed plan."""
    return (*_model(case), *_memory(case), *_step(case), *_training(case), *_checkpoint(case))


def _model(case: Case) -> Iterator[Formula]:
    model, seq, frozen = case.task.model, case.task.seq, case.task.method is not Method.FULL
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


def _memory(case: Case) -> Iterator[Formula]:
    layout, stack, task = case.layout, case.stack, case.task
    items = dict(case.figures.memory_bytes)
    here = rank_parameters(task.model, layout)
    trained = "" if task.method is Method.FULL else f"; {task.adapter_share:.2%} of them trained"
    yield Formula(
        name="weights, gradients and optimizer states",
        symbols="n (w + g + o) bytes, n = parameters of one rank; ZeRO 1, 2, 3 shards o, g, w over the data parallel ranks",
        numbers=(
            f"n {here.total / 1e9:.4g}B over tp {layout.tensor} and pp {layout.pipeline}, w {stack.parameter_bytes:g} "
            f"g {stack.gradient_bytes:g} o {stack.state_bytes:g} ({stack.name}), zero {layout.zero} over {layout.shard} ranks{trained}: "
            f"{_sum(items, 'parameters', 'gradients', 'optimizer states', 'gathered parameters')}"
        ),
        source=_ZERO,
    )
    yield Formula(
        name="activations",
        symbols="in flight x L/p, rounded up, x (kept for the backward pass of one layer), plus the current layer",
        numbers=(
            f"{in_flight(layout):.3g} x {task.model.layers}/{layout.pipeline} x {gb_shown(kept_bytes(task, layout, stack))} "
            f"(micro-batch {layout.micro_batch}, recompute {layout.recompute}): {_sum(items, 'activations', 'logits and loss')}"
        ),
        source=_KEPT,
    )
    yield Formula(
        name="free memory",
        symbols="GPU memory less 1 %, less all items and allocator waste",
        numbers=f"waste {SLACK - 1:.0%}: {gb_shown(case.figures.usable_bytes)} - {gb_shown(case.figures.used_bytes)} = "
        f"{gb_shown(case.figures.room_bytes)}",
        source=_fact_source(case.machine.gpu.fact),
    )


def _step(case: Case) -> Iterator[Formula]:
    layout, machine, physics = case.layout, case.machine, case.physics
    items = dict(case.figures.step_items_s)
    top = best(machine.gpu, physics, layout.precision)
    rate = sustained(machine, physics, layout.precision)
    measured = machine.measured is not None and layout.precision in machine.measured.flops
    source_text = (
        "measured by phalanx calibrate"
        if measured
        else f"{physics.matmul_share:.0%} of the best known rate, {top / 1e12:.4g}"
    )
    yield Formula(
        name="matrix products",
        symbols="2 M K N / R each, plus memory traffic that is not overlapped",
        numbers=f"R {rate / 1e12:.4g} TFLOP/s {layout.precision} ({source_text}): {_seconds(items, Item.MATMUL)}",
        source=f"roofline, S. Williams et al., CACM 52(4), 2009; rate: {_fact_source(machine.gpu.fact)}",
    )
    if layout.tensor > 1:
        yield _exchange(
            "tensor parallel",
            "four all-reduces (or gather and scatter) of T d per layer and micro-batch: 2 (t-1)/t n / B",
            f"t {layout.tensor}: {_seconds(items, Item.TENSOR)}",
            case,
        )
    if layout.zero == 3 and layout.shard > 1:
        layer = layer_parameters(case.task.model, layout)
        yield _exchange(
            "sharded parameters",
            "per layer (F-1)/F n / B to gather, again backward, and to reduce; little of it counts where it overlaps with compute",
            f"F {layout.shard}, n {gb_shown(layer.total * gathered_bytes(case.task, layout, case.stack))} a layer: {_seconds(items, Item.SHARD)}",
            case,
        )
    if items.get(Item.GRADIENTS.value):
        yield _exchange(
            "gradients",
            "once a step: reduce and, if states are sharded, gather; overlapped with the last backward pass",
            f"{layout.data} data parallel ranks: {_seconds(items, Item.GRADIENTS)}",
            case,
        )
    if layout.pipeline > 1:
        yield Formula(
            name="pipeline bubble",
            symbols="(p - 1) / v of the time of one micro-batch on one stage; (p - 1) / (v m) of the step",
            numbers=f"p {layout.pipeline}, v {layout.interleave}, m {layout.micro_batches}: {_seconds(items, Item.BUBBLE)}",
            source=_PIPELINE,
        )
    low, high = case.figures.step_s.low, case.figures.step_s.high
    yield Formula(
        name="interval of the step",
        symbols="exp(+-1.28 sigma), sigma^2 = sum over items (share x spread of the item)^2 + spread of the stack^2",
        numbers=f"{seconds_shown(low)} to {seconds_shown(high)}; 80 % of steps lie inside",
        source="spreads set on published runs that were not used for the fit: benchmarks/planner.py",
    )


def _training(case: Case) -> Iterator[Formula]:
    figures, machine, task = case.figures, case.machine, case.task
    peak = peak_flops(machine.gpu)
    batch = case.global_batch * task.seq
    yield Formula(
        name="MFU",
        symbols="C x tokens per second / (GPUs x dense peak of 16-bit products, for every precision)",
        numbers=(
            f"{task.model.flops_per_token(task.seq, frozen=task.method is not Method.FULL) / 1e9:,.4g} GFLOP x {round_shown(figures.tokens_per_s)} / "
            f"({machine.gpus} x {peak / 1e12:.4g} TFLOP/s) = {figures.mfu:.1%}"
        ),
        source=_PALM,
    )
    if case.tokens is None or figures.train_s is None:
        return
    yield Formula(
        name="training",
        symbols="steps x time of a step = tokens / (tokens per step) x time of a step; GPU-hours x price",
        numbers=f"{tokens_shown(case.tokens)} / {tokens_shown(batch)} x {seconds_shown(figures.step_s.mid)} = "
        f"{span_shown(figures.train_s.mid)}",
        source="" if machine.price is None else f"price: {machine.price.offer}, {_fact_source(machine.price.fact)}",
    )


def _checkpoint(case: Case) -> Iterator[Formula]:
    saving, machine = case.figures.saving, case.machine
    if saving is None:
        return
    measured = None if machine.measured is None else machine.measured.storage_bytes_per_s
    storage = "measured by phalanx calibrate" if measured else _fact_source(machine.storage_fact)
    yield Formula(
        name="checkpoint",
        symbols="D / (nodes x W) to write; tau = sqrt(2 delta M) (1 + ...) - delta loses the least time",
        numbers=(
            f"{gb_shown(saving.bytes)} over {machine.nodes} x {(measured or machine.storage_bytes_per_s) / 1e9:.3g} GB/s = "
            f"{seconds_shown(saving.write_s)}; tau {span_shown(saving.interval_s)}, kept {saving.goodput:.1%}"
        ),
        source=f"{_DALY}; storage: {storage}",
    )


def _exchange(name: str, symbols: str, numbers: str, case: Case) -> Formula:
    machine, network = case.machine, Network(case.machine, case.physics)
    link = f"sustained B within a node {network.near_bytes_per_s / 1e9:.3g} GB/s"
    far = f", between nodes {network.far_bytes_per_s / 1e9:.3g} GB/s a GPU" if machine.nodes > 1 else ""
    source = f"{_RING}; network: {_fact_source(machine.network_fact)}" if machine.nodes > 1 else _RING
    return Formula(name=name, symbols=symbols, numbers=f"{numbers}; {link}{far}", source=source)


def _sum(items: Mapping[str, float], *names: str) -> str:
    return gb_shown(sum(items.get(name, 0.0) for name in names))


def _seconds(items: Mapping[str, float], item: Item) -> str:
    return f"{seconds_shown(items.get(item.value, 0.0))} a step"


def _fact_source(fact: Fact) -> str:
    return f"{fact.source} ({fact.date})" if fact.date else fact.source or "not stated"


def model_line(model: Model) -> str:
    """Format `llama-3-70b (70.6B parameters)`; for a mixture also the active parameters."""
    active = f", {parameters_shown(model.active_parameters)} active" if model.mixture is not None else ""
    return f"{model.name} ({parameters_shown(model.parameters)} parameters{active})"
