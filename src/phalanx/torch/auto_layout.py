"""The layout `auto`: plan a layout for the model of the script on the devices of the job.

The shape comes from the declared parts. The devices come from the head or, without a head, from this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from phalanx.core.errors import BadRequest
from phalanx.core.work.gang_topology import GangTopology, gang_topology_from_json
from phalanx.core.work.gpus import GpuRequest
from phalanx.core.work.layouts.layout import Layout
from phalanx.core.work.layouts.layout_split import check_split
from phalanx.planner.cost.machine import Machine
from phalanx.planner.cost.model_shape import ModelShape
from phalanx.planner.facts.coefficient_table import DEFAULT_STACK, find_stack, physics
from phalanx.planner.facts.machines import build_machine
from phalanx.planner.search.layout_search import plan_layouts
from phalanx.planner.search.request import LayoutRequest
from phalanx.torch.assembly import check_supported
from phalanx.torch.parts import (
    COLUMNS,
    ROWS,
    Parts,
    list_parts,
    read_declaration,
    splittable_sizes,
    tensor_role,
)


def plan_layout(
    model: Any, ranks: int, machine: Mapping[str, Any] | None, *, local: int, sequence: int, batch: int
) -> Layout:
    """Return the layout that the planner expects to be the fastest.

    Args:
        model: declares its parts.
        ranks: number of processes.
        machine: value of PHALANX_MACHINE; None without a head.
        local: processes on each node.
        sequence: positions of a sample.
        batch: samples of one step over all ranks.

    Raises:
        BadRequest: information is missing, or no layout fits.
    """
    if not sequence or not batch:
        raise BadRequest(
            "layout auto: the planner needs the length of a sample and the batch",
            hint="call parallelize(sequence=..., batch=...)",
        )
    parts = read_declaration(model)
    gang = gang_topology_from_json(machine) if machine is not None else _local_gang(ranks, local)
    answer = plan_layouts(
        LayoutRequest(
            model=read_shape(model, parts),
            machine=_machine(gang),
            physics=physics(),
            stack=find_stack(DEFAULT_STACK),
            seq=sequence,
            global_batch=batch,
            precision="fp32" if gang.virtual else "bf16",
        ),
        top=_CANDIDATES,
    )
    if not answer.fits:
        raise BadRequest(
            f"layout auto: {answer.reason}", hint="request more devices, or name a layout to try it anyway"
        )
    why = ""
    for judged in answer.layouts:
        layout = judged.layout
        try:
            check_supported(layout, parts, model)
            check_split(layout, splittable_sizes(model, parts, layout, sequence=sequence, batch=batch))
        except BadRequest as refused:
            why = why or f"{layout}: {refused.message}"
        else:
            return layout
    raise BadRequest(
        f"layout auto: none of the {len(answer.layouts)} best layouts can run ({why})", hint="name a layout"
    )


_CANDIDATES: Final = 64
"""Number of layouts to request: more than most jobs have, so that at least one of them can run."""


def read_shape(model: Any, parts: Parts) -> ModelShape:
    """Return the shape of a declared decoder.

    Raises:
        BadRequest: its first layer is not attention and an MLP of Linear layers, each with one "rows" layer at the end.
    """
    layers = [part for part in list_parts(model, parts) if part.layer]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not layers or not tables or not parts.heads:
        raise BadRequest(
            f"layout auto: the parts of {type(model).__name__} do not tell its shape",
            hint="declare a ModuleList of layers and Parts(heads=...), or name a layout",
        )
    first = layers[0]
    roles = {name: tensor_role(parts, f"{first.name}.{name}") for name, _ in first.module.named_modules() if name}
    linear = {name: one for name, one in first.module.named_modules() if isinstance(one, nn.Linear) and roles.get(name)}
    rows = [name for name in linear if roles[name] == ROWS]
    if len(rows) != 2:
        raise BadRequest(
            f'layout auto: {first.name} has {len(rows)} layers that split by "rows", but attention and MLP must have one each',
            hint="name a layout",
        )
    out, down = (linear[name] for name in rows)
    columns = [name for name in linear if roles[name] == COLUMNS]
    into_mlp = [name for name in columns if _next_rows(name, rows, list(linear)) == rows[1]]
    table = max(tables, key=lambda one: one.num_embeddings)
    kv_heads = parts.kv_heads or parts.heads
    return ModelShape(
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


def _next_rows(name: str, rows: list[str], order: list[str]) -> str:
    """Return the next layer that splits by "rows", in the order of definition."""
    after = order[order.index(name) :]
    return next((one for one in after if one in rows), rows[-1])


def _local_gang(ranks: int, local: int) -> GangTopology:
    """Describe the gang by the device of this rank, for a script that was started by hand."""
    cuda = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 0
    return GangTopology(
        gpu=torch.cuda.get_device_name(0) if cuda else "virtual",
        memory_bytes=int(memory),
        virtual=not cuda,
        nodes=max(1, ranks // local),
        gpus_per_node=min(ranks, local),
    )


def _machine(gang: GangTopology) -> Machine:
    name = "virtual" if gang.virtual else gang.gpu.lower()
    request = GpuRequest(
        total=gang.nodes * gang.gpus_per_node, nodes=gang.nodes, per_node=gang.gpus_per_node, model=name
    )
    return build_machine(request, network=gang.network or None)
