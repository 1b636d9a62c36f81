"""The mesh of ranks that a layout asks for: who computes together with whom.

Which rank sits where is the layout's word (`Layout.order`, `Layout.coordinates`): innermost axes hold neighbouring ranks, and Phalanx
numbers ranks so that neighbours are near in the network. So tensor parallel ranks share a node and its NVLink, data parallel and
pipeline ranks may lie far apart. The names of the mesh are those of the layout's axes, always all five and always in the same order.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.work.layout import Axis, Layout

NAMES: Final = (Axis.PIPELINE, Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT, Axis.TENSOR)
"""Outermost first. Fixed, because torch wants the dimensions of a nested split in the order in which they were made."""


def rank_table(layout: Layout) -> torch.Tensor:
    """Rank numbers by (pipeline, replicate, shard, context, tensor)."""
    table = torch.empty([layout.size(axis) for axis in NAMES], dtype=torch.int)
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        table[tuple(place[axis] for axis in NAMES)] = rank
    return table


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh over all ranks of the job. Collective: it makes the process groups of every axis, once for each split of the ranks."""
    table = rank_table(layout)
    key = (id(dist.group.WORLD), device_type, tuple(table.shape), tuple(table.flatten().tolist()))
    if key not in _made:
        _made[key] = DeviceMesh(device_type, table, mesh_dim_names=tuple(axis.value for axis in NAMES))
    return _made[key]


_made: dict[tuple[object, ...], DeviceMesh] = {}
"""Process groups are a scarce good: each costs sockets, or memory on the device. One set serves every model of the process."""


def data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The ranks that hold the same layers and exchange gradients, as FSDP2 takes them. Collective.

    Context parallel ranks see other tokens of the same samples: to gradients they are data parallel ranks, and states are sharded over
    them too.

    Returns:
        One dimension (`states`: sharded; or `copies`: all replicas) or two (replicate, states).
    """
    if not sharded(layout):
        return mesh["replicate", "shard", "context"]._flatten("copies")  # noqa: SLF001 - torch has no public name for it
    if layout.context > 1:
        mesh["shard", "context"]._flatten("states")  # noqa: SLF001
        inner = "states"
    else:
        inner = "shard"
    return mesh["replicate", inner] if layout.replicate > 1 else mesh[inner]


def sharded(layout: Layout) -> bool:
    """Whether data parallel ranks hold shards of the states; else each holds all."""
    return layout.zero > 0 and layout.shard > 1


def crossing(layout: Layout, *, local_world_size: int) -> str:
    """What to say of a tensor group that lies on two nodes: the most talkative axis over the slowest links. Empty if none does."""
    span = layout.tensor * layout.stride(Axis.TENSOR)
    if layout.tensor == 1 or (span <= local_world_size and local_world_size % span == 0):
        return ""
    return f"tensor parallel over {layout.tensor} ranks crosses nodes of {local_world_size} ranks; a tp that divides them is faster"
