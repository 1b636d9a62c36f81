"""Whether a layout can split a given model and batch, and how a layout changes when the number of ranks changes.

The planner checks before a job is placed, `phalanx.torch` once the model is built. `core.performance` estimates the cost of a layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """The dimensions of a model that limit its layouts. Zero if unknown: then it is not checked.

    Attributes:
        layers: blocks in the chain.
        heads, kv_heads: of attention; `kv_heads` 0 if equal to `heads`.
        widths: by name, the features that tensor parallel ranks share evenly (the MLP's width, the vocabulary).
        sequence: positions of one sample.
        batch: samples per step over all ranks.
        experts: of a mixture; 1 for a dense model.
    """

    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    widths: tuple[tuple[str, int], ...] = ()
    sequence: int = 0
    batch: int = 0
    experts: int = 1


def check_split(layout: Layout, model: SplitLimits) -> None:
    """Check that every axis of the layout divides its dimension.

    Raises:
        BadRequest: the first axis that does not.
    """
    _check_tensor(layout, model)
    _check_pipeline(layout, model)
    if layout.context > 1 and model.sequence % (2 * layout.context):
        raise BadRequest(
            f"context parallel over {layout.context} ranks needs {2 * layout.context} equal pieces of a sequence, "
            f"but {model.sequence} positions do not divide",
            hint=f"use a sequence length that is a multiple of {2 * layout.context}, or a smaller cp",
        )
    if layout.expert > 1 and model.experts % layout.expert:
        raise BadRequest(
            f"{model.experts} experts cannot be shared by ep={layout.expert} ranks", hint="choose an ep that divides"
        )
    pieces = layout.data * layout.micro_batches
    if model.batch % pieces:
        raise BadRequest(
            f"global batch {model.batch} is not divisible by {layout.data} data-parallel ranks "
            f"x {layout.micro_batches} micro-batches",
            hint=f"use a multiple of {pieces}",
        )


def resize_layout(layout: Layout, ranks: int) -> Layout:
    """The layout for another number of ranks: the split of the model is unchanged, data parallelism grows or shrinks.

    The global batch stays the same if the micro-batches allow it. Replicas change first, since that moves no state.

    Raises:
        BadRequest: the ranks are not a multiple of those that hold one copy of the model's layers.
    """
    if layout.ranks == ranks:
        return layout
    fixed = layout.tensor * layout.context * layout.pipeline
    data, rest = divmod(ranks, fixed)
    if rest or not data:
        raise BadRequest(
            f"layout {layout} is for {layout.ranks} ranks, but the job has {ranks}; the number must be a multiple of {fixed} "
            "(tensor x context x pipeline)",
            hint=f"start a multiple of {fixed} ranks, or give another layout",
        )
    shard = layout.shard if data % layout.shard == 0 else data
    if layout.replicate == 1 and layout.shard > 1:
        shard = data  # a fully sharded layout stays fully sharded
    batches = layout.micro_batches * layout.data
    micro_batches = batches // data if batches % data == 0 else layout.micro_batches
    if layout.pipeline > 1:
        micro_batches = max(micro_batches, layout.pipeline)  # fewer cannot fill the stages
    zero = layout.zero if shard > 1 else 0
    return replace(layout, shard=shard, replicate=data // shard, zero=zero, micro_batches=micro_batches)


def layers_per_chunk(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a pipeline, in order: as even as possible, the first chunks take the remainder."""
    each, remainder = divmod(layers, chunks)
    return tuple(each + (index < remainder) for index in range(chunks))


def _check_tensor(layout: Layout, model: SplitLimits) -> None:
    tensor = layout.tensor
    for word, count in (("heads", model.heads), ("key-value heads", model.kv_heads)):
        if count % tensor:
            raise BadRequest(
                f"{count} {word} cannot be shared by tp={tensor} ranks", hint="choose a tp that divides them"
            )
    for name, width in model.widths:
        if width % tensor:
            raise BadRequest(
                f"{name}: {width} features cannot be shared by tp={tensor} ranks", hint="choose a tp that divides them"
            )
    if layout.sequence and model.sequence % (tensor * layout.context):
        raise BadRequest(
            f"sequence parallel splits {model.sequence} positions over tp={tensor} x cp={layout.context} ranks, "
            "which does not divide",
            hint="choose another sequence length, or leave sp out",
        )


def _check_pipeline(layout: Layout, model: SplitLimits) -> None:
    chunks = layout.pipeline * layout.interleave
    if model.layers and layout.pipeline > 1 and model.layers < chunks:
        raise BadRequest(
            f"{model.layers} layers are fewer than the {chunks} chunks of pp={layout.pipeline} x vpp={layout.interleave}",
            hint="choose a smaller pp or vpp",
        )
    if layout.pipeline > 1 and layout.micro_batches < layout.pipeline:
        raise BadRequest(
            f"pp={layout.pipeline} needs at least {layout.pipeline} micro-batches to fill its stages, but has "
            f"{layout.micro_batches}",
            hint=f"add accumulate={2 * layout.pipeline}",
        )
    rounds = max(1, layout.micro_batches // layout.pipeline)
    if layout.interleave > 1 and layout.micro_batches % rounds:
        raise BadRequest(
            f"interleaved stages take {layout.micro_batches} micro-batches in {rounds} rounds, which does not divide",
            hint=f"use a multiple of pp={layout.pipeline}",
        )
