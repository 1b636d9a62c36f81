"""The picture of a sweep: parallel coordinates, one axis for each parameter and one for the metric, one line for each trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from phalanx.cli.figure_page import FORMATS, write_picture
from phalanx.core.errors import BadRequest
from phalanx.sweep.definition import SweepDefinition
from phalanx.sweep.driver import best_trial
from phalanx.sweep.space import SweepParameter
from phalanx.sweep.study import TrialRecord

if TYPE_CHECKING:
    from phalanx.cli.figure_files import Axes

_HEIGHT: Final = 460.0
_TICKS: Final = 5  # of a range; a list has one for each value, up to _CHOICES
_CHOICES: Final = 12


class ParallelAxis(NamedTuple):
    """One vertical axis. `place`: from a value to 0..1; `ticks`: texts at these places."""

    title: str
    place: Callable[[object], float]
    ticks: Sequence[tuple[float, str]]


def check_picture(path: str) -> None:
    """Check the path of a picture.

    Raises:
        BadRequest: its ending names no format, or it cannot be written.
    """
    from phalanx.cli.figure_files import picture_format

    picture_format(path, FORMATS)


def draw_sweep(definition: SweepDefinition, trials: Sequence[TrialRecord], path: str) -> str:
    """Draw the trials that have a value; return a line that says where.

    Raises:
        BadRequest: none has one.
    """
    from phalanx.cli.figure_files import Chart

    shown = [one for one in trials if one.value is not None and math.isfinite(one.value)]
    if not shown:
        raise BadRequest(f"the sweep {definition.name} has no trial with a value to draw")
    axes = parallel_axes(definition, shown)
    best = best_trial(shown, maximize=definition.maximize)

    def plot(into: Axes) -> None:
        _plot(into, axes, shown, best)

    words = [one.state for one in trials]
    lead = f"{len(trials)} trials: {words.count('complete')} complete, {words.count('stopped')} stopped early"
    if best is not None:
        values = ", ".join(f"{name} {value}" for name, value in best.values.items())
        lead += f". Best (green): trial {best.number}, {definition.metric} {best.value:.5g} with {values}"
    title = f"Sweep {definition.name}"
    chart = Chart(plot, height=_HEIGHT, left=60.0, top=50.0)
    command = f"phalanx sweep show {definition.name} --plot {path}"
    write_picture(path, [(title, chart)], title=title, lead=lead, command=command)
    return f"wrote {path}"


def parallel_axes(definition: SweepDefinition, trials: Sequence[TrialRecord]) -> list[ParallelAxis]:
    """Return an axis for each parameter, and the last for the metric; better values of it are higher."""
    found = [_parameter_axis(one) for one in definition.parameters]
    values = [one.value for one in trials if one.value is not None]
    low, high = min(values), max(values)
    if low > 0 and high > 20 * low:  # a spread of losses over orders of magnitude
        place, back = _scale(low, high, log=True)
    else:
        place, back = _scale(low, high, log=False)
    flip = not definition.maximize

    def metric_place(value: object) -> float:
        return 1.0 - place(value) if flip else place(value)

    spots = [number / (_TICKS - 1) for number in range(_TICKS)]
    ticks = [(1.0 - spot if flip else spot, f"{back(spot):.4g}") for spot in spots]
    return [*found, ParallelAxis(definition.metric, metric_place, ticks)]


def _parameter_axis(one: SweepParameter) -> ParallelAxis:
    if one.choices:
        last = max(1, len(one.choices) - 1)
        places = {word: number / last for number, word in enumerate(one.choices)}
        every = math.ceil(len(one.choices) / _CHOICES)
        ticks = [(number / last, word[:12]) for number, word in enumerate(one.choices) if number % every == 0]
        return ParallelAxis(one.name, lambda value: places[str(value)], ticks)
    place, back = _scale(one.low, one.high, log=one.log)
    spots = [number / (_TICKS - 1) for number in range(_TICKS)]
    return ParallelAxis(one.name, place, [(spot, f"{back(spot):.3g}") for spot in spots])


def _scale(low: float, high: float, *, log: bool) -> tuple[Callable[[object], float], Callable[[float], float]]:
    """Return the functions from a value to 0..1 and back."""
    first, last = (math.log(low), math.log(high)) if log else (low, high)
    span = (last - first) or 1.0

    def place(value: object) -> float:
        number = float(str(value))
        return ((math.log(number) if log else number) - first) / span

    def back(spot: float) -> float:
        inner = first + spot * span
        return math.exp(inner) if log else inner

    return place, back


def _plot(into: Axes, axes: Sequence[ParallelAxis], trials: Sequence[TrialRecord], best: TrialRecord | None) -> None:
    from phalanx.cli.figure_files import colour, legend, style_axes, tooltip

    style_axes(into)
    into.grid(visible=False)
    into.set_yticks([])
    into.set_xticks([])
    into.set_xlim(-0.02, len(axes) - 1 + 0.12)
    into.set_ylim(-0.03, 1.03)
    for spine in into.spines.values():
        spine.set_visible(False)
    order = sorted(trials, key=lambda one: (one is best, one.state == "complete", one.number))
    for one in order:
        heights = [axis.place(one.numbers[axis.title]) for axis in axes[:-1]] + [axes[-1].place(one.value)]
        chosen = best is not None and one.number == best.number
        complete = one.state == "complete"
        name = "s2" if chosen else "s0" if complete else "idle"
        (line,) = into.plot(
            range(len(axes)),
            heights,
            color=colour(name),
            linewidth=2.4 if chosen else 1.3 if complete else 0.8,
            alpha=1.0 if chosen else 0.75,
            clip_on=False,
        )
        tooltip(line, f"trial {one.number}: {' '.join(f'{k}={v}' for k, v in one.values.items())}, {one.value:.5g}")
    behind = {"facecolor": colour("card"), "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
    for number, axis in enumerate(axes):
        into.plot([number, number], [0.0, 1.0], color=colour("line"), linewidth=1.0, zorder=0.5)
        into.text(number, 1.07, axis.title, ha="center", va="bottom", color=colour("ink"), fontweight="bold")
        for spot, text in axis.ticks:
            x = number + 0.012 * len(axes)
            into.text(x, spot, text, ha="left", va="center", color=colour("soft"), bbox=behind)
    legend(into, [("best", "s2"), ("complete", "s0"), ("stopped early", "idle")], below=True)
