"""`phalanx plan --serve --explain`: each formula in symbols and in this plan's numbers, with its source. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from phalanx.planner.cost.machine import FactSource
from phalanx.planner.cost.uncertainty import Z_80
from phalanx.planner.serving.iteration_time import IterationParts, ServingSpeed, matrix_rate
from phalanx.planner.serving.replica import CACHE_BYTES, PRODUCT_PRECISION, WEIGHT_BYTES
from phalanx.planner.serving.sizing import ANSWER_SPREAD, ServiceSizer, SizedService
from phalanx.plans.amounts import format_decimal_bytes, format_rounded, format_seconds
from phalanx.plans.records import Formula

_GQA: Final = 'J. Ainslie et al., "GQA", 2023'
_MLA: Final = 'DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2'
_ROOFLINE: Final = (
    "S. Williams et al., CACM 52(4), 2009; coefficients fitted to published rows: benchmarks/serving_plan.py"
)
_ORCA: Final = 'G. Yu et al., "Orca", OSDI 2022; A. Agrawal et al., "Sarathi-Serve", OSDI 2024'


def explain_service(sizer: ServiceSizer, one: SizedService, speed: ServingSpeed) -> tuple[Formula, ...]:
    """Return every formula behind a sized service, in the order of the computation."""
    return (*_memory(sizer, one, speed), *_times(sizer, one, speed), *_service(sizer, one, speed))


def _memory(sizer: ServiceSizer, one: SizedService, speed: ServingSpeed) -> Iterator[Formula]:
    model, gpu = one.model, one.machine.gpu
    shape = model.shape
    yield Formula(
        name="weights",
        symbols="(N - N16) b + 2 N16, N16: embeddings, output and norms, which keep 16 bits",
        numbers=f"({shape.parameters:,} - {model.unquantised_parameters:,}) x {WEIGHT_BYTES[model.weights]:g} + 2 x "
        f"{model.unquantised_parameters:,} = {format_decimal_bytes(model.weight_bytes)}",
        source="bytes of one weight: planner/serving/replica.py",
    )
    size = CACHE_BYTES[model.cache]
    if shape.latent is None:
        symbols, source = "2 L g k b: keys and values of g key-value heads of k features", _GQA
        numbers = f"2 x {shape.layers} x {shape.kv_heads} x {shape.head_dim} x {size:g}"
    else:
        symbols, source = "L (r + p) b: the latent vector and its position", _MLA
        numbers = f"{shape.layers} x ({shape.latent.kv_rank} + {shape.latent.rope_dim}) x {size:g}"
    if model.shape.window is not None:
        symbols += f"; {model.shape.window.layers} layers keep at most {model.shape.window.tokens:,} tokens"
    yield Formula(
        name="KV cache per token",
        symbols=symbols,
        numbers=f"{numbers} = {model.context_bytes(1.0) / 1e3:,.1f} kB",
        source=source,
    )
    yield Formula(
        name="largest batch",
        symbols="room of a GPU = M u - weights / GPUs - overhead; batch = room / KV of a request of full length on one GPU",
        numbers=f"M {format_decimal_bytes(gpu.memory_bytes)} x {speed.memory_taken:g} - "
        f"{format_decimal_bytes(model.weight_bytes / one.layout.gpus)} - {format_decimal_bytes(speed.overhead_bytes)} = "
        f"{format_decimal_bytes(sizer.room_bytes)}: {one.batch_max} requests",
        source=_fact(gpu.fact),
    )


def _times(sizer: ServiceSizer, one: SizedService, speed: ServingSpeed) -> Iterator[Formula]:
    assert one.figures is not None  # of a service that meets its target
    target, gpu = sizer.target, one.machine.gpu
    context = target.prompt + target.answer / 2.0
    parts = sizer.timer.parts(one.figures.running, context)
    precision = PRODUCT_PRECISION[one.model.weights]
    yield Formula(
        name="one token of all running requests",
        symbols="products (from FLOP/s and memory bandwidth) + KV cache / bandwidth + small kernels + 2 L all-reduces + host",
        numbers=f"{one.figures.running:.0f} requests of {context:,.0f} tokens, {format_rounded(matrix_rate(gpu, speed, precision) / 1e12)} "
        f"TFLOP/s, {gpu.memory_bytes_per_s / 1e9:,.0f} GB/s x {speed.memory_share:.2f}: {_parts(parts)}",
        source=f"{_ROOFLINE}; {_fact(gpu.fact)}",
    )
    read = sizer.timer.parts(0.0, 0.0, target.prompt, target.prompt**2 / 2.0)
    yield Formula(
        name="one prompt alone",
        symbols="2 N' s / (t R) + attention 2 h k L s^2 / (t R) + the parts above",
        numbers=f"s {target.prompt:,}: {_parts(read)}",
        source=_ROOFLINE,
    )


def _service(sizer: ServiceSizer, one: SizedService, speed: ServingSpeed) -> Iterator[Formula]:
    assert one.figures is not None  # as above
    target, figures = sizer.target, one.figures
    users = -(-target.users // one.replicas)
    yield Formula(
        name="first token and time per token",
        symbols="percentiles of a simulation of one replica in virtual time: users ask again after each answer, at random moments; an "
        f"iteration takes up to {speed.chunk:,.0f} tokens; answers vary by {ANSWER_SPREAD:.0%} to either side",
        numbers=f"{users} users: first token {format_seconds(figures.ttft_p50_s)} and {format_seconds(figures.ttft_p95_s)} (50 and 95 %), "
        f"{format_seconds(figures.tpot_p50_s)} and {format_seconds(figures.tpot_p95_s)} per token, {figures.tokens_per_s:,.0f} tokens/s",
        source=_ORCA,
    )
    price = one.machine.price
    if price is not None and one.usd_per_million is not None:
        yield Formula(
            name="cost",
            symbols="GPUs x price / (3600 x tokens/s)",
            numbers=f"{one.gpus} x ${price.usd_per_gpu_hour:.2f} / 3600 / {one.tokens_per_s:,.0f} x 1e6 = ${one.usd_per_million:.2f} per million",
            source=_fact(price.fact),
        )
    wide = {name: math.exp(Z_80 * value) for name, value in speed.spreads.items()}
    yield Formula(
        name="80 % interval",
        symbols="times exp(+-1.28 s), s the spread of log(measured / predicted) on sources that were left out of the fit",
        numbers=", ".join(f"{name} x {value:.2f}" for name, value in wide.items()),
        source="benchmarks/serving_plan.py",
    )


def _parts(parts: IterationParts) -> str:
    named = {
        "products": parts.products,
        "KV cache": parts.cache,
        "attention over the prompt": parts.prompts,
        "small kernels": parts.small_kernels,
        "all-reduce": parts.communication,
        "host": parts.host,
    }
    texts = [f"{name} {format_seconds(value)}" for name, value in named.items() if value > 0]
    return f"{', '.join(texts)}: {format_seconds(parts.total_s)}"


def _fact(fact: FactSource) -> str:
    return f"{fact.source}, {fact.date}"
