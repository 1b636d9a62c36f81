"""Rollups of rollups are rollups of the values, chunks survive packing, and a curve keeps the shape of what it covers."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from phalanx.core.work.pace import TimedStep
from phalanx.store.history.job_curves import POINTS_MAX, JobCurve
from phalanx.store.history.metrics import (
    DEVICE_METRICS,
    NODE_METRICS,
    UNKNOWN,
    decode,
    metrics_of,
    reason_rows,
)
from phalanx.store.history.packing import pack, pack_values, unpack
from phalanx.store.history.rollups import COUNT, MAXIMUM, MEAN, MINIMUM, combined, laid_out, of_values

ROWS = len(NODE_METRICS) + len(DEVICE_METRICS)
METRICS = metrics_of(1)
NUMBERS = ~reason_rows(METRICS)


def codes(times):
    """Codes of ten-second values of a node with one device; a sixth of them unknown, and sets of throttle reasons small."""
    some = st.one_of(st.just(UNKNOWN), *[st.integers(0, top) for top in (1, 63, 200, 4000, 5800)])
    return arrays.arrays(np.int16, (ROWS, times), elements=some).map(within_range)


def within_range(found):
    found[~NUMBERS] = np.where(found[~NUMBERS] < 0, UNKNOWN, found[~NUMBERS] & 63)
    return found


@given(codes(360))
def test_an_hour_from_five_minutes_is_the_hour_from_its_values(values):
    raw = of_values(0, 10, (0,), values)
    whole, halfway = combined(raw, 3600), combined(combined(raw, 300), 3600)
    for exact in (COUNT, MINIMUM, MAXIMUM):
        assert np.array_equal(whole.cells_FRT[exact], halfway.cells_FRT[exact])
    # Each of the two roundings moves a mean by half a unit at most.
    assert np.abs(whole.cells_FRT[MEAN].astype(int) - halfway.cells_FRT[MEAN]).max() <= 1


@given(codes(360))
def test_a_mean_is_the_mean_of_the_values_within_half_a_unit(values):
    whole = combined(of_values(0, 10, (0,), values), 3600).cells_FRT[:, :, 0]
    exact = decode(values, METRICS)
    for row, metric in enumerate(METRICS):
        known = exact[row][~np.isnan(exact[row])]
        assert whole[COUNT, row] == known.size
        if not known.size:
            assert whole[MEAN, row] == UNKNOWN
            continue
        if metric.reasons:
            assert abs(whole[MEAN, row] / 200 - np.mean(values[row][values[row] >= 0] > 0)) <= 0.0025 + 1e-9
            assert whole[MAXIMUM, row] == np.bitwise_or.reduce(values[row][values[row] >= 0])
        elif metric.rate:
            assert abs(decode(whole[MEAN], METRICS)[row] - known.mean()) <= 0.002 * (known.mean() + 1000)
        else:
            assert abs(whole[MEAN, row] * metric.unit - known.mean()) <= metric.unit * 0.5000001
        if not metric.reasons:
            assert (whole[MINIMUM, row], whole[MAXIMUM, row]) == (
                values[row][values[row] >= 0].min(),
                values[row].max(),
            )


@given(codes(24), st.integers(0, 1 << 33))
def test_a_chunk_is_what_was_packed(values, begin_s):
    found = unpack(pack_values(begin_s, 10, (3,), values))
    assert (found.begin_s, found.step_s, found.devices) == (begin_s, 10, (3,))
    assert np.array_equal(found.cells_FRT, of_values(begin_s, 10, (3,), values).cells_FRT)
    rolled = combined(found, 60)
    assert np.array_equal(unpack(pack(rolled)).cells_FRT, rolled.cells_FRT)


@given(codes(24), codes(24))
def test_a_later_part_replaces_what_it_knows(earlier, later):
    first, second = of_values(0, 10, (0,), earlier), of_values(0, 10, (0,), later)
    found = laid_out([first, second], 0, 240, 10).cells_FRT[MAXIMUM]
    assert np.array_equal(found, np.where(later >= 0, later, earlier))


LOSSES = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=1500)


@given(LOSSES, st.integers(1, 100))
def test_a_curve_keeps_first_last_least_and_most(losses, stride):
    curve = JobCurve()
    for number, loss in enumerate(losses):
        curve.add(TimedStep(number * stride, float(number), 0.5, loss))
    known = [loss for loss in losses if loss is not None]
    points = JobCurve.unpack(curve.pack()).points
    assert len(points) <= POINTS_MAX
    assert sum(point.steps for point in points) == len(losses)
    assert sum(point.seconds for point in points) == 0.5 * len(losses)
    assert all(earlier.last_step < later.first_step for earlier, later in pairwise(points))
    if known:
        assert next(point.loss_first for point in points if not math.isnan(point.loss_first)) == known[0]
        assert [point.loss_last for point in points if not math.isnan(point.loss_last)][-1] == known[-1]
        assert min(point.loss_min for point in points if not math.isnan(point.loss_min)) == min(known)
        assert max(point.loss_max for point in points if not math.isnan(point.loss_max)) == max(known)


@given(st.integers(1, 1200), st.integers(0, 1200))
def test_repeated_steps_count_as_they_ran_last(steps, again):
    again = min(again, steps)
    curve = JobCurve()
    for step in [*range(steps), *range(again, steps)]:
        curve.add(TimedStep(step, float(step), 1.0, float(step)))
    assert round(sum(point.steps for point in curve.points)) == steps
    assert round(sum(point.seconds for point in curve.points)) == steps
    assert curve.points[-1].last_step == steps - 1
