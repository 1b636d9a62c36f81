"""`auto`: the planner's layout for the model that the script has built, on the devices that the job was given.

The shape is read off the declared parts, the devices are those the head named or, without a head, those this rank sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.layouts.asked import Asked
from phalanx.core.layouts.plan import plan
from phalanx.core.performance.machine import Machine
from phalanx.core.performance.model import Model
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.layout import Layout
from phalanx.core.work.split import check_split
from phalanx.core.work.surroundings import Surroundings, surroundings_from_json
from phalanx.facts.coefficients import DEFAULT_STACK, physics, stack_named
from phalanx.facts.machines import machine_for
from phalanx.torch.assembly import check_kinds
from phalanx.torch.parts import COLUMNS, ROWS, Parts, chain, declared, role, splittable


def choose(
    model: Any, ranks: int, machine: Mapping[str, Any] | None, *, local: int, sequence: int, batch: int
) -> Layout:
    """The fastest layout that fits, as the planner judges it.

    Args:
        model: declares its parts.
        ranks: processes there are.
        machine: what PHALANX_MACHINE holds; None without a head.
        local: processes on each node.
        sequence: positions of a sample.
        batch: samples of one step over all ranks.

    Raises:
        BadRequest: the planner cannot know enough, or nothing fits.
    """
    if not sequence or not batch:
        raise BadRequest(
            "layout auto: the planner must know the length of a sample and the batch",
            hint="give parallelize(sequence=..., batch=...)",
        )
    parts = declared(model)
    there = surroundings_from_json(machine) if machine is not None else _seen(ranks, local)
    answer = plan(
        Asked(
            model=shape_of(model, parts),
            machine=_machine(there),
            physics=physics(),
            stack=stack_named(DEFAULT_STACK),
            seq=sequence,
            global_batch=batch,
            precision="fp32" if there.virtual else "bf16",
        ),
        top=_LOOKED_AT,
    )
    if not answer.fits:
        raise BadRequest(
            f"layout auto: {answer.reason}", hint="ask for more devices, or name a layout to try it anyway"
        )
    why = ""
    for judged in answer.layouts:
        layout = judged.layout
        try:
            check_kinds(layout, parts, model)
            check_split(layout, splittable(model, parts, layout, sequence=sequence, batch=batch))
        except BadRequest as refused:
            why = why or f"{layout}: {refused.message}"
        else:
            return layout
    raise BadRequest(f"layout auto: none of the {len(answer.layouts)} best can be run ({why})", hint="name a layout")


_LOOKED_AT: Final = 64
"""Ways to split that are asked for: more than there are for the ranks of most jobs, so that one that can be run is among them."""


def shape_of(model: Any, parts: Parts) -> Model:
    """The shape of a declared decoder.

    Raises:
        BadRequest: its first layer is not attention and an MLP of Linear layers in which each split ends in "rows".
    """
    layers = [part for part in chain(model, parts) if part.layer]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not layers or not tables or not parts.heads:
        raise BadRequest(
            f"layout auto: the shape of {type(model).__name__} cannot be read off its parts",
            hint="declare a ModuleList of layers and Parts(heads=...), or name a layout",
        )
    first = layers[0]
    roles = {name: role(parts, f"{first.name}.{name}") for name, _ in first.module.named_modules() if name}
    linear = {name: one for name, one in first.module.named_modules() if isinstance(one, nn.Linear) and roles.get(name)}
    rows = [name for name in linear if roles[name] == ROWS]
    if len(rows) != 2:
        raise BadRequest(
            f'layout auto: {first.name} has {len(rows)} layers that split by "rows", and attention and MLP have one each',
            hint="name a layout",
        )
    out, down = (linear[name] for name in rows)
    columns = [name for name in linear if roles[name] == COLUMNS]
    into_mlp = [name for name in columns if _last_before(name, rows, list(linear)) == rows[1]]
    table = max(tables, key=lambda one: one.num_embeddings)
    kv_heads = parts.kv_heads or parts.heads
    return Model(
        name=type(model).__name__,
        layers=len(layers),
        hidden=int(out.out_features),
        heads=parts.heads,
        kv_heads=kv_heads,
        head_dim=int(out.in_features) // parts.heads,
        ffn=int(down.in_features),
        vocab=int(table.num_embeddings),
        gated=len(into_mlp) == 2,
        tied=len({id(weight) for weight in model.parameters()})
        < sum(1 for _ in model.named_parameters(remove_duplicate=False)),
        biases=out.bias is not None,
    )


def _last_before(name: str, rows: list[str], order: list[str]) -> str:
    """The split that the layer leads to: the next "rows" in the order of definition."""
    after = order[order.index(name) :]
    return next((one for one in after if one in rows), rows[-1])


def _seen(ranks: int, local: int) -> Surroundings:
    """This rank's own device, for a script that was started by hand."""
    cuda = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 0
    return Surroundings(
        gpu=torch.cuda.get_device_name(0) if cuda else "virtual",
        memory_bytes=int(memory),
        virtual=not cuda,
        nodes=max(1, ranks // local),
        gpus_per_node=min(ranks, local),
    )


def _machine(there: Surroundings) -> Machine:
    name = "virtual" if there.virtual else there.gpu.lower()
    request = GpuRequest(
        total=there.nodes * there.gpus_per_node, nodes=there.nodes, per_node=there.gpus_per_node, model=name
    )
    return machine_for(request, network=there.network or None)
