"""From a whole model and a layout to what this rank computes of it.

In this order, each upon the one before: cut the chain into stages (pipeline), split layers (tensor, sequence), let attention look
across (context), compute blocks again in the backward pass (recompute), shard or copy the states (data parallel), schedule.
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
from torch.utils.checkpoint import checkpoint as compute_again

from phalanx.core.errors import BadRequest
from phalanx.core.work.layout import Axis, Layout, Recompute
from phalanx.core.work.split import check_split
from phalanx.torch import stage as _stages
from phalanx.torch import tensor as _tensor
from phalanx.torch.context import ContextAttention, Pieces, look_across
from phalanx.torch.device_mesh import build_mesh, data_mesh, sharded
from phalanx.torch.parts import Part, Parts, chain, declared, splittable, tied
from phalanx.torch.stage import Stage
from phalanx.torch.training import Loss, Recipe, Training

_PRECISIONS: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}


def assemble(model: Any, layout: Layout, recipe: Recipe, *, device: Any) -> Training:
    """See `phalanx.torch.parallelize`. Collective."""
    parts = declared(model)
    check_split(layout, splittable(model, parts, layout, sequence=recipe.sequence, batch=recipe.batch))
    check_kinds(layout, parts, model)
    whole = chain(model, parts)
    _check_equal(model, device)
    _check_parts(whole, parts, layout, initialize=recipe.initialize)
    positions = _position_buffers(whole, parts) if layout.context > 1 else ()
    mesh = build_mesh(layout, device.type)
    place = layout.coordinates(dist.get_rank())
    held = _stages.stages(whole, layout, place[Axis.PIPELINE])
    one_parameter = tied(model)
    _materialise(whole, held, device=device, initialize=recipe.initialize, seed=recipe.seed)
    _tie(model, one_parameter)
    pieces = Pieces(layout.context, place[Axis.CONTEXT]) if layout.context > 1 else None
    for stage in held:
        _split(stage, parts, mesh, layout, pieces)
    shared_states = data_mesh(mesh, layout)
    computing = [_data_parallel(stage, shared_states, layout, device, apart=not one_parameter) for stage in held]
    joined = _stages.hold(held)
    full_loss = _in_full(recipe.loss) if _half(layout) else recipe.loss
    return Training(
        layout=layout,
        mesh=mesh,
        model=joined,
        optimizer=recipe.optimizer(joined),
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


def check_kinds(layout: Layout, parts: Parts, model: Any) -> None:
    """Refuse what no code here does, before anything is built.

    Raises:
        BadRequest: with the layout's word that must change.
    """
    if layout.precision not in _PRECISIONS:
        raise BadRequest(
            f"precision={layout.precision} is not run by phalanx.torch", hint="choose precision=bf16 or precision=fp32"
        )
    if layout.expert > 1:
        raise BadRequest("expert parallel is not run by phalanx.torch yet", hint="choose a layout with ep=1")
    if layout.context > 1 and parts.positions is None:
        raise BadRequest(
            f"context parallel: {type(model).__name__} does not say which buffers hold positions",
            hint="declare Parts(positions=...), an empty tuple if it has none",
        )
    if layout.tensor > 1 and not parts.tensor:
        raise BadRequest(
            f"tp={layout.tensor}: {type(model).__name__} does not say how its layers split",
            hint="declare Parts(tensor=...)",
        )
    if (pairs := tied(model)) and (layout.tensor > 1 or layout.pipeline > 1):
        one, other = pairs[0]
        raise BadRequest(
            f"{one} and {other} are one parameter, which tensor and pipeline parallel cannot keep together",
            hint="untie them, or choose a layout with tp=1 and pp=1",
        )


def _check_parts(
    whole: Sequence[Part], parts: Parts, layout: Layout, *, initialize: Callable[[Any], None] | None
) -> None:
    """Refuse on every rank what one stage of a pipeline cannot do: its ranks alone would refuse while the others wait for them.

    Raises:
        BadRequest: a part is on the meta device and there is no `initialize`, or no rule says how ranks share a parameter.
    """
    for part in whole:
        if initialize is None and _on_meta(part):
            raise BadRequest(
                f"part {part.name!r} is on the meta device, and nothing says how to initialize it",
                hint="give parallelize(initialize=function of a part)",
            )
        if layout.tensor > 1:
            _tensor.styles(part, parts, sequence=layout.sequence)


def _check_equal(model: Any, device: Any) -> None:
    """Compare the parameters of all ranks: each keeps its share of its own copy, so the copies must be equal.

    Raises:
        BadRequest: they are not.
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
    if most_names != -least_names or most + least > _ALIKE * most:
        raise BadRequest(
            "the ranks built different models", hint="call torch.manual_seed with the same number before you build it"
        )


