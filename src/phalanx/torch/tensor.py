"""Tensor and sequence parallel: layers of a part become DTensors over the ranks that share each matrix product.

The roles come from the model's declaration. Between two layers the stream is a plain tensor: whole on every rank, or, with sequence
parallel, this rank's piece of the positions from the first layer of the chain to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phalanx.core.errors import BadRequest
from phalanx.torch.parts import COLUMNS, ROWS, SHARED, WHOLE, Part, Parts, role

_POSITIONS = 1  # the dimension of the stream (B, T, ...) that sequence parallel splits


class Whole(ParallelStyle):
    """A layer that every rank holds and computes whole, as a DTensor like its neighbours: optimizers take no mixture of both."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return distribute_module(module, device_mesh, None, _as_whole, _as_local)


class Around(ParallelStyle):
    """A module around split layers: its first input becomes one whole DTensor for all of them.

    So the gradients of queries, keys and values are added before they are exchanged, once, not each.
    """

    def __init__(self, arrives: Any) -> None:
        super().__init__()
        self.arrives = arrives

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        def whole(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            stream = inputs[0]
            if not isinstance(stream, DTensor):  # else a module around this one has made it
                stream = DTensor.from_local(stream, device_mesh, [self.arrives], run_check=False)
            return (stream.redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(whole)
        return module


def split_part(part: Part, parts: Parts, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Distribute the layers of one part over the tensor ranks, in place. Every rank holds the same values before."""
    for name, style in styles(part, parts, sequence=sequence).items():
        parallelize_module(part.module.get_submodule(name), mesh, style, src_data_rank=None)


def styles(part: Part, parts: Parts, *, sequence: bool) -> dict[str, ParallelStyle]:
    """How each layer of one part is shared, by its name in the part.

    Raises:
        BadRequest: a parameter for which no rule says how it is shared.
    """
    said = {name: role(parts, f"{part.name}.{name}" if name else part.name) for name, _ in part.module.named_modules()}
    inside = _between(said) if ROWS in said.values() else frozenset()
    split_stream = sequence and part.layer
    stream = {
        layer.out_features for name, layer in part.module.named_modules() if said[name] == ROWS and _linear(layer)
    }
    plan: dict[str, ParallelStyle] = {}
    for name, layer in part.module.named_modules():
        if said[name] is None and not _owns(layer):
            continue
        _check_clear(part, name, layer, said[name], inside, stream)
        plan[name] = _style(name, layer, said[name], gathers=not inside, split_stream=split_stream)
    for name in inside - {""}:
        plan[name] = Around(Shard(_POSITIONS) if split_stream else Replicate())
    return plan


def scatter(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """From the whole stream to this rank's piece of the positions."""
    return lambda x: (
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        .redistribute(placements=[Shard(_POSITIONS)])
        .to_local()
    )


def gather(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """The reverse of `scatter`."""
    return lambda x: (
        DTensor.from_local(x, mesh, [Shard(_POSITIONS)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _style(name: str, layer: Any, said: str | None, *, gathers: bool, split_stream: bool) -> ParallelStyle:
    """How torch is told. `gathers`: no "rows" follows in this part, so that columns must become the whole again."""
    flat = split_stream and "." not in name  # its input is the split stream itself, no module around it gathers
    if said == COLUMNS:
        arrives = Shard(_POSITIONS) if flat else None
        return ColwiseParallel(input_layouts=arrives, output_layouts=Replicate() if gathers else None)
    if said == ROWS:
        if isinstance(layer, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        return RowwiseParallel(output_layouts=Shard(_POSITIONS) if split_stream else None)
    if said == SHARED or (split_stream and not (said == WHOLE and not flat)):
        # Which dimension is called split does not matter to a layer that treats all positions and heads alike.
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    return Whole()


def _check_clear(part: Part, name: str, layer: Any, said: str | None, inside: frozenset[str], stream: set[int]) -> None:
    """Do nothing if it is known what the layer sees: a wrong guess would give wrong gradients and no error.

    Raises:
        BadRequest: it is not.
    """
    full = f"{part.name}.{name}" if name else part.name
    if said is not None:
        return
    if any(True for _ in layer.children()):
        raise BadRequest(
            f"tensor parallel: {full} holds parameters beside its layers, and nothing says how ranks share them",
            hint="move them into a layer of their own",
        )
    parent = name.rpartition(".")[0]
    of_stream = not parent and all(weight.shape[-1] in stream for weight in layer.parameters(recurse=False))
    if parent in inside and not of_stream:
        raise BadRequest(
            f"tensor parallel: {full} lies among split layers, and nothing says what it sees",
            hint='declare it in `tensor`: "shared" if it works on each head alike, "whole" if on the whole stream',
        )


def _linear(layer: Any) -> bool:
    return isinstance(layer, nn.Linear)


def _between(said: dict[str, str | None]) -> frozenset[str]:
    """The modules around split layers; what else lies in them sees a share of the features."""
    return frozenset(name.rpartition(".")[0] for name, what in said.items() if what in {COLUMNS, ROWS, SHARED})


def _owns(layer: Any) -> bool:
    return any(True for _ in layer.parameters(recurse=False))


def _as_whole(_module: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _as_local(_module: Any, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output
