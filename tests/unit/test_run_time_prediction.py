"""How long a job will run: what its likes say, what nobody can say, and that the interval means what it says on the public traces."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import heapq
import os
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.scheduling.estimates.run_time_prediction import (
    ENDS_KEPT_PER_NAME,
    JobTraits,
    RunTimePredictor,
    traits_of,
)
from phalanx.simulator.trace import read_trace
from tests.builders import job

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("PHALANX_SHARED", ROOT.parent / "shared")) / "data" / "traces"

ADA = JobTraits(user="ada", name="train", gpus=8, queue="q", command=1)


def learned(*ends):
    predictor = RunTimePredictor()
    for traits, run_s in ends:
        predictor.record_end(traits, run_s)
    return predictor


def told(predictor, traits=ADA, **now):
    found = predictor.predict(traits, **now)
    return found.p10_s, found.p50_s, found.p90_s


def test_nothing_is_known_of_the_first_job():
    assert told(RunTimePredictor()) == (0.0, None, None)
    assert told(RunTimePredictor(), ran_s=60.0) == (60.0, None, None)


def test_time_limit_bounds_what_nobody_knows():
    assert told(RunTimePredictor(), run_max_s=3600.0) == (0.0, 3600.0, 3600.0)


def test_nine_ends_give_a_range_and_fewer_do_not():
    nine = [(ADA, 100.0 * number) for number in range(1, 10)]
    assert told(learned(*nine)) == (100.0, 500.0, 900.0)
    low_s, middle_s, high_s = told(learned(*nine[:-1]))
    assert (low_s, middle_s, high_s) == (0.0, 450.0, None)


def test_narrowest_group_with_enough_ends_speaks():
    other = JobTraits(user="ada", name="other", gpus=8, queue="q", command=2)
    predictor = learned(*[(other, 1000.0)] * 12, *[(ADA, 10.0)] * 8)
    assert predictor.predict(ADA).similarity == "of ada with 8 GPUs"
    predictor.record_end(ADA, 10.0)
    found = predictor.predict(ADA)
    assert (found.similarity, found.sample_count, found.p90_s) == (
        "of ada named train, with this command and 8 GPUs",
        9,
        10.0,
    )


def test_new_user_is_told_from_jobs_of_the_size():
    predictor = learned(*[(JobTraits(user="bob", gpus=8), 60.0)] * 10, *[(JobTraits(user="bob", gpus=1), 5.0)] * 10)
    assert predictor.predict(JobTraits(user="eve", gpus=7)).p50_s == 60.0
    assert predictor.predict(JobTraits(user="eve", gpus=64)).similarity == "of all users"


def test_job_that_has_run_is_compared_with_those_that_ran_longer():
    predictor = learned(*[(ADA, 10.0)] * 20, *[(ADA, 1000.0 + number) for number in range(9)])
    low_s, middle_s, high_s = told(predictor, ran_s=100.0)
    assert (round(low_s), middle_s, round(high_s)) == (1000, 1004.0, 1008)
    assert told(predictor, ran_s=2000.0) == (2000.0, None, None)  # longer than any: nobody knows


def test_owner_who_changed_the_job_is_believed_anew():
    predictor = learned(*[(ADA, 10.0)] * ENDS_KEPT_PER_NAME, *[(ADA, 500.0)] * ENDS_KEPT_PER_NAME)
    assert predictor.predict(ADA).p10_s == 500.0


def test_what_keeps_missing_is_widened():
    predictor = learned(*[(ADA, 100.0 + number % 10) for number in range(100)])
    share = predictor.high
    for number in range(40):
        predictor.record_end(ADA, 1000.0 * (number + 1))  # each longer than was foretold
    assert predictor.high < share / 2


def test_traits_of_equal_jobs_are_equal():
    assert traits_of(job("a", gpus=8)) == traits_of(replace(job("a", gpus=8), id="b", seq=7))
    assert traits_of(job("a", gpus=8)) != traits_of(job("a", gpus=4))


@pytest.mark.skipif(
    not TRACES.is_dir(), reason="the public traces are not beside the checkout (../shared) nor at PHALANX_SHARED"
)
@pytest.mark.parametrize("name", ["philly_2017_oct", "muri_trace1", "muri_trace3"])
def test_four_of_five_end_within_the_interval(name):
    """Each job is foretold at its submit from what had ended by then, by virtual cluster and GPUs alone: the traces know no names."""
    predictor, running, inside, outside = RunTimePredictor(), [], 0, 0
    for one in read_trace((TRACES / f"{name}.csv").read_text().splitlines()).jobs:
        while running and running[0][0] <= one.submit_s:
            _, _, traits, run_s = heapq.heappop(running)
            predictor.record_end(traits, run_s)
        traits = JobTraits(user=one.virtual_cluster, gpus=one.gpus)
        found = predictor.predict(traits)
        if found.p90_s is not None:
            within = found.p10_s <= one.duration_s <= found.p90_s
            inside, outside = inside + within, outside + (not within)
        heapq.heappush(running, (one.submit_s + one.duration_s, one.line, traits, one.duration_s))
    assert inside + outside > 900
    assert 0.70 <= inside / (inside + outside) <= 0.90
