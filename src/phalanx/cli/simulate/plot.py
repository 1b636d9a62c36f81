"""Draw the charts of a replay as a picture file with matplotlib, an extra that only `--plot` needs.

It uses no window and no global state: a figure and the Agg canvas, as matplotlib recommends without a display.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from phalanx.cli.simulate.chart_data import (
    FleetTimeSeries,
    PolicyRun,
    fleet_time_series,
    log_ticks,
    waits_by_size,
)
from phalanx.cli.simulate.charts import format_short
from phalanx.core.errors import BadRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FORMATS: Final = ("png", "svg", "pdf")
_COLOURS: Final = (
    "#2a6fd0",
    "#e0930a",
    "#2e9c6a",
    "#d8433d",
    "#8b63d1",
    "#14a3b8",
    "#b0578d",
    "#7a7f32",
)  # page.html's, light
_INK, _SOFT, _LINE, _GRID = "#16181d", "#4a505b", "#b9bec7", "#e4e6ea"
_INCHES: Final = (11.0, 10.5)
_DOTS_PER_INCH: Final = 150  # 1,650 x 1,575 pixels: sharp on a page and on a wide screen
_ROOM: Final = (0.015, 0.012, 0.965, 0.972)  # left, bottom, width, height within the figure
_STEPS: Final = 460  # as in the page's charts
_DAY_S: Final = 86_400.0


def plot_format(path: str) -> str:
    """Return the picture format of `path`; called before the replay.

    Raises:
        BadRequest: matplotlib is not installed, or the format is unknown.
    """
    if find_spec("matplotlib") is None:
        raise BadRequest(
            "--plot needs matplotlib, which is not installed",
            hint="pip install '.[plot]' in the checkout, or use --html",
        )
    kind = PurePath(path).suffix.lower().removeprefix(".")
    if kind not in PLOT_FORMATS:
        raise BadRequest(f"--plot {path}: the name must end in .png, .svg or .pdf", hint="--plot out.png")
    return kind


def plot(runs: Sequence[PolicyRun], *, kind: str, title: str, lines: Sequence[str]) -> bytes:
    """Draw utilisation, queue depth and waits by size below a title and lines of text. `kind` is one of `KINDS`."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    start_s, end_s = min(run.start_s for run in runs), max(run.end_s for run in runs)
    courses = [fleet_time_series(run, start_s=start_s, end_s=end_s, steps=_STEPS) for run in runs]
    # Ignore the user's matplotlibrc.
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10.5, "text.parse_math": False}):
        layout = ConstrainedLayoutEngine(rect=_ROOM, h_pad=0.1)
        figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        head, held, waiting, waits = figure.subplots(4, 1, height_ratios=[0.28, 1.0, 1.0, 1.15])
        head.set_axis_off()
        head.text(0.0, 1.0, title, transform=head.transAxes, fontsize=15, fontweight="bold", color=_INK, va="top")
        head.text(0.0, 0.42, "\n".join(lines), transform=head.transAxes, color=_SOFT, va="top", linespacing=1.5)
        _over_time(
            held,
            "GPU utilisation",
            "% of all GPUs",
            runs,
            courses,
            [[100.0 * share for share in each.gpu_share] for each in courses],
        )
        held.set_ylim(0.0, 102.0)
        held.set_yticks([0.0, 25.0, 50.0, 75.0, 100.0])
        _over_time(waiting, "Jobs waiting", "jobs", runs, courses, [each.waiting for each in courses])
        waiting.set_ylim(bottom=0.0)
        _waits(waits, runs)
        figure.align_ylabels([held, waiting, waits])
        file = io.BytesIO()
        figure.savefig(file, format=kind, facecolor="white")
    return file.getvalue()


def _over_time(
    axes: Axes,
    title: str,
    unit: str,
    runs: Sequence[PolicyRun],
    courses: Sequence[FleetTimeSeries],
    values: Sequence[Sequence[float]],
) -> None:
    step_s = courses[0].times_s[1] - courses[0].times_s[0]
    start_s, end_s = courses[0].times_s[0] - step_s / 2, courses[0].times_s[-1] + step_s / 2
    unit_s, scale = (_DAY_S, "days") if end_s - start_s >= 3 * _DAY_S else (3600.0, "hours")
    for number, (run, own, series) in enumerate(zip(runs, courses, values, strict=True)):
        times = [(time_s - start_s) / unit_s for time_s in own.times_s]
        axes.plot(times, series, color=_colour(number), linewidth=1.4, label=run.policy)
        if len(runs) == 1:
            axes.fill_between(times, series, color=_colour(number), alpha=0.16, linewidth=0)
    axes.set_xlim(0.0, (end_s - start_s) / unit_s or 1.0)
    axes.set_xlabel(f"{scale} since the first submit", color=_SOFT)
    _style_axes(axes, title, unit, key=len(runs) > 1)


def _waits(axes: Axes, runs: Sequence[PolicyRun]) -> None:
    """Draw bars on a logarithmic axis: mean and 99th percentile of one policy, or the means of several."""
    tables = [{waits.sizes: waits for waits in waits_by_size(run)} for run in runs]
    names = list(tables[0])  # every policy completes the same jobs
    if len(runs) == 1:
        one = tables[0]
        bars = [
            ("mean", [one[name].mean_s for name in names]),
            ("99th percentile", [one[name].p99_s for name in names]),
        ]
    else:
        bars = [(run.policy, [table[name].mean_s for name in names]) for run, table in zip(runs, tables, strict=True)]
    width = min(0.3, 0.8 / len(bars))
    axes.set_yscale("log")
    for number, (label, values) in enumerate(bars):
        places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(names))]
        # Bars start at 1 s, the lower end of the logarithmic axis.
        axes.bar(
            places,
            [max(0.0, value - 1.0) for value in values],
            width * 0.92,
            bottom=1.0,
            color=_colour(number),
            label=label,
        )
    marks = log_ticks([value for _, values in bars for value in values])
    axes.set_ylim(marks[0], max(marks[-1], 10.0))
    axes.set_yticks(marks, [format_short(mark) for mark in marks])
    axes.minorticks_off()
    axes.set_xticks(range(len(names)), [f"{name}\n{_jobs(tables[0][name].jobs)}" for name in names])
    axes.set_xlabel("GPUs of the job", color=_SOFT)
    _style_axes(axes, "Wait by size" if len(runs) == 1 else "Mean wait by size", "wait (logarithmic)", key=True)


def _style_axes(axes: Axes, title: str, unit: str, *, key: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontweight="bold", color=_INK)
    axes.set_ylabel(unit, color=_SOFT)
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_SOFT, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINE)
    if key:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=8, frameon=False, labelcolor=_SOFT, borderaxespad=0.2
        )


def _jobs(count: int) -> str:
    return f"{count:,} job{'' if count == 1 else 's'}"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
