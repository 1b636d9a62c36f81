"""Build the part of a model that this rank computes under a layout.

The steps, in this order: cut the chain into stages (pipeline), split layers (tensor, sequence), make attention use all positions
(context), recompute blocks in the backward pass (recompute), shard or copy the states (data parallel), schedule.
"""

from __future__ import annotations

import fnmatch
import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint as recompute

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Axis, Layout, Recompute
from phalanx.core.work.layouts.layout_split import check_split
from phalanx.torch import model_stage as _stage
from phalanx.torch import tensor_parallel as _tensor
from phalanx.torch.context_parallel import ContextAttention, SequenceShare, attach_attention
from phalanx.torch.device_mesh import build_mesh, data_mesh, has_sharded_states
from phalanx.torch.model_stage import ModelStage
from phalanx.torch.parts import (
    ModelPart,
    Parts,
    list_parts,
    read_declaration,
    splittable_sizes,
    tied_parameters,
)
from phalanx.torch.training import Loss, Training, TrainingRecipe

_PRECISIONS: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def assemble(model: Any, layout: Layout, recipe: TrainingRecipe, *, device: Any) -> Training:
    """Implement `phalanx.torch.parallelize`. Collective."""
    parts = read_declaration(model)
    check_split(layout, splittable_sizes(model, parts, layout, sequence=recipe.sequence, batch=recipe.batch))
    check_supported(layout, parts, model)
    whole = list_parts(model, parts)
    _check_equal(model, device)
    _check_parts(whole, parts, layout, initialize=recipe.initialize)
    positions = _position_buffers(whole, parts) if layout.context > 1 else ()
    mesh = build_mesh(layout, device.type)
    place = layout.coordinates(dist.get_rank())
    held = _stage.stages_of_rank(whole, layout, place[Axis.PIPELINE])
    tied_pairs = tied_parameters(model)
    _materialise(whole, held, device=device, initialize=recipe.initialize, seed=recipe.seed)
    _tie(model, tied_pairs)
    pieces = SequenceShare(layout.context, place[Axis.CONTEXT]) if layout.context > 1 else None
    for stage in held:
        _split(stage, parts, mesh, layout, pieces)
    states_mesh = data_mesh(mesh, layout)
    computing = [_data_parallel(stage, states_mesh, layout, device, apart=not tied_pairs) for stage in held]
    whole_stage = _stage.combine_stages(held)
    full_loss = _in_fp32(recipe.loss) if _is_half(layout) else recipe.loss
    return Training(
        layout=layout,
        mesh=mesh,
        model=whole_stage,
        optimizer=recipe.optimizer(whole_stage),
        compute=computing[0],
        schedule=_schedule(computing, layout, mesh, full_loss, device) if layout.pipeline > 1 else None,
        loss=full_loss,
        clip=recipe.clip,
        device=device,
        first=place[Axis.PIPELINE] == 0,
        last=place[Axis.PIPELINE] == layout.pipeline - 1,
        pieces=pieces,
        position_buffers=positions,
    )


def check_supported(layout: Layout, parts: Parts, model: Any) -> None:
    """Reject layouts that phalanx.torch does not support, before anything is built.

    Raises:
        BadRequest: names the part of the layout to change.
    """
    if layout.precision not in _PRECISIONS:
        raise BadRequest(
            f"phalanx.torch does not support precision={layout.precision}",
            hint="choose precision=bf16 or precision=fp32",
        )
    if layout.expert > 1:
        raise BadRequest("phalanx.torch does not support expert parallel yet", hint="choose a layout with ep=1")
    if layout.context > 1 and parts.positions is None:
        raise BadRequest(
            f"context parallel: {type(model).__name__} does not declare its buffers of positions",
            hint="declare Parts(positions=...), an empty tuple if there are none",
        )
    if layout.tensor > 1 and not parts.tensor:
        raise BadRequest(
            f"tp={layout.tensor}: {type(model).__name__} does not declare how its layers split",
            hint="declare Parts(tensor=...)",
        )
    if (pairs := tied_parameters(model)) and (layout.tensor > 1 or layout.pipeline > 1):
        one, other = pairs[0]
        raise BadRequest(
            f"{one} and {other} are one parameter, which tensor and pipeline parallel do not support",
            hint="untie them, or choose a layout with tp=1 and pp=1",
        )


def _check_parts(
    whole: Sequence[ModelPart], parts: Parts, layout: Layout, *, initialize: Callable[[Any], None] | None
) -> None:
    """Check all parts on every rank, so that all ranks fail alike. Otherwise the ranks of other pipeline stages would wait.

    Raises:
        BadRequest: a part is on the meta device and there is no `initialize`, or no rule tells how ranks share a parameter.
    """
    for part in whole:
        if initialize is None and _on_meta(part):
            raise BadRequest(
                f"part {part.name!r} is on the meta device, and there is no initialize function",
                hint="pass parallelize(initialize=...), a function of a part",
            )
        if layout.tensor > 1:
            _tensor.parallel_styles(part, parts, sequence=layout.sequence)


