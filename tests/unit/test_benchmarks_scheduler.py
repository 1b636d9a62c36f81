"""The scheduler's benchmark: its output, its ranges and its drawn trace. What it measures is for the benchmark to say."""

import json

import pytest

from benchmarks import scheduler
from benchmarks.replays import GPUS_PER_NODE, LOAD, NODES, synthetic_trace
from benchmarks.scheduler import PartResult, measure_in_child, print_figures
from benchmarks.yardstick import turn

KEYS = [
    "pass_50k_ms",
    "placements_per_s",
    "decision_1213_ms",
    "replay_fifo_s",
    "replay_default_s",
    "peak_mib",
]  # issue 3
BOARD = {"replay_board_fifo_s", "replay_board_default_s"}  # issue 21

PARTS = {
    "pass": PartResult(runs={"pass_50k_ms": [100.0, 900.0, 110.0]}, facts={}, peak_mib=300.0),
    "place": PartResult(runs={"placements_per_s": [30_000.0]}, facts={}, peak_mib=50.0, yardstick_s=3.0),
    "decision": PartResult(runs={"decision_1213_ms": [7.0]}, facts={}, peak_mib=40.0, yardstick_s=2.0),
    "fifo": PartResult(runs={"replay_fifo_s": [9.0]}, facts={"replay_trace": "drawn"}, peak_mib=90.0),
    "default": PartResult(runs={"replay_default_s": [91.0]}, facts={"replay_trace": "drawn"}, peak_mib=95.0),
}


def test_json_is_flat_has_the_keys_of_the_issue_and_names_what_is_missed(capsys):
    print_figures(PARTS, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [told[key] for key in KEYS] == [110.0, 30_000.0, 7.0, 9.0, 91.0, 300.0]
    assert (told["peak_pass_mib"], told["peak_replay_mib"], told["replay_trace"]) == (300.0, 95.0, "drawn")
    assert (told["decision_1213_ms_per_yardstick"], told["placements_per_s_per_yardstick"]) == (0.0035, 90_000.0)
    assert told["missed"] == ["decision_1213_ms", "replay_default_s"]


def test_yardstick_is_the_same_work_as_ever():
    """Figures of different commits are compared by it."""
    assert turn(100_000) == 0x7A23_DE50


def test_table_says_met_or_not_beside_each_target(capsys):
    print_figures(PARTS, as_json=False)
    out = capsys.readouterr().out
    lines = {line.split()[1]: line for line in out.splitlines() if line.count("\u2502") > 4}
    assert " yes " in lines["replay_fifo_s"]
    assert " NO " in lines["replay_default_s"]
    assert "<= 60 s" in lines["replay_default_s"]


def test_every_range_says_where_its_bound_comes_from():
    ranges = json.loads(scheduler.RANGES.read_text(encoding="utf-8"))
    assert set(ranges) == set(KEYS) - {"peak_mib"} | {"pass_shared_ratio"} | BOARD
    for bound in ranges.values():
        assert set(bound) == {"bound", "unit", "direction", "origin"}
        assert bound["direction"] in {"at most", "at least"}
        assert bound["origin"].startswith(("DESIGN 6", "issue 3", "issue 21"))


def test_drawn_trace_has_the_load_of_the_public_one_and_is_the_same_every_time():
    trace = synthetic_trace(jobs=5000)
    assert trace == synthetic_trace(jobs=5000)
    assert trace != synthetic_trace(jobs=5000, seed=2)
    work_gpu_s = sum(job.gpus * job.duration_s for job in trace.jobs)
    assert work_gpu_s / (NODES * GPUS_PER_NODE * trace.jobs[-1].submit_s) == pytest.approx(LOAD, rel=0.01)
    assert [job.submit_s for job in trace.jobs] == sorted(job.submit_s for job in trace.jobs)


@pytest.mark.slow
def test_part_is_measured_in_a_process_of_its_own():
    part = measure_in_child("decision", 1)
    assert len(part.runs["decision_1213_ms"]) == 1
    assert 10.0 < part.peak_mib < 1000.0
