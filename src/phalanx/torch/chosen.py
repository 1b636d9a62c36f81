"""Which layout this job runs: the caller's word, the plan's, or plain data parallel.

`PHALANX_LAYOUT` holds the layout as JSON, or as people write it (`tp=2,fsdp=4`), or `auto`: then it is chosen here, once the model is
known, for the machine that `PHALANX_MACHINE` describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from phalanx.core.errors import BadRequest
from phalanx.core.work.layout import Layout, layout_from_json, parse_layout
from phalanx.core.work.split import resized

AUTO: Final = "auto"

Chooser = Callable[[Mapping[str, Any] | None], Layout]
"""From the machine (None if nobody described it) to a layout for all ranks."""


def chosen(given: Layout | str | None, planned: str, machine: str, *, ranks: int, choose: Chooser) -> Layout:
    """The layout for `ranks` processes.

    Args:
        given: by the script; None for the plan's.
        planned: what PHALANX_LAYOUT holds; empty without a plan.
        machine: what PHALANX_MACHINE holds.
        ranks: processes there are.
        choose: asked when the word is `auto`.

    Raises:
        BadRequest: it cannot be read, or no number of replicas makes it fit the ranks.
    """
    if isinstance(given, Layout):
        return _exact(given, ranks)
    text = planned if given is None else given.strip()
    if not text:
        return data_parallel(ranks)
    if text == AUTO:
        return _exact(choose(_json(machine, "PHALANX_MACHINE") if machine else None), ranks)
    layout = layout_from_json(_json(text, "PHALANX_LAYOUT")) if text.startswith("{") else parse_layout(text)
    if given is not None:
        return _exact(layout, ranks)
    return resized(layout, ranks)  # the plan was for another number of ranks: a node came or went


def data_parallel(ranks: int) -> Layout:
    """Fully sharded over all ranks, in the precision of the model: what a script runs without a plan."""
    if ranks == 1:
        return Layout(precision="fp32")
    return Layout(shard=ranks, zero=3, precision="fp32")


def _exact(layout: Layout, ranks: int) -> Layout:
    """The layout if it is for that many ranks.

    Raises:
        BadRequest: it is not.
    """
    if layout.ranks != ranks:
        raise BadRequest(
            f"layout {layout} is for {layout.ranks} ranks, and there are {ranks}",
            hint=f"start {layout.ranks} ranks, or give a layout whose sizes multiply to {ranks}",
        )
    return layout


def _json(text: str, variable: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"{variable} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest(f"{variable} is no JSON object")
    return values
