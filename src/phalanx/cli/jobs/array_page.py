"""The page of a job array: the number of elements in each state."""

from __future__ import annotations

from typing import Final

from phalanx.cli import cells
from phalanx.cli.list_output import ListView
from phalanx.cli.tables import Cell, Column, table
from phalanx.cli.terminal import Terminal, strip_control
from phalanx.core.work.array import parse_array
from phalanx.core.work.states import JobState
from phalanx.wire.api.jobs import JobView

_BAR: Final = 20  # columns
_COLUMNS: Final = (
    Column(title="STATE"),
    Column(title="COUNT", right=True),
    Column(title="SHARE"),
    Column(title="ELEMENTS", min_width=8),
)


def array_view(array: JobView) -> ListView:
    """Return the page of a whole array."""
    return ListView(value={"job": array}, lines=lambda screen: array_page(array, screen), next_command=_next(array))


def array_page(array: JobView, screen: Terminal) -> list[str]:
    """Return the lines of the page: headline, request, and a row for each state with its number of elements."""
    at_once = "" if array.array_max is None else f", at most {array.array_max} at once"
    rows: list[list[Cell | str]] = [
        [
            cells.state_cell(state.value),
            str(count),
            f"{cells.bar(count / array.array_size, _BAR, screen)} {cells.percent(count / array.array_size)}",
            array.state_elements.get(state, ""),
        ]
        for state in JobState
        if (count := array.states.get(state, 0))
    ]
    remark = "" if array.state_elements else array.detail.partition("; ")[2]  # of a head of an earlier release
    return [
        f"{screen.paint(f'array {array.id}', 'bold')} {strip_control(array.name)}: {array.array_size} elements, {array.id}_[{array.elements}]{at_once}",
        f"  {strip_control(array.user)}, project {strip_control(array.project)}, queue {strip_control(array.queue)}, {_each(array)}",
        *([f"  {strip_control(array.command)}"] if array.command else []),
        *table(_COLUMNS, rows, screen),
        *([strip_control(remark)] if remark else []),
    ]


def _each(array: JobView) -> str:
    return f"{strip_control(array.gpus)} {'GPU' if array.gpus == '1' else 'GPUs'} each"


def _next(array: JobView) -> str:
    if any(array.states.get(state) for state in (JobState.PENDING, JobState.RUNNING)):
        return f"phalanx ps --name {array.name}" if " " not in array.name else "phalanx ps"
    for state in (JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED):
        if numbers := array.state_elements.get(state):
            return f"phalanx logs {array.id}_{parse_array(numbers).indices[0]}"
    return f"phalanx get {array.id}"
