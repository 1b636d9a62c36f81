"""The charts of a replay: GPU utilisation and waiting jobs over time, and waits by job size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from phalanx.cli.figure_files import Chart, colour, legend, series_colour, style_axes
from phalanx.cli.simulate.chart_data import (
    FleetTimeSeries,
    PolicyRun,
    fleet_time_series,
    format_short,
    log_ticks,
    waits_by_size,
)

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes

_STEPS: Final = 460  # about two pixels each; more detail is not visible
_DAY_S: Final = 86_400.0


def replay_charts(runs: Sequence[PolicyRun]) -> list[tuple[str, Chart]]:
    """Return each chart with its name for readers who cannot see it."""
    start_s, end_s = min(run.start_s for run in runs), max(run.end_s for run in runs)
    series = [fleet_time_series(run, start_s=start_s, end_s=end_s, steps=_STEPS) for run in runs]

    def utilisation(axes: Axes) -> None:
        _plot_over_time(axes, runs, series, [[100.0 * share for share in each.gpu_share] for each in series])
        axes.set_ylim(0.0, 102.0)
        axes.set_yticks([0.0, 25.0, 50.0, 75.0, 100.0])
        style_axes(axes, "GPU utilisation", y_label="% of all GPUs")

    def waiting(axes: Axes) -> None:
        _plot_over_time(axes, runs, series, [each.waiting for each in series])
        axes.set_ylim(bottom=0.0)
        axes.locator_params(axis="y", integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        style_axes(axes, "Jobs waiting", y_label="jobs")

    def rented(axes: Axes) -> None:
        _plot_over_time(axes, runs, series, [each.rented for each in series])
        axes.set_ylim(bottom=0.0)
        axes.locator_params(axis="y", integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        style_axes(axes, "Rented GPUs", y_label="GPUs")

    rents = any(run.report.rented_nodes for run in runs)
    return [
        ("GPU utilisation over time", Chart(utilisation)),
        ("jobs waiting over time", Chart(waiting)),
        *([("rented GPUs over time", Chart(rented))] if rents else []),
        ("wait by size", Chart(lambda axes: _plot_waits(axes, runs), height=320.0, bottom=62.0)),
    ]


def _plot_over_time(
    axes: Axes, runs: Sequence[PolicyRun], series: Sequence[FleetTimeSeries], values: Sequence[Sequence[float]]
) -> None:
    times_s = series[0].times_s
    step_s = times_s[1] - times_s[0]
    start_s, end_s = times_s[0] - step_s / 2, times_s[-1] + step_s / 2
    unit_s, unit = (_DAY_S, "days") if end_s - start_s >= 3 * _DAY_S else (3600.0, "hours")
    for number, (own, line) in enumerate(zip(series, values, strict=True)):
        times = [(time_s - start_s) / unit_s for time_s in own.times_s]
        own_colour = colour(series_colour(number))
        axes.plot(times, line, color=own_colour, linewidth=1.4)
        if len(runs) == 1:
            axes.fill_between(times, line, color=own_colour, alpha=0.16, linewidth=0)
    axes.set_xlim(0.0, (end_s - start_s) / unit_s or 1.0)
    axes.set_xlabel(f"{unit} since the first submit")
    if len(runs) > 1:
        legend(axes, [(run.policy, series_colour(number)) for number, run in enumerate(runs)])


def _plot_waits(axes: Axes, runs: Sequence[PolicyRun]) -> None:
    """Draw bars on a logarithmic axis: mean and 99th percentile of one policy, or the means of several."""
    tables = [{waits.sizes: waits for waits in waits_by_size(run)} for run in runs]
    names = list(tables[0])  # every policy completes the same jobs
    if len(runs) == 1:
        bars = [
            ("mean", [tables[0][name].mean_s for name in names]),
            ("99th percentile", [tables[0][name].p99_s for name in names]),
        ]
    else:
        bars = [(run.policy, [table[name].mean_s for name in names]) for run, table in zip(runs, tables, strict=True)]
    width = min(0.3, 0.8 / len(bars))
    axes.set_yscale("log")
    for number, (_, values) in enumerate(bars):
        places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(names))]
        # Bars start at 1 s, the lower end of the logarithmic axis.
        heights = [max(0.0, value - 1.0) for value in values]
        axes.bar(places, heights, width * 0.92, bottom=1.0, color=colour(series_colour(number)))
    marks = log_ticks([value for _, values in bars for value in values])
    axes.set_ylim(marks[0], max(marks[-1], 10.0))
    axes.set_yticks(marks, [format_short(mark) for mark in marks])
    axes.minorticks_off()
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xticks(range(len(names)), [f"{name}\n{_jobs(tables[0][name].jobs)}" for name in names])
    title = "Wait by size" if len(runs) == 1 else "Mean wait by size"
    axes.set_xlabel("GPUs of the job")
    style_axes(axes, title, y_label="wait (logarithmic)")
    legend(axes, [(text, series_colour(number)) for number, (text, _) in enumerate(bars)])


def _jobs(number: int) -> str:
    return f"{number:,} job{'' if number == 1 else 's'}"
