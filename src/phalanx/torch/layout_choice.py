"""Choose the layout of this job: given by the caller, by the plan, or plain data parallel.

`PHALANX_LAYOUT` is the layout as JSON, as text (`tp=2,fsdp=4`), or `auto`. For `auto` the layout is planned once the model is known, for
the machine that `PHALANX_MACHINE` describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.layouts.layout import Layout, layout_from_json, parse_layout
from phalanx.core.work.layouts.layout_split import resize_layout

AUTO: Final = "auto"

LayoutPlanner = Callable[[Mapping[str, Any] | None], Layout]
"""Maps the machine (None if unknown) to a layout for all ranks."""


def choose_layout(
    given: Layout | str | None, planned: str, machine: str, *, ranks: int, plan_layout: LayoutPlanner
) -> Layout:
    """Return the layout for `ranks` processes.

    Args:
        given: layout of the script; None to use the plan.
        planned: value of PHALANX_LAYOUT; empty without a plan.
        machine: value of PHALANX_MACHINE.
        ranks: number of processes.
        plan_layout: called for the layout `auto`.

    Raises:
        BadRequest: the layout is invalid, or no number of replicas makes it fit the ranks.
    """
    if isinstance(given, Layout):
        return _exact(given, ranks)
    text = planned if given is None else given.strip()
    if not text:
        return default_layout(ranks)
    if text == AUTO:
        return _exact(plan_layout(_json(machine, "PHALANX_MACHINE") if machine else None), ranks)
    layout = layout_from_json(_json(text, "PHALANX_LAYOUT")) if text.startswith("{") else parse_layout(text)
    if given is not None:
        return _exact(layout, ranks)
    return resize_layout(layout, ranks)  # the plan was for another number of ranks: a node came or went


def default_layout(ranks: int) -> Layout:
    """Return the layout without a plan: fully sharded over all ranks, in the precision of the model."""
    if ranks == 1:
        return Layout(precision="fp32")
    return Layout(shard=ranks, zero=3, precision="fp32")


def _exact(layout: Layout, ranks: int) -> Layout:
    """Return the layout if its number of ranks matches.

    Raises:
        BadRequest: it does not match.
    """
    if layout.ranks != ranks:
        raise BadRequest(
            f"layout {layout} is for {layout.ranks} ranks, but there are {ranks}",
            hint=f"start {layout.ranks} ranks, or use a layout whose sizes multiply to {ranks}",
        )
    return layout


def _json(text: str, variable: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{variable} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest(f"{variable} is not a JSON object")
    return values
