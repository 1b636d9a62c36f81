"""What a job asks in GPUs: one grammar wherever GPUs are named (DESIGN 4).

    [NODESx][MODEL[-MEM|:MEM]:]COUNT      8   2x8   h200:8   a100-80gb:8   H100:80GB:8   4xh200:8

With NODES, COUNT is per node; without, it is the job's total and Phalanx picks the shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from phalanx.core.errors import BadRequest

_GRAMMAR: Final = re.compile(
    r"(?:(?P<nodes>[0-9]{1,9})x)?(?:(?P<model>[a-z][a-z0-9_.]*(?:-[a-z0-9_.]+)*?)(?:[-:](?P<memory>[0-9]{1,6})\s*g(?:i?b)?)?:)?"
    r"(?P<count>[0-9]{1,9})",
)
_HINT: Final = "write 8, 2x8, h200:8, a100-80gb:8 or 4xh200:8"
GPUS_MAX: Final = 1_000_000  # past any fleet; bounds a typo
_TEXT_MAX: Final = 120  # characters; the longest model name known has 40


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """GPUs asked for. Either `nodes` and `per_node` are both set (a fixed shape), or only `total` counts.

    Attributes:
        total: of the whole job; 0 for a job on CPUs alone.
        model: lower case, as in the fleet ("h200"); None for any.
        memory_gib: at least this much per GPU; None for any.
        or_models: models taken when `model` cannot be had, in order of preference. A gang is of one model throughout.
        nodes_max: elastic: from `nodes` up to so many nodes, as there is room; None for a fixed number. `total` counts the fewest.
        uneven: whole nodes and the remainder on one more, instead of equal parts; only where the shape is not fixed.
    """

    total: int
    nodes: int | None = None
    per_node: int | None = None
    model: str | None = None
    memory_gib: int | None = None
    or_models: tuple[str, ...] = ()
    nodes_max: int | None = None
    uneven: bool = False

    def __str__(self) -> str:
        kind = (
            ""
            if self.model is None
            else self.model + ("" if self.memory_gib is None else f"-{self.memory_gib}gb") + ":"
        )
        return f"{kind}{self.total}" if self.nodes is None else f"{self.nodes}x{kind}{self.per_node}"


def parse_gpus(text: object) -> GpuRequest:
    """The request that `text` states.

    Raises:
        BadRequest: outside the grammar, or zero nodes.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise BadRequest(f"gpus: {text!r} is not a number of GPUs", hint=_HINT)
    if isinstance(text, int) and not 0 <= text <= GPUS_MAX:
        raise BadRequest(
            f"gpus: {'a negative number' if text < 0 else f'more than {GPUS_MAX}'} cannot be asked for", hint=_HINT
        )
    words = str(text).strip().lower()
    match = _GRAMMAR.fullmatch(words) if len(words) <= _TEXT_MAX else None
    if match is None:
        raise BadRequest(f"gpus: {words[:_TEXT_MAX]!r} is not a number of GPUs", hint=_HINT)
    nodes, count = match["nodes"], int(match["count"])
    memory = int(match["memory"]) if match["memory"] else None
    total = count * (int(nodes) if nodes else 1)
    if nodes is not None and (int(nodes) == 0 or count == 0):
        raise BadRequest(f"gpus: {text!r} asks for nothing", hint=_HINT)
    if total > GPUS_MAX:
        raise BadRequest(f"gpus: {text!r} is more than any fleet has")
    return GpuRequest(
        total=total, nodes=int(nodes) if nodes else None, per_node=count if nodes else None, model=match["model"], memory_gib=memory,
    )  # fmt: skip


def combine(gpus: GpuRequest | None, nodes: int | None, gpus_per_node: int | None) -> GpuRequest:
    """One request from `--gpus`, `--nodes` and `--gpus-per-node`; none of them means no GPU on one node.

    Raises:
        BadRequest: they contradict each other or do not divide.
    """
    for name, value in (("nodes", nodes), ("gpus-per-node", gpus_per_node)):
        if value is not None and value < (1 if name == "nodes" else 0):
            raise BadRequest(f"{name}: {value} is too small")
    if gpus is None:
        per_node = gpus_per_node or 0
        if nodes is None and gpus_per_node is None:
            return GpuRequest(total=0)
        return GpuRequest(total=(nodes or 1) * per_node, nodes=nodes or 1, per_node=per_node)
    if gpus.nodes is not None:
        if nodes not in (None, gpus.nodes) or gpus_per_node not in (None, gpus.per_node):
            raise BadRequest(f"gpus {gpus} contradicts {_stated(nodes, gpus_per_node)}", hint="give one of the two")
        return gpus
    if nodes is None and gpus_per_node is None:
        return gpus
    if nodes is None and gpus_per_node:
        nodes, rest = divmod(gpus.total, gpus_per_node)
        if rest or nodes == 0:
            raise BadRequest(f"{gpus.total} GPUs do not divide into nodes of {gpus_per_node}")
    per_node, rest = divmod(gpus.total, nodes or 1)
    if rest:
        raise BadRequest(
            f"{gpus.total} GPUs do not divide over {nodes} nodes",
            hint=f"ask for {per_node * (nodes or 1)} or {(per_node + 1) * (nodes or 1)}",
        )
    if gpus_per_node not in (None, per_node):
        raise BadRequest(
            f"{gpus.total} GPUs on {nodes} nodes are {per_node} a node, not {gpus_per_node}",
            hint="--gpus is the job's total",
        )
    return GpuRequest(total=gpus.total, nodes=nodes, per_node=per_node, model=gpus.model, memory_gib=gpus.memory_gib)


def _stated(nodes: int | None, gpus_per_node: int | None) -> str:
    given = {"nodes": nodes, "gpus-per-node": gpus_per_node}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