_ALIKE: Final = 1e-8
"""Relative; two kinds of CPU may differ in the last bit of a random number (6e-8 of it, either way), and by the root of their count less
in the sum. Other seeds differ by more than this up to 1e15 parameters."""


def _materialise(
    whole: Sequence[Part], held: Sequence[Stage], *, device: Any, initialize: Callable[[Any], None] | None, seed: int
) -> None:
    """Move this rank's parts to its device and free the others. Parts built on the meta device are initialized here.

    A part's values depend on the seed and its place in the chain, not on the layout. One part at a time is whole in memory.
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


def _on_meta(part: Part) -> bool:
    return any(parameter.is_meta for parameter in part.module.parameters())


def _tie(model: Any, pairs: Sequence[tuple[str, str]]) -> None:
    """Make each pair one parameter again: a module that leaves the meta device gets parameters of its own. In place."""
    for one, other in pairs:
        owner, _, attribute = other.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(one))


def _split(stage: Stage, parts: Parts, mesh: DeviceMesh, layout: Layout, pieces: Pieces | None) -> None:
    """Tensor, sequence and context parallel, and recomputation, part by part."""
    if layout.tensor > 1:
        for part in stage.parts:
            _tensor.split_part(part, parts, mesh["tensor"], sequence=layout.sequence)
        if layout.sequence:
            stage.scatter, stage.gather = _tensor.scatter(mesh["tensor"]), _tensor.gather(mesh["tensor"])
    for part in stage.parts:
        if pieces is not None:
            look_across(part.module, ContextAttention(pieces, mesh["context"].get_group()))
        if layout.recompute is Recompute.FULL and part.layer:
            # Inside the hooks of FSDP, so that parameters are gathered once for both passes.
            part.module.forward = functools.partial(compute_again, part.module.forward, use_reentrant=False)


def _position_buffers(whole: Sequence[Part], parts: Parts) -> tuple[tuple[Any, str], ...]:
    """Modules and the names of their buffers that hold positions. Of the whole chain, so that all ranks refuse alike.

    Raises:
        BadRequest: a checkpoint would hold such a buffer.
    """
    found = {}
    for part in whole:
        saved = part.module.state_dict()
        for name, _ in part.module.named_buffers(remove_duplicate=False):
            full = f"{part.name}.{name}"
            if any(fnmatch.fnmatchcase(full, pattern) for pattern in parts.positions or ()):
                if name in saved:
                    raise BadRequest(
                        f"buffer {full!r} is cut by context parallel and would be saved cut",
                        hint="register it with persistent=False",
                    )
                path, _, attribute = name.rpartition(".")
                owner = part.module.get_submodule(path)
                found[id(owner), attribute] = owner, attribute  # blocks may share one module
    return tuple(found.values())


def _data_parallel(stage: Stage, mesh: DeviceMesh, layout: Layout, device: Any, *, apart: bool) -> Any:
    """Shard or copy the states of one stage; what is called to compute it. `apart` is False where parts share a parameter.

    Half precision goes through FSDP's machinery even on one rank: it casts parameters, where autocast would cast every product's inputs,
    and all layouts are to compute alike.
    """
    copies = not sharded(layout)
    if copies and not _half(layout):
        if mesh.size() == 1:
            return stage
        # DDP also copies buffers, which context parallel has cut.
        if layout.tensor * layout.pipeline * layout.context == 1:
            ids = [device.index] if device.type == "cuda" else None
            return torch.nn.parallel.DistributedDataParallel(stage, device_ids=ids, process_group=mesh.get_group())
    policy = MixedPrecisionPolicy()
    if _half(layout):
        policy = MixedPrecisionPolicy(param_dtype=_PRECISIONS[layout.precision], reduce_dtype=torch.float32)
    if copies:
        wrap = functools.partial(replicate, mesh=mesh, mp_policy=policy)
    else:
        wrap = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.zero == 3)
    # Stage copies such views before anything could be written into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for part in stage.parts:
        if apart and any(True for _ in part.module.parameters()):
            wrap(part.module)
    wrap(stage)  # the root: it holds no parameters of its own, unless parts share them
    return stage


def _in_full(loss: Loss) -> Loss:
    """The loss of what half precision gave, itself in full: its sums over the vocabulary need the digits."""
    return lambda output, targets: loss(output.float(), targets)


def _half(layout: Layout) -> bool:
    return _PRECISIONS[layout.precision] is not torch.float32


def _schedule(computing: Sequence[Any], layout: Layout, mesh: DeviceMesh, loss: Loss, device: Any) -> Any:
    """1F1B, interleaved if a rank has several stages."""
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
