"""Parse Ray's output: the rows of `ray.nodes()`, and error messages. Pure, tested by golden files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from phalanx.core.ids import NodeId
from phalanx.core.jsonline import finite_float
from phalanx.engines.ray.protocol import RayNode

LABEL_NODE: Final = "phalanx-node"
LABEL_VIRTUAL: Final = "phalanx-virtual"
LABEL_STARTED: Final = "phalanx-started"  # Unix time in ms: tells a node that was started again from the one before it
MISMATCH: Final = "Version mismatch"  # Ray's message for different versions of Ray or Python
_NAME_MAX: Final = 63


def parse_nodes(rows: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """Return the live Ray nodes, and the dead ones whose name no live one has; by name.

    A node that we started has labels with its name, its start and its number of virtual devices; any other takes its host's name. Ray
    takes seconds to notice a death: of ours that it lists as live under one name, only the last started is. If two live Ray nodes of
    others have one name (a Ray cluster may have several on a host), the one with the larger Ray id gets the beginning of that id as a suffix.
    """
    alive: list[RayNode] = []
    dead: list[RayNode] = []
    ordered = sorted(rows, key=lambda row: str(row["NodeID"]))
    replaced = _replaced(ordered)
    for row in ordered:
        if str(row["NodeID"]) not in replaced:
            (alive if row.get("Alive") else dead).append(_node(row))
    named: dict[NodeId, RayNode] = {}
    for node in alive:
        if node.node_id in named:
            other = NodeId(f"{node.node_id[: _NAME_MAX - 7]}-{node.ray_id[:6]}")
            named[other] = msgspec.structs.replace(node, node_id=other)
        else:
            named[node.node_id] = node
    for node in dead:
        named.setdefault(node.node_id, node)
    return [named[name] for name in sorted(named)]


def _replaced(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the Ray ids of nodes listed as live that we have started again since."""
    last: dict[str, tuple[int, str]] = {}
    replaced = set()
    for row in rows:
        labels: Mapping[str, str] = row.get("Labels") or {}
        name, started = labels.get(LABEL_NODE), labels.get(LABEL_STARTED, "")
        if not row.get("Alive") or not name or not started.isdecimal():
            continue
        this = (int(started), str(row["NodeID"]))
        before = last.get(name)
        if before is not None:
            replaced.add(min(before, this)[1])
        last[name] = this if before is None else max(before, this)
    return replaced


def error_line(text: str) -> str:
    """Shorten an error of Ray to one line: its last, or for a version mismatch all of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith(MISMATCH) for line in lines):
        return " ".join(lines).replace(": Ray:", " Ray").replace(" Ray:", " Ray").replace(" Python:", ", Python")[:400]
    return lines[-1][:300] if lines else ""


def _node(row: Mapping[str, Any]) -> RayNode:
    labels: Mapping[str, str] = row.get("Labels") or {}
    resources: Mapping[str, float] = row.get("Resources") or {}
    address = str(row.get("NodeManagerAddress", ""))
    name = labels.get(LABEL_NODE) or str(row.get("NodeManagerHostname") or "").split(".")[0] or address
    virtual = labels.get(LABEL_VIRTUAL, "")
    return RayNode(
        node_id=NodeId(_valid_name(name)),
        ray_id=str(row["NodeID"]),
        address=address,
        alive=bool(row.get("Alive")),
        gpus=finite_float(resources.get("GPU")) or 0.0,
        virtual_devices=int(virtual) if virtual.isdecimal() else None,
        why="" if row.get("Alive") else str(row.get("DeathReasonMessage") or "Ray gives no reason"),
    )


def _valid_name(name: str) -> str:
    """Return a valid node name: other characters become dashes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:_NAME_MAX] or "node"
