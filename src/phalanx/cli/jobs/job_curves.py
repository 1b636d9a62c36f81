"""`phalanx show JOB --plot`: the curve of a job's loss, step time or goodput, in the terminal or as an SVG or PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest
from phalanx.core.units import format_duration

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes
    from phalanx.wire.api.history import JobCurves

PLOTS: Final = ("loss", "step-time", "goodput")
FORMATS: Final = ("svg", "png")
_TITLES: Final = {"loss": "loss", "step-time": "seconds a step", "goodput": "goodput"}
_ROWS, _COLUMNS_MAX = 16, 120


def check_output(path: str) -> None:
    """Check the path of `--output`, before the head is asked.

    Raises:
        BadRequest: its ending names no format, or it cannot be written.
    """
    from phalanx.cli.figure_files import check_writable

    if Path(path).suffix.lower().removeprefix(".") not in FORMATS:
        raise BadRequest(f"--output {path}: the name must end in .svg or .png", hint="--output loss.svg")
    check_writable("--output", path)


def curve_points(found: JobCurves, plot: str) -> list[tuple[float, float]]:
    """The points to draw, by step. Of a loss all four of first, least, most and last, so that a spike stays visible."""
    if plot == "goodput":
        return _known(found.step, found.goodput)
    if plot == "step-time":
        return _known(found.step, found.step_s)
    points: list[tuple[float, float]] = []
    half = (found.steps_per_point - 1) / 2
    columns = (found.loss_first, found.loss_min, found.loss_max, found.loss_last)
    for step, first, least, most, last in zip(found.step, *columns, strict=True):
        if first is None or last is None or least is None or most is None:
            continue
        between = [(step - half, value) for value in (least, most) if value not in (first, last)]
        points += [(step - 2 * half, first), *between, *([(step, last)] if half else [])]
    return points


def plot_lines(found: JobCurves, plot: str, screen: Terminal) -> list[str]:
    """The chart for a terminal."""
    from rich.console import Console

    from phalanx.cli.terminal_chart import AxisLimits, ChartSeries, line_chart

    points = curve_points(found, plot)
    if not points:
        return [_nothing(found, plot)]
    values = [value for _, value in points]
    low, high = (
        (0.0, 1.0) if plot == "goodput" else (min(0.0, *values) if plot == "step-time" else min(values), max(values))
    )
    limits = AxisLimits(
        x_low=points[0][0], x_high=max(points[-1][0], points[0][0] + 1), y_low=low, y_high=max(high, low + 1e-9)
    )
    width = min(screen.width, _COLUMNS_MAX)
    drawn = line_chart(
        [ChartSeries(points=points, colour="green")],
        limits,
        width=width,
        height=_ROWS,
        blocks=screen.blocks,
        y_text=lambda value: f"{100 * value:.0f}%" if plot == "goodput" else f"{value:.4g}",
    )
    console = Console(no_color=not screen.colour, force_terminal=screen.colour, width=width, highlight=False)
    with console.capture() as captured:
        for line in drawn:
            console.print(line, no_wrap=True, overflow="crop")
    return [f"job {found.job_id}: {_summary(found, plot)}", *captured.get().rstrip("\n").split("\n")]


def write_plot(found: JobCurves, plot: str, path: str) -> str:
    """Write the chart as a file; return a line that says so.

    Raises:
        BadRequest: there is nothing to draw.
    """
    from phalanx.cli.figure_files import Chart, colour, render, style_axes

    points = curve_points(found, plot)
    if not points:
        raise BadRequest(_nothing(found, plot))

    def draw(axes: Axes) -> None:
        factor = 100.0 if plot == "goodput" else 1.0
        axes.plot([x for x, _ in points], [factor * y for _, y in points], color=colour("s0"), linewidth=1.4)
        axes.set_xlabel("step")
        if plot != "loss":
            axes.set_ylim(bottom=0.0)
        style_axes(axes, "", y_label="goodput, %" if plot == "goodput" else _TITLES[plot])

    kind = Path(path).suffix.lower().removeprefix(".")
    drawn = render([Chart(draw, height=360.0)], kind, title=f"Job {found.job_id}", lines=[_summary(found, plot)])
    Path(path).write_bytes(drawn)
    return f"wrote {path}"


def _summary(found: JobCurves, plot: str) -> str:
    points = curve_points(found, plot)
    each = "" if found.steps_per_point == 1 else f", {found.steps_per_point} steps a point"
    values = [value for _, value in points]
    last = f"{100 * values[-1]:.0f}%" if plot == "goodput" else f"{values[-1]:.4g}"
    spread = "" if plot == "goodput" else f", least {min(values):.4g}, most {max(values):.4g}"
    span = format_duration(found.end_s[-1] - found.end_s[0])
    return (
        f"{_TITLES[plot]} by step, last {last}{spread}; steps {int(points[0][0])} to {found.step[-1]} in {span}{each}"
    )


def _nothing(found: JobCurves, plot: str) -> str:
    why = "it has reported no step" if not found.step else "it does not report it"
    return f"job {found.job_id} has no {_TITLES[plot]} to draw: {why}"


def _known(steps: list[int], values: list[float | None]) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
