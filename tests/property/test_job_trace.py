"""The trace of any ended job: spans nest and cover it, and the same records give the same spans."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from phalanx.core.accounting.job_trace import EVENTS_MAX, TEXT_MAX, job_trace, trace_id_of
from phalanx.core.state.history import HistoryLine
from phalanx.core.work.attempt import EndCause
from phalanx.core.work.states import TERMINAL_STATES, JobState
from tests.unit.test_usage_summary import T, make_attempt, make_job

KINDS = [
    *("placed", "starting", "running", "restart", "stopping", "node_lost", "task_failed", "checkpoint", "requeued"),
    *("held", "released", "dependencies_met", "asleep", "awake", "unknown"),
]
SECONDS = st.floats(-50, 400, allow_nan=False)  # clocks may be off


@st.composite
def stories(draw):
    state = draw(st.sampled_from(sorted(TERMINAL_STATES)))
    job = make_job(state, ended_s=draw(SECONDS))
    job = replace(
        job, spec=replace(job.spec, hold=draw(st.booleans()), begin_s=draw(st.none() | SECONDS.map(T.__add__)))
    )
    attempts = [
        make_attempt(number + 1, draw(SECONDS), draw(SECONDS), cause=draw(st.none() | st.sampled_from(EndCause)))
        for number in range(draw(st.integers(0, 4)))
    ]
    lines = [
        HistoryLine(
            seq=seq + 1,
            at_s=T + draw(SECONDS),
            kind=draw(st.sampled_from(KINDS)),
            text="what happened",
            job_id="1",
            epoch=draw(st.sampled_from([None, 1, 2, 3, 4])),
        )
        for seq in range(draw(st.integers(0, 12)))
    ]
    return job, attempts, lines


@given(stories())
def test_children_lie_within_their_parent_and_cover_it(story):
    spans = job_trace(*story)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    [root] = [span for span in spans if span.parent_id == 0]
    assert root is spans[0]
    assert {span.trace_id for span in spans} == {trace_id_of(story[0])}
    children = defaultdict(list)
    for span in spans:
        assert span.begin_ns <= span.end_ns
        assert all(span.begin_ns <= event.at_ns <= span.end_ns for event in span.events)
        if span.parent_id:
            parent = by_id[span.parent_id]
            assert parent.begin_ns <= span.begin_ns <= span.end_ns <= parent.end_ns
            children[span.parent_id].append(span)
    for parent_id, found in children.items():
        parent = by_id[parent_id]
        assert all(one.end_ns == other.begin_ns for one, other in pairwise(found))
        assert (found[0].begin_ns, found[-1].end_ns) == (parent.begin_ns, parent.end_ns)
    assert {span.name for span in children[root.span_id]} <= {"waiting", "attempt"}
    waits = [span.attributes["phalanx.wait.share"] for span in spans if span.name == "waiting"]
    assert not waits or abs(sum(waits) - 1) < 0.01


@given(stories())
def test_the_same_records_give_the_same_spans(story):
    assert job_trace(*story) == job_trace(*story)
    job, attempts, lines = story
    other = replace(job, folder="1-other")  # the same number, in a restored database
    assert not {span.span_id for span in job_trace(*story)} & {
        span.span_id for span in job_trace(other, attempts, lines)
    }


def line(at_s, kind, epoch=None, text="x"):
    return HistoryLine(seq=1, at_s=T + at_s, kind=kind, text=text, job_id="1", epoch=epoch)


def test_a_job_that_loses_a_node_and_resumes():
    attempts = [
        make_attempt(1, 10, 50, cause=EndCause.NODE_FAIL, why="n1 is lost"),
        make_attempt(2, 60, 100, cause=EndCause.SUCCEEDED),
    ]
    lines = [
        line(4, "dependencies_met"),
        line(10, "placed", 1),
        *(line(15, "starting", 1), line(20, "running", 1), line(30, "checkpoint", 1), line(45, "node_lost", 1)),
        *(line(60, "placed", 2), line(61, "starting", 2), line(62, "running", 2), line(99, "stopping", 2)),
    ]
    root, *spans = job_trace(make_job(ended_s=100), attempts, lines)
    drawn = [
        (span.name, (span.begin_ns - root.begin_ns) // 10**9, (span.end_ns - root.begin_ns) // 10**9) for span in spans
    ]
    assert drawn == [
        *(("waiting", 0, 4), ("waiting", 4, 10)),
        *(("attempt", 10, 50), ("preparing", 10, 15), ("starting", 15, 20), ("running", 20, 45), ("stopping", 45, 50)),
        ("waiting", 50, 60),
        *(
            ("attempt", 60, 100),
            ("preparing", 60, 61),
            ("starting", 61, 62),
            ("running", 62, 99),
            ("stopping", 99, 100),
        ),
    ]
    waits = [span.attributes for span in spans if span.name == "waiting"]
    assert [wait["phalanx.wait.reason"] for wait in waits] == ["dependency", "capacity", "capacity"]
    assert [wait["phalanx.wait.share"] for wait in waits] == [0.2, 0.3, 0.5]
    assert waits[2]["phalanx.wait.after"] == "node_fail"
    first, second = [span for span in spans if span.name == "attempt"]
    assert (first.failure, second.failure, root.failure) == ("n1 is lost", "", "")
    assert first.attributes["phalanx.attempt.nodes"] == ["n0", "n1"]
    assert [event.name for event in first.events] == ["placed", "starting", "running", "checkpoint", "node_lost"]


def test_a_job_that_is_held_and_then_cancelled_has_only_waited():
    job = make_job(JobState.CANCELLED, ended_s=10)
    lines = [line(2, "held"), line(7, "released"), line(10, "cancelled")]
    root, *waits = job_trace(replace(job, cancelled_by="ada"), [], lines)
    assert [wait.attributes["phalanx.wait.reason"] for wait in waits] == ["capacity", "held", "capacity"]
    assert (root.failure, root.attributes["phalanx.job.cancelled_by"]) == ("", "ada")


def test_events_and_texts_are_limited():
    lines = [line(1, "checkpoint", text="x" * 10_000) for _ in range(EVENTS_MAX + 5)]
    root = job_trace(make_job(ended_s=10), [], lines)[0]
    assert len(root.events) == EVENTS_MAX
    assert root.attributes["phalanx.events_left_out"] == 5
    assert {len(event.text) for event in root.events} == {TEXT_MAX}
