"""The picture of a plan: placement, timeline of a step, and the parts of step and memory."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cli.figure_files import Panel
from phalanx.cli.figure_page import write_picture
from phalanx.cli.plan.placement_chart import placement_diagram
from phalanx.cli.plan.step_chart import ITEMS_AFTER_PIPELINE, items_diagram, schedule_chart
from phalanx.core.errors import BadRequest
from phalanx.plans.amounts import format_decimal_bytes, format_seconds
from phalanx.plans.headline import headline
from phalanx.plans.records import LayoutFigures, PlanAnswer


def write_plan_picture(path: str, answer: PlanAnswer, *, command: str) -> None:
    """Write the picture of the best layout, or of the first one that does not fit.

    Raises:
        BadRequest: there is no layout.
        OSError: the file cannot be written.
    """
    shown = (*answer.layouts, *answer.losers)
    if not shown:
        raise BadRequest(f"--plot {path}: there is no layout to draw", hint="see the reason with --json")
    panels = list(_panels(answer, shown[0]))
    write_picture(path, panels, title=answer.request, lead=headline(answer), command=command)


def _panels(answer: PlanAnswer, one: LayoutFigures) -> Iterator[tuple[str, Panel]]:
    yield (
        "placement",
        placement_diagram(
            one.layout, layers=answer.layers, nodes=answer.nodes, gpus_per_node=answer.gpus_per_node, gpu=answer.gpu
        ),
    )
    if answer.fits:
        after_s = sum(seconds for name, seconds in one.step_items_s if name in ITEMS_AFTER_PIPELINE)
        yield "timeline of a step", schedule_chart(one.layout, step_s=one.step_s.mid, after_s=after_s)
        title = f"Parts of the step: {format_seconds(one.step_s.mid)}"
        yield "parts of the step", items_diagram(title, one.step_items_s, "s")
    title = (
        f"Memory of the fullest GPU: {format_decimal_bytes(one.used_bytes)} of {format_decimal_bytes(one.usable_bytes)}"
    )
    items = [(name, value / 1e9) for name, value in one.memory_bytes]
    yield "memory", items_diagram(title, items, "GB", whole=one.usable_bytes / 1e9)
