"""Tensor and sequence parallel: layers of a part become DTensors over the ranks that share each matrix product.

The roles come from the declaration of the model. Between two layers the stream is a plain tensor: whole on every rank, or, with sequence
parallel, the positions of this rank, from the first layer of the chain to the last.
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
from phalanx.torch.parts import (
    COLUMNS,
    ROWS,
    SHARED,
    WHOLE,
    ModelPart,
    Parts,
    tensor_role,
)

_POSITIONS = 1  # the dimension of the stream (B, T, ...) that sequence parallel splits


class WholeLayer(ParallelStyle):
    """A layer that every rank computes whole, as a DTensor, because optimizers do not support a mixture with plain tensors."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return distribute_module(module, device_mesh, None, _as_whole, _as_local)


class SharedInput(ParallelStyle):
    """A module around split layers: its first input becomes one whole DTensor for all of them.

    So the gradients of queries, keys and values are added first and exchanged once.
    """

    def __init__(self, arrives: Any) -> None:
        super().__init__()
        self.arrives = arrives

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        def whole(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            stream = inputs[0]
            if not isinstance(stream, DTensor):  # an outer module may have converted it
                stream = DTensor.from_local(stream, device_mesh, [self.arrives], run_check=False)
            return (stream.redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(whole)
        return module


def split_part(part: ModelPart, parts: Parts, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Distribute the layers of one part over the tensor ranks, in place. All ranks must have the same values before."""
    for name, style in parallel_styles(part, parts, sequence=sequence).items():
        parallelize_module(part.module.get_submodule(name), mesh, style, src_data_rank=None)


def parallel_styles(part: ModelPart, parts: Parts, *, sequence: bool) -> dict[str, ParallelStyle]:
    """Return how ranks share each layer of one part, by its name in the part.

    Raises:
        BadRequest: no rule tells how ranks share a parameter.
    """
    roles = {
        name: tensor_role(parts, f"{part.name}.{name}" if name else part.name)
        for name, _ in part.module.named_modules()
    }
    inside = _parents(roles) if ROWS in roles.values() else frozenset()
    split_stream = sequence and part.layer
    stream = {
        layer.out_features
        for name, layer in part.module.named_modules()
        if roles[name] == ROWS and isinstance(layer, nn.Linear)
    }
    plan: dict[str, ParallelStyle] = {}
    for name, layer in part.module.named_modules():
        if roles[name] is None and not _has_parameters(layer):
            continue
        _check_unambiguous(part, name, layer, roles[name], inside, stream)
        plan[name] = _style(name, layer, roles[name], gathers=not inside, split_stream=split_stream)
    for name in inside - {""}:
        plan[name] = SharedInput(Shard(_POSITIONS) if split_stream else Replicate())
    return plan


def scatter_positions(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from the whole stream to the positions of this rank."""
    return lambda x: (
        DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        .redistribute(placements=[Shard(_POSITIONS)])
        .to_local()
    )


def gather_positions(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the inverse of `scatter_positions`."""
    return lambda x: (
        DTensor.from_local(x, mesh, [Shard(_POSITIONS)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _style(name: str, layer: Any, layer_role: str | None, *, gathers: bool, split_stream: bool) -> ParallelStyle:
    """Return the torch style of a layer. `gathers`: no "rows" layer follows in this part, so the columns must be gathered."""
    flat = split_stream and "." not in name  # its input is the split stream; no outer module gathers it
    if layer_role == COLUMNS:
        input_layout = Shard(_POSITIONS) if flat else None
        return ColwiseParallel(input_layouts=input_layout, output_layouts=Replicate() if gathers else None)
    if layer_role == ROWS:
        if isinstance(layer, nn.Embedding):
            return RowwiseParallel(input_layouts=Replicate())
        return RowwiseParallel(output_layouts=Shard(_POSITIONS) if split_stream else None)
    if layer_role == SHARED or (split_stream and not (layer_role == WHOLE and not flat)):
        # The split dimension does not matter for a layer that treats all positions and heads alike.
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    return WholeLayer()


def _check_unambiguous(
    part: ModelPart, name: str, layer: Any, layer_role: str | None, inside: frozenset[str], stream: set[int]
) -> None:
    """Check that the input of a layer is known. A wrong guess would give wrong gradients without an error.

    Raises:
        BadRequest: it is unknown.
    """
    full = f"{part.name}.{name}" if name else part.name
    if layer_role is not None:
        return
    if any(True for _ in layer.children()):
        raise BadRequest(
            f"tensor parallel: {full} has parameters outside its layers, and no rule tells how ranks share them",
            hint="move them into a separate layer",
        )
    parent = name.rpartition(".")[0]
    of_stream = not parent and all(weight.shape[-1] in stream for weight in layer.parameters(recurse=False))
    if parent in inside and not of_stream:
        raise BadRequest(
            f"tensor parallel: layer {full} is in a block with sharded layers, and its input is not declared",
            hint='declare it in `tensor`: "shared" if it treats each head alike, "whole" if it uses the whole stream',
        )


def _parents(roles: dict[str, str | None]) -> frozenset[str]:
    """Return the modules around split layers; other layers in them may get a share of the features."""
    return frozenset(name.rpartition(".")[0] for name, one in roles.items() if one in {COLUMNS, ROWS, SHARED})


def _has_parameters(layer: Any) -> bool:
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
