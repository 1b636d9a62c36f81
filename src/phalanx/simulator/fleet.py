"""The fleet of a simulation: nodes from a CSV (`node, gpu_type, gpus[, vc]`), or a number of equal nodes."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.gpus import GPUS_MAX

GPUS_PER_NODE_MAX: Final = 4096  # more than any server has; bounds a typo
_HEADER: Final = "the header is node,gpu_type,gpus and, for --per-vc, vc"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """A node: its devices, and its virtual cluster in `virtual_cluster` ("" for none)."""

    name: str
    gpus: int
    model: str = ""
    virtual_cluster: str = ""


def equal_nodes(nodes: int, gpus_per_node: int) -> tuple[TraceNode, ...]:
    """Build `nodes` nodes of `gpus_per_node` devices.

    Raises:
        BadRequest: either is below 1, or the total exceeds `GPUS_MAX`.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise BadRequest(f"{nodes} nodes x {gpus_per_node} GPUs is not a fleet", hint="--nodes 80 --gpus-per-node 8")
    if nodes * gpus_per_node > GPUS_MAX:
        raise BadRequest(f"{nodes} nodes x {gpus_per_node} GPUs exceed the limit", hint=f"at most {GPUS_MAX:,} GPUs")
    return tuple(TraceNode(name=f"n{number}", gpus=gpus_per_node) for number in range(nodes))


def read_fleet(lines: Iterable[str], *, name: str = "fleet") -> tuple[TraceNode, ...]:
    """Read nodes in file order; skip nodes without devices.

    Raises:
        BadFile: empty, not CSV, a column is missing, a row is invalid or repeats a node, or no node has a device.
    """
    try:
        reader = csv.reader(list(lines))
        rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except csv.Error as error:
        raise BadFile(f"{name} is not CSV: {error}") from None
    if not rows:
        raise BadFile(f"{name} is empty", hint=_HEADER)
    header = rows[0][1]
    for column in ("node", "gpus"):
        if column not in header:
            raise BadFile(f"{name}: line {rows[0][0]} lacks the column {column}", hint=_HEADER)
    nodes: dict[str, TraceNode] = {}
    for line, cells in rows[1:]:
        node = _node(dict(zip(header, cells, strict=False)), f"{name}: line {line}")
        if node.name in nodes:
            raise BadFile(f"{name}: line {line}: duplicate node {node.name}")
        nodes[node.name] = node
    found = tuple(node for node in nodes.values() if node.gpus)
    if not found:
        raise BadFile(f"{name}: no node has a GPU")
    return found


def _node(row: dict[str, str], where: str) -> TraceNode:
    count = row.get("gpus", "")
    if not row.get("node"):
        raise BadFile(f"{where}: the node has no name")
    if not (count.isascii() and count.isdigit() and int(count) <= GPUS_PER_NODE_MAX):
        raise BadFile(f"{where}: gpus {count!r} is not a number of devices")
    return TraceNode(
        name=row["node"], gpus=int(count), model=row.get("gpu_type", ""), virtual_cluster=row.get("vc", "")
    )
