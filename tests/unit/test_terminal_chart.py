"""Charts on a terminal: what a reader sees at any size and in any encoding."""

import math

import pytest

from phalanx.cli.terminal_chart import AxisLimits, ChartBar, ChartMarker, ChartSeries, bar_chart, line_chart

LIMITS = AxisLimits(x_low=1, x_high=300, y_low=1.0, y_high=5.5)
CURVE = ChartSeries(points=[(step, 1.0 + 4.5 * math.exp(-step / 60)) for step in range(1, 301)], colour="cyan")
KILLS = [ChartMarker(x=x, colour="red", label=f"n{n} killed") for n, x in enumerate((150, 155, 299))]
BARS = [
    ChartBar(name="Phalanx", value=4.3, colour="green", text="4.3 s"),
    ChartBar(name="Slurm", value=300.0, colour="magenta", text="300 s"),
]


@pytest.mark.parametrize(("width", "height"), [(40, 4), (60, 6), (80, 14), (120, 40)])
def test_a_chart_has_exactly_its_size(width, height):
    lines = line_chart([CURVE], LIMITS, width=width, height=height, marks=KILLS)
    assert [line.cell_len for line in lines] == [width] * height


def test_axes_are_labelled_at_both_ends_and_in_the_middle():
    lines = [line.plain for line in line_chart([CURVE], LIMITS, width=60, height=9)]
    assert [line[:4] for line in lines if line[:4].strip()] == ["5.50", "3.25", "1.00"]
    assert lines[-1].split() == ["1", "150", "300"]


def test_labels_of_close_kills_stand_in_rows_of_their_own():
    lines = [line.plain for line in line_chart([CURVE], LIMITS, width=60, height=9, marks=KILLS)]
    assert [[word in line for word in ("n0 killed", "n1 killed", "n2 killed")].index(True) for line in lines[:3]] == [
        0,
        1,
        2,
    ]


def test_a_loss_that_is_no_number_leaves_the_other_points():
    broken = ChartSeries(points=[(1, math.nan), (2, 3.0), (3, math.inf)], colour="cyan")
    assert any("⠁" <= char <= "⣿" for line in line_chart([broken], LIMITS, width=40, height=6) for char in line.plain)
    assert len(line_chart([ChartSeries(points=[], colour="red")], LIMITS, width=40, height=6)) == 6


def test_without_unicode_all_charts_are_ascii():
    dots = ChartSeries(points=[(200, 4.0)], colour="red", joined=False)
    lines = line_chart([CURVE, dots], LIMITS, width=60, height=9, marks=KILLS, blocks=False)
    lines += bar_chart(BARS, width=60, blocks=False)
    drawn = "\n".join(line.plain for line in lines)
    assert drawn.isascii()
    assert {"*", "o", "#", "|"} <= set(drawn)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_bars_are_as_long_as_their_values_and_their_texts_fit(width):
    first, second = (line.plain for line in bar_chart(BARS, width=width))
    assert first.split("┤")[1].rstrip().endswith("█ 4.3 s")
    assert second.rstrip().endswith("█ 300 s")
    assert first.count("█") <= 4
    assert second.count("█") >= width - 17


def test_a_bar_without_a_value_has_its_text_alone():
    first, _ = bar_chart([ChartBar(name="Phalanx", value=0.0, colour="white", text="none yet"), BARS[1]], width=60)
    assert first.plain.split("┤")[1].strip() == "none yet"
