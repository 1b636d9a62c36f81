"""Enumerate the candidate layouts of a model on a machine, in a fixed order.

Impossible layouts are left out (such as heads that do not divide), and layouts that are certainly slower: tensor parallel wider than a link
domain, recomputation or more sharding where the layout fits without. The caller decides the last two, because it knows what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from phalanx.core.work.layouts.layout import Layout, Recompute
from phalanx.planner.cost.collectives import RankNetwork
from phalanx.planner.cost.optimizers import Offload
from phalanx.planner.search.request import LayoutRequest

MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)  # sequences; larger micro-batches do not use a device better
CONTEXTS: Final = (1, 2, 4, 8, 16, 32)
CONTEXT_TOKENS_MIN: Final = 2048  # per rank; below, exchanging keys and values costs more than it saves
Z3: Final = 3  # the ZeRO degree that shards parameters
RUNS_MAX: Final = 12  # runs of layers per stage; the largest `vpp` of NeMo's GPT-3 and Nemotron recipes
UNEVEN_MAX: Final = 1.13  # busiest stage over mean stage; a less even split wastes an eighth of the machine
BATCH_MAX_TOKENS: Final = 1 << 17  # of one micro-batch on one rank; activations of more tokens fit on no device


@dataclass(frozen=True, slots=True)
class ParallelDegrees:
    """The degrees of parallelism of a layout; without micro-batch, sharding and recomputation."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int


def enumerate_degrees(request: LayoutRequest) -> Iterator[ParallelDegrees]:
    """Yield the degrees of parallelism whose product is the number of devices.

    Programs that can put parameters on the host (ZeRO, FSDP) are planned with data parallel ranks alone under offload.
    """
    model, gpus = request.model, request.machine.gpus
    network = RankNetwork(request.machine, request.physics)
    domain = max(network.island if network.link_domain > 1 else request.machine.gpus_per_node, 1)
    zero_only = request.offload is not Offload.NONE and Offload.PARAMETERS in request.stack.offloads
    splits = request.stack.splits and not zero_only
    whole = not splits or (model.tied and not request.stack.splits_tied)
    for tensor in (1,) if whole else (1, 2, 4, 8, 16):
        if tensor > min(domain, gpus) or gpus % tensor or not _divides(request, tensor):
            continue
        for pipeline in (1,) if whole else divisors(gpus // tensor):
            if pipeline > model.layers or _unevenness(model.layers, pipeline) > UNEVEN_MAX:
                continue
            rest = gpus // tensor // pipeline
            for context in CONTEXTS:
                if rest % context or (context > 1 and not splits) or not _splits_sequence(request, context, tensor):
                    continue
                data = rest // context
                if request.global_batch % (data * request.updates):
                    continue
                for expert in _experts(request, data * context):
                    yield ParallelDegrees(tensor, pipeline, context, expert, data)


def enumerate_shardings(request: LayoutRequest, split: ParallelDegrees) -> Iterator[tuple[int, int, int]]:
    """Yield (ZeRO degree, shard, replicate), from the least communication to the least memory."""
    ranks = split.data * split.context
    zeros = [zero for zero in request.stack.zeros if zero == 0 or ranks > 1]
    if request.offload is not Offload.NONE and ranks > 1:
        least = Z3 if request.offload is Offload.PARAMETERS else 1
        zeros = [zero for zero in zeros if zero >= least]
    for zero in zeros:
        if zero == 0:
            yield 0, 1, split.data
        else:
            shard = max(1, request.machine.gpus_per_node // (split.tensor * split.context))
            while zero == 3 and shard < split.data:
                if shard > 1 and split.data % shard == 0:
                    # Hybrid: sharded within one, two, four, ... nodes, with replicas across them.
                    yield 3, shard, split.data // shard
                shard *= 2
            yield zero, split.data, 1


def enumerate_micro_batches(request: LayoutRequest, split: ParallelDegrees) -> Iterator[int]:
    """Yield micro-batch sizes that divide the samples of one data parallel rank in each update."""
    share = request.global_batch // split.data // request.updates
    for size in MICRO_BATCHES:
        tokens = size * request.seq // split.context
        if share % size == 0 and (size == 1 or tokens <= BATCH_MAX_TOKENS) and share // size >= split.pipeline:
            yield size


def enumerate_recomputations(request: LayoutRequest) -> Iterator[Recompute]:
    """Yield the recomputations that the stack supports, from the least time to the least memory."""
    for again in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL):
        if again.value in request.stack.recomputations:
            yield again


def enumerate_interleavings(request: LayoutRequest, split: ParallelDegrees, steps: int) -> Iterator[int]:
    """Yield numbers of runs per stage. Megatron's schedule needs a multiple of the number of stages as micro-batches."""
    yield 1
    if (
        not request.stack.interleaves
        or split.pipeline == 1
        or steps % split.pipeline
        or request.model.layers % split.pipeline
    ):
        return
    per_stage = request.model.layers // split.pipeline
    runs = [run for run in divisors(per_stage) if 1 < run <= RUNS_MAX]
    yield from runs[:3] + [run for run in runs[3:] if run == runs[-1]]


def build_layout(
    split: ParallelDegrees, *, request: LayoutRequest, zero: int, shard: int, replicate: int, micro_batch: int
) -> Layout:
    """Return the layout without recomputation and interleaving."""
    return Layout(
        tensor=split.tensor,
        sequence=split.tensor > 1 and request.seq % (split.tensor * split.context) == 0,
        pipeline=split.pipeline,
        context=split.context,
        expert=split.expert,
        shard=shard,
        replicate=replicate,
        zero=zero,
        micro_batch=micro_batch,
        micro_batches=request.global_batch // split.data // micro_batch,
        precision=request.precision,
    )


def with_interleaving(layout: Layout, runs: int) -> Layout:
    """Return the layout with this number of runs of layers per stage."""
    return layout if runs == 1 else replace(layout, interleave=runs)


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return low + [number // one for one in reversed(low) if one * one != number]


def _divides(request: LayoutRequest, tensor: int) -> bool:
    model = request.model
    widths = [model.heads, model.kv_heads if model.latent is None else model.heads, model.ffn]
    if model.mixture is not None:
        widths += [model.mixture.ffn, model.mixture.shared_ffn]
    return all(width % tensor == 0 for width in widths)


def _unevenness(layers: int, pipeline: int) -> float:
    return -(-layers // pipeline) * pipeline / layers


def _splits_sequence(request: LayoutRequest, context: int, tensor: int) -> bool:
    if context == 1:
        return True
    return request.seq % (2 * context * tensor) == 0 and request.seq // context >= CONTEXT_TOKENS_MIN


def _experts(request: LayoutRequest, ranks: int) -> Iterator[int]:
    mixture = request.model.mixture
    if mixture is None or not request.stack.experts:
        yield 1
        return
    for expert in divisors(mixture.experts):
        if expert <= ranks and ranks % expert == 0:
            yield expert
