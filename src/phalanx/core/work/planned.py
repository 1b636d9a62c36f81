"""The key `plan` of a job: how its model is split. `auto` leaves it to the script's model, a layout fixes it and with it the ranks.

Read where a mapping becomes a spec, on the command line and at the head alike; told where a submit is answered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import GPUS_MAX, GpuRequest
from phalanx.core.work.keys import BadKey
from phalanx.core.work.layout import Axis, Layout, parse_layout
from phalanx.core.work.spec import Launch, Role

AUTO: Final = "auto"
_HINT: Final = "write auto, or a layout as tp=2,pp=2,fsdp=4"


def read_plan(value: object) -> str:
    """The plan as a spec holds it: "", "auto", or a layout as `layout_text` writes it.

    Raises:
        BadKey: neither; a file and a mapping are read by the command line and never come so far.
    """
    if not isinstance(value, str):
        raise BadKey("plan: a mapping is planned by `phalanx submit`, before the head is asked", key="plan", hint=_HINT)
    words = value.strip().lower()
    if words in {"", AUTO}:
        return words
    if "=" not in words and words != "single":
        raise BadKey(f"plan: {value.strip()[:60]!r} is neither auto nor a layout", key="plan", hint=_HINT)
    try:
        return layout_text(parse_layout(words))
    except BadRequest as error:
        raise BadKey(f"plan: {error.message}", key="plan", hint=error.hint) from None


def layout_text(layout: Layout) -> str:
    """The layout in words that `parse_layout` reads back whole: `zero` is said where it is not what `fsdp` is taken to mean."""
    usual = layout.zero == 3 if layout.shard > 1 else layout.zero != 3
    return str(layout) if usual or layout.zero in {1, 2} else f"{layout},zero={layout.zero}"


def layout_of(plan: str) -> Layout | None:
    """The layout that a spec's plan fixes; None for "" and "auto"."""
    return None if plan in {"", AUTO} else parse_layout(plan)


def ranks_of(role: Role) -> int | None:
    """How many ranks the role has, where that follows from what was asked: as `launchers` starts them, or a launcher does."""
    request = role.gpus
    if role.launch is Launch.FIXED:
        nodes = request.nodes if request.nodes is not None else (1 if request.total <= 1 else None)
        return None if nodes is None else nodes * (role.tasks_per_node or 1)
    return request.total or None


def fitted(role: Role, plan: str) -> Role:
    """The role with as many GPUs as the layout has ranks, where it asks for none; else as it was.

    Raises:
        BadRequest: it asks for another number.
    """
    layout = layout_of(plan)
    if layout is None:
        return role
    ranks = ranks_of(role)
    if ranks is None:
        return role if role.launch is Launch.FIXED else replace(role, gpus=_as_many(role.gpus, layout))
    if ranks != layout.ranks:
        asked = "tasks" if role.launch is Launch.FIXED else "GPUs"
        raise BadRequest(
            f"plan {layout} is for {layout.ranks} ranks, and {ranks} {asked} are asked for",
            hint=_mended(layout, ranks, asked),
        )
    return role


def tensor_span(layout: Layout) -> int:
    """Ranks in a row, within which every group of tensor ranks lies whole."""
    return layout.stride(Axis.TENSOR) * layout.tensor


def _as_many(asked: GpuRequest, layout: Layout) -> GpuRequest:
    if layout.ranks > GPUS_MAX:
        raise BadRequest(f"plan {layout}: {layout.ranks} GPUs are more than any fleet has")
    if asked.nodes is None or asked.nodes_max is not None:
        return replace(asked, total=layout.ranks, nodes=None, per_node=None, nodes_max=None)
    per_node, rest = divmod(layout.ranks, asked.nodes)
    if rest:
        raise BadRequest(f"plan {layout} is for {layout.ranks} ranks, which do not divide over {asked.nodes} nodes")
    return replace(asked, total=layout.ranks, per_node=per_node)


def _mended(layout: Layout, ranks: int, asked: str) -> str:
    """The smallest change that would do: more or fewer samples at once, or another number of GPUs."""
    others = layout.ranks // layout.data
    if ranks % others:
        return f"ask for {layout.ranks} {asked}, or leave them out"
    data = ranks // others
    sharded = layout.shard > 1 and layout.replicate == 1
    name = "fsdp" if sharded else "dp"
    if not sharded and data % layout.shard:
        return f"ask for {layout.ranks} {asked}, or leave them out"
    many = data if sharded else data // layout.shard
    return f"ask for {layout.ranks} {asked}, or write {name}={many}"
