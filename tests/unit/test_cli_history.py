"""The charts and tables of history in a terminal: what a reader sees of a slow night, of a loss with a spike, and of nothing."""

import pytest

from phalanx.cli.cluster.node_history import _lines, _print_csv
from phalanx.cli.jobs.job_curves import check_output, curve_points, plot_lines, write_plot
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import BadRequest
from phalanx.core.ids import JobId
from phalanx.wire.api.history import HistoryColumn, JobCurves, NodeHistory

SCREEN = Terminal(width=80, height=24, interactive=False, colour=False, blocks=True)
BEGIN = 1_800_000_000


def column(mean, device=0, metric="utilization", **more):
    ends = {"min": mean, "max": mean}
    return HistoryColumn(metric=metric, device=device, mean=mean, **{**ends, **more})


def of_node(*columns, node="gpu017", points=4):
    return NodeHistory(node=node, begin_s=BEGIN, step_s=3600, points=points, columns=list(columns))


def curves(losses, *, width=1, **more):
    count = len(losses)
    found = {
        "job_id": JobId("7"),
        "steps_per_point": width,
        "step": [width * (number + 1) - 1 for number in range(count)],
        "end_s": [float(BEGIN + number) for number in range(count)],
        **dict.fromkeys(("loss_first", "loss_last", "loss_min", "loss_max"), losses),
        **dict.fromkeys(("step_s", "step_s_min", "step_s_max"), [0.5] * count),
        "goodput": [0.25] * count,
    }
    return JobCurves(**{**found, **more})


def test_a_slow_night_is_a_dip_in_the_chart_and_a_minimum_in_the_table():
    found = of_node(column([0.9, 0.1, 0.1, 0.9]), column([0.9, 0.3, 0.3, 0.9], device=1))
    head, *lines = _lines(found, SCREEN, "util")
    assert head.startswith("node gpu017: utilization, mean of its devices, the last ")
    assert any("100%" in line for line in lines)
    rows = [line.split() for line in lines if line.lstrip().startswith(("0 ", "1 "))]
    assert ["0", "utilization", "50%", "10%", "90%", "100%"] in rows
    assert ["1", "utilization", "60%", "30%", "90%", "100%"] in rows


def test_reasons_of_throttling_are_named_with_their_number_of_points():
    throttled = column(
        [0.0, 1.0, 0.5, None], metric="throttled", min=[], max=[], reasons={"hw_thermal_slowdown": [1, 2]}
    )
    row = next(line for line in _lines(of_node(throttled), SCREEN, "throttle") if "hw_thermal" in line)
    assert row.split()[-2:] == ["hw_thermal_slowdown", "(2)"]
    assert "75%" in row  # three of four points are known


def test_what_is_not_known_is_said():
    (line,) = _lines(of_node(), SCREEN, "power")
    assert line.startswith("no power of node gpu017 is known for the last ")
    assert "the fleet" in _lines(of_node(node=""), SCREEN, "util")[0]


def test_csv_has_a_row_for_each_known_point(capsys):
    _print_csv(of_node(column([0.5, None, 0.25, None]), column([1.0] * 4, metric="power_w")), ("utilization",))
    assert capsys.readouterr().out.splitlines() == [
        "time,node,device,metric,mean,min,max,reasons",
        "2027-01-15T08:00:00Z,gpu017,0,utilization,0.5,0.5,0.5,",
        "2027-01-15T10:00:00Z,gpu017,0,utilization,0.25,0.25,0.25,",
    ]


def test_a_spike_inside_a_point_is_drawn():
    found = curves([1.0, 1.0], width=100, loss_max=[1.0, 9.0])
    assert max(value for _, value in curve_points(found, "loss")) == 9.0
    assert curve_points(found, "loss") == [(0, 1.0), (99, 1.0), (100, 1.0), (149.5, 9.0), (199, 1.0)]


def test_a_curve_says_where_it_ends_and_how_wide_its_points_are():
    head, *chart = plot_lines(curves([3.0, 2.0, 1.0], width=10), "loss", SCREEN)
    assert head == "job 7: loss by step, last 1, least 1, most 3; steps 0 to 29 in 2.0s, 10 steps a point"
    assert len(chart) == 16
    assert plot_lines(curves([3.0, 2.0]), "goodput", SCREEN)[0].startswith("job 7: goodput by step, last 25%")


@pytest.mark.parametrize("plot", ["loss", "goodput"])
def test_a_job_without_steps_has_no_curve(plot):
    (line,) = plot_lines(curves([]), plot, SCREEN)
    assert line == f"job 7 has no {plot} to draw: it has reported no step"
    (line,) = plot_lines(curves([None, None]), "loss", SCREEN)
    assert line == "job 7 has no loss to draw: it does not report it"


def test_a_curve_is_written_as_svg(tmp_path):
    path = str(tmp_path / "loss.svg")
    assert write_plot(curves([3.0, 2.0, 1.0]), "loss", path) == f"wrote {path}"
    assert (tmp_path / "loss.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize("name", ["loss", "loss.gif", "missing/loss.svg"])
def test_a_file_that_cannot_be_drawn_is_refused_before_anything_is_asked(tmp_path, name):
    with pytest.raises(BadRequest):
        check_output(str(tmp_path / name))
