"""The key `plan` of a job: how its model is split. With `auto` the ranks choose a layout for the script's model; a layout fixes the ranks.

Read when a mapping becomes a spec, on the command line and at the head alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.gpus import GPUS_MAX, GpuRequest
from phalanx.core.work.job_file.keys import InvalidKey
from phalanx.core.work.layouts.layout import Axis, Layout, parse_layout
from phalanx.core.work.spec import LaunchMode, Role

AUTO_PLAN: Final = "auto"
_HINT: Final = "write auto, or a layout as tp=2,pp=2,fsdp=4"


def parse_plan(value: object) -> str:
    """The plan as a spec stores it: "", "auto", or a layout as `layout_text` writes it.

    Raises:
        InvalidKey: neither; files and mappings are resolved by the command line before.
    """
    if not isinstance(value, str):
        raise InvalidKey("plan: a head accepts no mapping, only a layout", key="plan", hint=_HINT)
    words = value.strip().lower()
    if words in {"", AUTO_PLAN}:
        return words
    if "=" not in words and words != "single":
        raise InvalidKey(f"plan: {value.strip()[:60]!r} is neither auto nor a layout", key="plan", hint=_HINT)
    try:
        return layout_text(parse_layout(words))
    except BadRequest as error:
        raise InvalidKey(f"plan: {error.message}", key="plan", hint=error.hint) from None


def layout_text(layout: Layout) -> str:
    """The layout as a text that `parse_layout` reads back exactly: `zero` is included if it differs from the default for `fsdp`."""
    usual = layout.zero == 3 if layout.shard > 1 else layout.zero != 3
    return str(layout) if usual or layout.zero in {1, 2} else f"{layout},zero={layout.zero}"


def planned_layout(plan: str) -> Layout | None:
    """The layout that a spec's plan fixes; None for "" and "auto"."""
    return None if plan in {"", AUTO_PLAN} else parse_layout(plan)


def known_rank_count(role: Role) -> int | None:
    """Number of ranks of the role if the request determines it, started by Phalanx or by a launcher; else None."""
    request = role.gpus
    if request.alternatives:
        counts = {known_rank_count(replace(role, gpus=one)) for one in request.choices}
        return counts.pop() if len(counts) == 1 else None
    if role.launch is LaunchMode.FIXED or (role.launch is LaunchMode.ONCE and role.tasks_per_node is not None):
        nodes = request.nodes if request.nodes is not None else (1 if request.total <= 1 else None)
        return None if nodes is None else nodes * (role.tasks_per_node or 1)
    return request.total or None


def with_gpus_for_plan(role: Role, plan: str) -> Role:
    """The role with as many GPUs as the layout has ranks, if it requests none; else unchanged.

    Raises:
        BadRequest: it requests another number.
    """
    layout = planned_layout(plan)
    if layout is None:
        return role
    if role.gpus.alternatives:
        for one in role.gpus.choices:
            with_gpus_for_plan(replace(role, gpus=one), plan)
        return role
    ranks = known_rank_count(role)
    if ranks is None:
        return role if role.launch is LaunchMode.FIXED else replace(role, gpus=_gpus_for(role.gpus, layout))
    if ranks != layout.ranks:
        asked = "tasks" if role.launch is LaunchMode.FIXED else "GPUs"
        raise BadRequest(
            f"plan {layout} is for {layout.ranks} ranks, but the job requests {ranks} {asked}",
            hint=_fix_hint(layout, ranks, asked),
        )
    return role


def tensor_span(layout: Layout) -> int:
    """Number of consecutive ranks that always contain whole tensor groups."""
    return layout.stride(Axis.TENSOR) * layout.tensor


def _gpus_for(asked: GpuRequest, layout: Layout) -> GpuRequest:
    if layout.ranks > GPUS_MAX:
        raise BadRequest(f"plan {layout}: {layout.ranks} GPUs are more than the maximum of {GPUS_MAX}")
    if asked.nodes is None or asked.nodes_max is not None:
        return replace(asked, total=layout.ranks, nodes=None, per_node=None, nodes_max=None)
    per_node, rest = divmod(layout.ranks, asked.nodes)
    if rest:
        raise BadRequest(f"plan {layout} has {layout.ranks} ranks, which is not divisible by {asked.nodes} nodes")
    return replace(asked, total=layout.ranks, per_node=per_node)


def _fix_hint(layout: Layout, ranks: int, asked: str) -> str:
    """A hint with the smallest change that works: another batch split, or another number of GPUs."""
    ranks_per_copy = layout.ranks // layout.data
    if ranks % ranks_per_copy:
        return f"ask for {layout.ranks} {asked}, or leave them out"
    data = ranks // ranks_per_copy
    sharded = layout.shard > 1 and layout.replicate == 1
    name = "fsdp" if sharded else "dp"
    if not sharded and data % layout.shard:
        return f"ask for {layout.ranks} {asked}, or leave them out"
    degree = data if sharded else data // layout.shard
    return f"ask for {layout.ranks} {asked}, or write {name}={degree}"
