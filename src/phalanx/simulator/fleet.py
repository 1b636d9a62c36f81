"""The fleet of a simulation: nodes from a CSV (`node, gpu_type, gpus[, vc]`), or so many equal ones."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.core.errors import BadFile, BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimNode:
    """A node: its devices, and the virtual cluster it belongs to ("" for none)."""

    name: str
    gpus: int
    model: str = ""
    label: str = ""


def equal_nodes(nodes: int, gpus_per_node: int) -> tuple[SimNode, ...]:
    """`nodes` nodes of `gpus_per_node` devices.

    Raises:
        BadRequest: either is below 1.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise BadRequest(f"{nodes} nodes x {gpus_per_node} GPUs is no fleet", hint="--nodes 80 --gpus-per-node 8")
    return tuple(SimNode(name=f"n{number}", gpus=gpus_per_node) for number in range(nodes))


def read_fleet(lines: Iterable[str], *, name: str = "fleet") -> tuple[SimNode, ...]:
    """Nodes in file order. Nodes without devices are left out: nothing here runs on them.

    Raises:
        BadFile: a column is missing, a row is no node, or no node has a device.
    """
    reader = csv.reader(list(lines))
    header = [cell.strip() for cell in next(reader, [])]
    for column in ("node", "gpus"):
        if column not in header:
            raise BadFile(
                f"{name}: line 1 lacks the column {column}",
                hint="the header is node,gpu_type,gpus and, for --per-vc, vc",
            )
    nodes: list[SimNode] = []
    for cells in reader:
        if not cells:
            continue
        row = dict(zip(header, (cell.strip() for cell in cells), strict=False))
        count = row.get("gpus", "")
        if not row.get("node") or not count.isdigit():
            raise BadFile(f"{name}: line {reader.line_num}: gpus {count!r} is not a number of devices" if row.get("node") else
                          f"{name}: line {reader.line_num}: the node has no name")  # fmt: skip
        if int(count):
            nodes.append(
                SimNode(name=row["node"], gpus=int(count), model=row.get("gpu_type", ""), label=row.get("vc", ""))
            )
    if not nodes:
        raise BadFile(f"{name}: no node has a GPU")
    return tuple(nodes)
