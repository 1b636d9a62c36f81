"""The inference planner beside published serving rows; the bounds are those of benchmarks/ranges/serving_plan.json."""

import json
from collections import Counter
from pathlib import Path

import pytest

import benchmarks.serving_plan
from benchmarks.published_serving import MEASURED, METRICS, read_serving_rows
from benchmarks.serving_plan import format_figures, score, summary
from phalanx.planner.facts.serving_facts import serving_coefficients
from phalanx.planner.facts.table import is_date

RANGES = Path(benchmarks.serving_plan.__file__).parent / "ranges" / "serving_plan.json"


@pytest.fixture(scope="module")
def figures():
    return summary(score(read_serving_rows(), serving_coefficients()), [])


def test_every_row_names_its_source_and_date():
    rows = read_serving_rows()
    assert len(rows) >= 60
    assert len(Counter(row.source for row in rows)) >= 5
    lines = MEASURED.read_text(encoding="utf-8").splitlines()[1:]
    assert all(is_date(line.rsplit(",", 1)[1]) for line in lines)


def test_no_row_that_ran_is_refused(figures):
    assert figures["shipped"]["all"]["refused_that_ran"] == 0


def test_errors_stay_in_their_ranges(figures):
    bounds = json.loads(RANGES.read_text(encoding="utf-8"))
    for metric in METRICS:
        found = figures["shipped"]["all"][metric]
        assert found["mape"] <= bounds[f"{metric}_mape"]["bound"], metric
        assert found["median"] <= bounds[f"{metric}_median"]["bound"], metric
        assert found["coverage_80"] >= bounds[f"{metric}_coverage_80"]["bound"], metric


def test_the_table_has_a_line_for_each_source(figures):
    text = format_figures(figures)
    assert all(source[:35] in text for source in figures["shipped"]["sources"])