def _check_equal(model: Any, device: Any) -> None:
    """Check that the parameters of all ranks are equal: each rank uses its share of its own copy.

    Raises:
        BadRequest: they differ.
    """
    names, total = 0, 0.0
    for name, parameter in model.named_parameters():
        names = zlib.crc32(f"{name}{tuple(parameter.shape)}{parameter.is_meta}".encode(), names)
        if not parameter.is_meta:
            total += float(parameter.detach().double().abs().sum())
    if dist.get_world_size() == 1:
        return
    ends = torch.tensor([names, -names, total, -total], dtype=torch.float64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    most_names, least_names, most, least = (float(end) for end in ends)
    if most_names != -least_names or most + least > _EQUAL * most:
        raise BadRequest(
            "the ranks built different models",
            hint="call torch.manual_seed with the same number on every rank before you build the model",
        )


_EQUAL: Final = 1e-8
"""Relative difference of sums that counts as equal. Two CPU models may differ in the last bit of a random number (6e-8 of it), and in the
sum by that over the root of the count. Different seeds differ by more, up to 1e15 parameters."""


def _materialise(
    whole: Sequence[ModelPart],
    held: Sequence[ModelStage],
    *,
    device: Any,
    initialize: Callable[[Any], None] | None,
    seed: int,
) -> None:
    """Move the parts of this rank to its device and free the others. Initialize parts that are on the meta device.

    The values of a part depend on the seed and its place in the chain, not on the layout. Only one part at a time is whole in memory.
    """
    mine = {part.name for stage in held for part in stage.parts}
    for index, part in enumerate(whole):
        if part.name not in mine:
            part.module.to("meta")
            continue
        if initialize is None or not _on_meta(part):
            part.module.to(device)
            continue
        part.module.to_empty(device=device)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed + index)
            initialize(part.module)


def _on_meta(part: ModelPart) -> bool:
    return any(parameter.is_meta for parameter in part.module.parameters())


def _tie(model: Any, pairs: Sequence[tuple[str, str]]) -> None:
    """Tie each pair again: a module that leaves the meta device gets separate parameters. In place."""
    for one, other in pairs:
        owner, _, attribute = other.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(one))


def _split(stage: ModelStage, parts: Parts, mesh: DeviceMesh, layout: Layout, pieces: SequenceShare | None) -> None:
    """Apply tensor, sequence and context parallel, and recomputation, part by part."""
    if layout.tensor > 1:
        for part in stage.parts:
            _tensor.split_part(part, parts, mesh["tensor"], sequence=layout.sequence)
        if layout.sequence:
            stage.scatter, stage.gather = (
                _tensor.scatter_positions(mesh["tensor"]),
                _tensor.gather_positions(mesh["tensor"]),
            )
    for part in stage.parts:
        if pieces is not None:
            attach_attention(part.module, ContextAttention(pieces, mesh["context"].get_group()))
        if layout.recompute is Recompute.FULL and part.layer:
            # Inside the hooks of FSDP, so that it gathers parameters once for both passes.
            part.module.forward = functools.partial(recompute, part.module.forward, use_reentrant=False)


def _position_buffers(whole: Sequence[ModelPart], parts: Parts) -> tuple[tuple[Any, str], ...]:
    """Return modules and the names of their buffers of positions, for the whole chain, so that all ranks fail alike.

    Raises:
        BadRequest: a checkpoint would contain such a buffer.
    """
    found = {}
    for part in whole:
        saved = part.module.state_dict()
        for name, _ in part.module.named_buffers(remove_duplicate=False):
            full = f"{part.name}.{name}"
            if any(fnmatch.fnmatchcase(full, pattern) for pattern in parts.positions or ()):
                if name in saved:
                    raise BadRequest(
                        f"context parallel splits buffer {full!r}, so a checkpoint would contain only a part of it",
                        hint="register it with persistent=False",
                    )
                path, _, attribute = name.rpartition(".")
                owner = part.module.get_submodule(path)
                found[id(owner), attribute] = owner, attribute  # blocks may share one module
    return tuple(found.values())


def _data_parallel(stage: ModelStage, mesh: DeviceMesh, layout: Layout, device: Any, *, apart: bool) -> Any:
    """Shard or copy the states of one stage; return the module to call. `node_local_checkpoints` is False if parts share a parameter.

    Half precision uses FSDP even on one rank, so that all layouts compute alike: FSDP casts parameters, autocast the inputs of products.
    """
    copies = not has_sharded_states(layout)
    if copies and not _is_half(layout):
        if mesh.size() == 1:
            return stage
        # DDP also copies buffers, which context parallel has split.
        if layout.tensor * layout.pipeline * layout.context == 1:
            ids = [device.index] if device.type == "cuda" else None
            return torch.nn.parallel.DistributedDataParallel(stage, device_ids=ids, process_group=mesh.get_group())
    policy = MixedPrecisionPolicy()
    if _is_half(layout):
        policy = MixedPrecisionPolicy(param_dtype=_PRECISIONS[layout.precision], reduce_dtype=torch.float32)
    if copies:
        wrap = functools.partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.zero == 3)
    # Stage copies such views before they can be modified.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in stage.parts:
        if apart and any(True for _ in part.module.parameters()):
            wrap(part.module)
    wrap(stage)  # the root: it has no parameters of its own, unless parts share them
    return stage


def _in_fp32(loss: Loss) -> Loss:
    """Compute the loss of half-precision outputs in fp32: sums over the vocabulary need the precision."""
    return lambda output, targets: loss(output.float(), targets)


def _is_half(layout: Layout) -> bool:
    return _PRECISIONS[layout.precision] is not torch.float32


def _schedule(computing: Sequence[Any], layout: Layout, mesh: DeviceMesh, loss: Loss, device: Any) -> Any:
    """Return the 1F1B schedule, interleaved if a rank has several stages."""
    group = mesh["pipeline"].get_group()
    place = mesh["pipeline"].get_local_rank()
    total = layout.pipeline * layout.interleave
    stages = [
        PipelineStage(module, place + index * layout.pipeline, total, device, group=group)
        for index, module in enumerate(computing)
    ]
    if layout.interleave > 1:
        return ScheduleInterleaved1F1B(stages, layout.micro_batches, loss_fn=loss)
    return Schedule1F1B(stages[0], layout.micro_batches, loss_fn=loss)
