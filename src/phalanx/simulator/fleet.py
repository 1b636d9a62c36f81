"""The fleet of a simulation: nodes from a CSV (`node, gpu_type, gpus[, vc]`), or a number of equal nodes."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadFile, BadRequest
from phalanx.core.work.gpus import GPUS_MAX

GPUS_PER_NODE_MAX: Final = 4096  # more than any server has; bounds a typo
_PART: Final = re.compile(r"(?P<nodes>[0-9]{1,7})x(?P<model>[a-z][a-z0-9_.-]*):(?P<gpus>[0-9]{1,7})")
_DIGITS_MAX: Final = 15
_HEADER: Final = "the header is node,gpu_type,gpus and, for --per-vc, vc"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """A node: its devices, its virtual cluster in `virtual_cluster` ("" for none), and CPUs and memory where the inventory says (else 0)."""

    name: str
    gpus: int
    model: str = ""
    virtual_cluster: str = ""
    cpu_milli: int = 0
    memory_mib: int = 0


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


def parse_fleet(text: str) -> tuple[TraceNode, ...] | None:
    """Build the fleet that `8xv100:1,16xp100:1` states: nodes x model : devices of each. None if the text is not of that form.

    Raises:
        BadRequest: it has too many devices.
    """
    nodes: list[TraceNode] = []
    for number, part in enumerate(text.split(",")):
        match = _PART.fullmatch(part.strip().lower())
        if match is None:
            return None
        count, each = int(match["nodes"]), int(match["gpus"])
        nodes += (
            TraceNode(name=f"{match['model']}-{number}-{node}", gpus=node_gpus.gpus, model=match["model"])
            for node, node_gpus in enumerate(equal_nodes(count, each))
        )
    if sum(node.gpus for node in nodes) > GPUS_MAX:
        raise BadRequest(f"--fleet {text} exceeds the limit", hint=f"at most {GPUS_MAX:,} GPUs")
    return tuple(nodes)


def read_fleet(lines: Iterable[str], *, name: str = "fleet", cpu_nodes: bool = False) -> tuple[TraceNode, ...]:
    """Read nodes in file order; skip nodes without devices, unless `cpu_nodes`.

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
    found = tuple(node for node in nodes.values() if node.gpus or cpu_nodes)
    if not any(node.gpus for node in found):
        raise BadFile(f"{name}: no node has a GPU")
    return found


def _node(row: dict[str, str], where: str) -> TraceNode:
    count = row.get("gpus", "")
    if not row.get("node"):
        raise BadFile(f"{where}: the node has no name")
    if not (count.isascii() and count.isdigit() and int(count) <= GPUS_PER_NODE_MAX):
        raise BadFile(f"{where}: gpus {count!r} is not a number of devices")
    for column in ("cpu_milli", "memory_mib"):
        value = row.get(column) or "0"
        if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX):
            raise BadFile(f"{where}: {column} {value!r} is not a number")
    return TraceNode(
        name=row["node"],
        gpus=int(count),
        model=row.get("gpu_type", ""),
        virtual_cluster=row.get("vc", ""),
        cpu_milli=int(row.get("cpu_milli") or 0),
        memory_mib=int(row.get("memory_mib") or 0),
    )
