"""The time line of a pipeline: nothing before what it needs, no stage at two things at once, and the bubble that the papers give."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.plan.pipeline_schedule import PipelinePass, pipeline_schedule
from tests.effort import examples


def end_s(slots):
    return max(slot.end_s for slot in slots)


def test_one_stage_has_no_bubble():
    slots = pipeline_schedule(1, 1, 3, forward_s=1.0, backward_s=2.0)
    assert [(slot.work.forward, slot.start_s) for slot in slots] == [
        (True, 0.0),
        (False, 1.0),
        (True, 3.0),
        (False, 4.0),
        (True, 6.0),
        (False, 7.0),
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 32)])
def test_bubble_of_1f1b_is_one_pass_for_each_other_stage(stages, micro_batches):
    slots = pipeline_schedule(stages, 1, micro_batches, forward_s=1.0, backward_s=2.0)
    assert end_s(slots) == pytest.approx(3.0 * (micro_batches + stages - 1))


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble(stages, chunks, micro_batches):
    slots = pipeline_schedule(stages, chunks, micro_batches, forward_s=1.0, backward_s=2.0)
    assert end_s(slots) == pytest.approx(3.0 * (micro_batches * chunks + stages - 1))


def test_rounds_that_are_not_whole_are_drawn_plain():
    slots = pipeline_schedule(4, 2, 6, forward_s=1.0, backward_s=2.0)
    assert {slot.work.chunk for slot in slots} == {0}
    assert end_s(slots) == pytest.approx(2 * 3.0 * (6 + 3))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.floats(0.1, 9), st.floats(0.1, 9))
def test_every_pass_happens_once_after_what_it_needs(stages, chunks, rounds, forward_s, backward_s):
    micro_batches = rounds * stages
    slots = pipeline_schedule(stages, chunks, micro_batches, forward_s=forward_s, backward_s=backward_s)
    at = {(slot.stage, slot.work): slot for slot in slots}
    assert len(at) == len(slots) == 2 * stages * chunks * micro_batches
    for stage in range(stages):
        own = [slot for slot in slots if slot.stage == stage]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(own))
    for micro_batch in range(micro_batches):
        way = [(stage, PipelinePass(micro_batch, chunk, True)) for chunk in range(chunks) for stage in range(stages)]
        way += [(stage, work._replace(forward=False)) for stage, work in reversed(way)]
        assert all(at[before].end_s <= at[after].start_s for before, after in itertools.pairwise(way))
