"""The parts of a model that one rank computes, as one module.

Parameters have the names of the whole model in every stage, so that any layout can load a checkpoint of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.core.work.layouts.layout import Layout
from phalanx.core.work.layouts.layout_split import layers_per_chunk
from phalanx.torch.parts import ModelPart

Exchange = Callable[[torch.Tensor], torch.Tensor]


class ModelStage(nn.Module):
    """A sequence of parts.

    Args:
        parts: the parts to compute.
        enter, last_layer: index of the first and of the last layer of the model, if this stage has them. Sequence parallel splits the stream
            between them.
    """

    def __init__(
        self, parts: Sequence[ModelPart], *, first_layer: int | None = None, last_layer: int | None = None
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)  # a tuple, so that torch registers modules only under the names below
        self.scatter: Exchange | None = None
        self.gather: Exchange | None = None
        self.first_layer, self.last_layer = first_layer, last_layer
        for part in parts:
            _add_module(self, part.name.split("."), part.module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after the parts of this stage. The first stage gets samples, the last one returns logits."""
        for index, part in enumerate(self.parts):
            if self.scatter is not None and index == self.first_layer:
                x = self.scatter(x)
            x = part.module(x)
            if self.gather is not None and index == self.last_layer:
                x = self.gather(x)
            if index < len(self.parts) - 1 and x._is_view():  # noqa: SLF001 - no public method
                x = x.clone()  # FSDP attaches its hook to the result of a part; a write into a view would lose it
        return x


def split_chain(parts: Sequence[ModelPart], chunks: int) -> tuple[tuple[ModelPart, ...], ...]:
    """Split the chain into `chunks` pieces with equal numbers of layers; parts before and after the layers are in the first and last piece."""
    layers = [index for index, part in enumerate(parts) if part.layer]
    ends = []
    taken = 0
    for count in layers_per_chunk(len(layers), chunks)[:-1]:
        taken += count
        ends.append(layers[taken - 1] + 1)
    starts = [0, *ends]
    return tuple(tuple(parts[start:end]) for start, end in zip(starts, [*ends, len(parts)], strict=True))


def stages_of_rank(parts: Sequence[ModelPart], layout: Layout, place: int) -> tuple[ModelStage, ...]:
    """Return the stages of pipeline rank `place`: every pipeline-th chunk, so that runs of layers are interleaved."""
    pieces = split_chain(parts, layout.pipeline * layout.interleave)
    layers = [part.name for part in parts if part.layer]
    return tuple(_stage(pieces[chunk], layers) for chunk in range(place, len(pieces), layout.pipeline))


def combine_stages(held: Sequence[ModelStage]) -> Any:
    """Return one module with the parts of all given stages, for checkpoints and optimizers; it is not called to compute."""
    if len(held) == 1:
        return held[0]
    return ModelStage([part for stage in held for part in stage.parts])


def _stage(piece: Sequence[ModelPart], layers: Sequence[str]) -> ModelStage:
    names = [part.name for part in piece]
    enter = names.index(layers[0]) if layers and layers[0] in names else None
    leave = names.index(layers[-1]) if layers and layers[-1] in names else None
    return ModelStage(piece, first_layer=enter, last_layer=leave)


def _add_module(root: nn.Module, path: Sequence[str], module: nn.Module) -> None:
    """Add the module at a dotted path; create empty modules on the way."""
    for name in path[:-1]:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(path[-1], module)
