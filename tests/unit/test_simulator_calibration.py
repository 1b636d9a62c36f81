"""The replayer is right: the published figures of Philly week 1, to the second (shared/data/README.md, "Calibration")."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.simulator.fleet import parse_fleet, read_fleet
from phalanx.simulator.report import build_report
from phalanx.simulator.simulation import SimulationSettings, simulate_board, simulate_lifecycle
from phalanx.simulator.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("PHALANX_SHARED", ROOT.parent / "shared"))
TRACES = SHARED / "data" / "traces"

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="the public traces are not beside the checkout (../shared) nor at PHALANX_SHARED"
)


@pytest.mark.parametrize(
    ("policy", "jct_s", "wait_s", "off_s"),
    [
        ("fifo", 8118, 289, 1),
        ("sjf", 7934, 105, 1),
        ("skip", 7936, 107, 1),
        ("backfill", 7939, 110, 1),
        ("las", 7957, 127, 2),
    ],
)
def test_philly_week_1_on_its_virtual_clusters(policy, jct_s, wait_s, off_s):
    trace = read_trace((TRACES / "philly_2017_oct_week1.csv").read_text().splitlines())
    nodes = read_fleet((TRACES / "nodes_philly_vc.csv").read_text().splitlines())
    parts = simulate_board(
        trace, nodes, policy, per_virtual_cluster=True, restart_cost_s=lambda gpus: 40.0 if gpus <= 8 else 60.0
    )
    figures = build_report(parts, wall_s=0.0)
    assert figures.jobs == 10_650
    assert abs(figures.avg_jct_s - jct_s) < off_s
    assert abs(figures.avg_wait_s - wait_s) < off_s


@pytest.mark.parametrize(("policy", "jct_s", "wait_s"), [("fifo", 8118, 289), ("sjf", 7934, 105)])
def test_philly_week_1_through_the_whole_lifecycle(policy, jct_s, wait_s):
    trace = read_trace((TRACES / "philly_2017_oct_week1.csv").read_text().splitlines())
    nodes = read_fleet((TRACES / "nodes_philly_vc.csv").read_text().splitlines())
    figures = build_report(
        simulate_lifecycle(trace, nodes, SimulationSettings(policy=policy, per_virtual_cluster=True)), wall_s=0.0
    )
    assert figures.jobs == 10_650
    assert abs(figures.avg_jct_s - jct_s) < 1.0
    assert abs(figures.avg_wait_s - wait_s) < 1.0


def test_gavel_continuous_trace_on_its_mixed_fleet():
    trace = read_trace((TRACES / "gavel_max_min_fairness.csv").read_text().splitlines())
    nodes = parse_fleet("8xv100:1,16xp100:1,24xk80:1")
    assert nodes is not None
    figures = build_report(simulate_lifecycle(trace, nodes, SimulationSettings()), wall_s=0.0)
    assert figures.jobs == 96
    assert figures.avg_jct_s <= 3.9 * 3600  # Gavel's own: 4.06 h
