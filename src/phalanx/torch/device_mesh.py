"""The mesh of ranks for a layout.

The layout determines the place of each rank (`Layout.order`, `Layout.coordinates`): ranks along innermost axes are neighbours, and Phalanx
numbers ranks so that neighbours are near in the network. So tensor parallel ranks share a node and its NVLink, while data parallel and
pipeline ranks may be far apart. The mesh always has the names of all five axes in the same order.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from phalanx.core.work.layouts.layout import Axis, Layout

MESH_AXES: Final = (Axis.PIPELINE, Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT, Axis.TENSOR)
"""Outermost first. Fixed, because torch requires the dimensions of a nested split in the order of their creation."""


def rank_table(layout: Layout) -> torch.Tensor:
    """Return the rank numbers by (pipeline, replicate, shard, context, tensor)."""
    table = torch.empty([layout.size(axis) for axis in MESH_AXES], dtype=torch.int)
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        table[tuple(place[axis] for axis in MESH_AXES)] = rank
    return table


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the mesh over all ranks of the job. Collective: creates the process groups of all axes, once for each rank table."""
    table = rank_table(layout)
    key = (id(dist.group.WORLD), device_type, tuple(table.shape), tuple(table.flatten().tolist()))
    if key not in _meshes:
        _meshes[key] = DeviceMesh(device_type, table, mesh_dim_names=tuple(axis.value for axis in MESH_AXES))
    return _meshes[key]


_meshes: dict[tuple[object, ...], DeviceMesh] = {}
"""Cache: each process group needs sockets, or memory on the device. All models of the process share one set."""


def data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the ranks that have the same layers and exchange gradients, as a mesh for FSDP2. Collective.

    Context parallel ranks process other tokens of the same samples: for gradients they are data parallel ranks, and states are sharded
    over them too.

    Returns:
        One dimension (`states`: sharded; or `copies`: all replicas) or two (replicate, states).
    """
    if not has_sharded_states(layout):
        return mesh["replicate", "shard", "context"]._flatten("copies")  # noqa: SLF001 - torch has no public name for it
    if layout.context > 1:
        mesh["shard", "context"]._flatten("states")  # noqa: SLF001
        inner = "states"
    else:
        inner = "shard"
    return mesh["replicate", inner] if layout.replicate > 1 else mesh[inner]


def has_sharded_states(layout: Layout) -> bool:
    """Return whether data parallel ranks have shards of the states; otherwise each has all states."""
    return layout.zero > 0 and layout.shard > 1


def crossing_warning(layout: Layout, *, local_world_size: int) -> str:
    """Return a warning if a tensor group spans two nodes, which puts the most communication on the slowest links; else empty."""
    span = layout.tensor * layout.stride(Axis.TENSOR)
    if layout.tensor == 1 or (span <= local_world_size and local_world_size % span == 0):
        return ""
    return f"tensor parallel over {layout.tensor} ranks spans nodes of {local_world_size} ranks; a tp that divides {local_world_size} is faster"
