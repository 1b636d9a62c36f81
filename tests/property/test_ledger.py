"""Invariant 18 for histories that no drawing covers: billed is the sum of attempt spans, and the ledger sums to it exactly."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.accounting.ledger import (
    TimeCategory,
    attempt_ledgers,
    span_us,
    sum_ledgers,
)
from phalanx.core.accounting.lineage import split_steps
from phalanx.core.accounting.reports import read_reports
from phalanx.core.accounting.usage_summary import build_usage_summary
from phalanx.core.ids import Epoch, Generation, JobId, NodeId, ProjectId, QueueId, UserId
from phalanx.core.work.allocation import Allocation, NodeGrant
from phalanx.core.work.attempt import Attempt, EndCause
from phalanx.core.work.job import Job, PublishedCheckpoint
from phalanx.core.work.spec import JobSpec, Role
from phalanx.core.work.states import AttemptState, JobState

T = 1_700_000_000.0
seconds = st.floats(0, 1000, allow_nan=False).map(lambda value: T + value)
maybe_seconds = st.none() | seconds
generation = st.integers(0, 3)

lines = st.one_of(
    st.fixed_dictionaries(
        {
            "k": st.just("step"),
            "rank": st.integers(0, 1),
            "generation": generation,
            "step": st.integers(1, 30),
            "begin_ns": st.integers(0, 10**12),
            "end_ns": st.integers(0, 10**12),
            "at_s": seconds,
            "loss": st.floats(allow_nan=True),
            "tokens": st.none() | st.integers(0, 10),
        }
    ),
    st.fixed_dictionaries(
        {
            "k": st.just("stall"),
            "rank": st.just(0),
            "generation": generation,
            "seconds": st.floats(),
            "cause": st.just("save"),
        }
    ),
    st.fixed_dictionaries(
        {
            "k": st.just("checkpoint"),
            "rank": st.just(0),
            "generation": generation,
            "step": st.integers(1, 30),
            "stall_s": st.floats(0, 5),
        }
    ),
    st.fixed_dictionaries(
        {"k": st.just("resumed"), "rank": st.just(0), "generation": generation, "step": st.integers(0, 30)}
    ),
)


@st.composite
def histories(draw):
    attempts, reports = [], {}
    count = draw(st.integers(0, 4))
    for epoch in range(1, count + 1):
        placed_s, ended_s = draw(seconds), draw(seconds)
        live = epoch == count and draw(st.booleans())
        grants = tuple(
            NodeGrant(
                node_id=NodeId(f"n{rank}"),
                node_rank=rank,
                devices=tuple(range(devices)),
                cpus=1,
                memory_bytes=0,
                tasks=1,
                first_rank=rank,
            )
            for rank, devices in enumerate(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        )
        attempts.append(
            Attempt(
                job_id=JobId("1"),
                epoch=Epoch(epoch),
                folder=f"1-k/epoch-{epoch}-k",
                allocation=Allocation(grants=grants),
                placed_s=placed_s,
                ended_s=None if live else ended_s,
                state=AttemptState.RUNNING if live else AttemptState.ENDED,
                generation=Generation(draw(generation)),
                generation_s=draw(seconds),
                running_s=draw(maybe_seconds),
                first_running_s=draw(maybe_seconds),
                stop_cause=None if live else draw(st.sampled_from(EndCause)),
            )
        )
        reports[Epoch(epoch)] = [{**line, "epoch": epoch} for line in draw(st.lists(lines, max_size=25))]
    checkpoints = draw(st.lists(st.integers(0, 30), max_size=2))
    job = Job(
        id=JobId("1"),
        folder="1-k",
        seq=1,
        spec=JobSpec(name="j", role=Role(), workdir="/"),
        user=UserId("u"),
        project=ProjectId("p"),
        queue=QueueId("q"),
        submit_s=T,
        state=draw(st.sampled_from(JobState)),
        ended_s=draw(maybe_seconds),
        checkpoints=tuple(PublishedCheckpoint(epoch=Epoch(1), step=step, path="", digest="") for step in checkpoints),
    )
    return job, attempts, reports, draw(seconds)


def ledgers_of(job, attempts, reports, now_s):
    read = {epoch: read_reports(epoch, lines) for epoch, lines in reports.items()}
    kept = split_steps(job, attempts, read).kept
    return attempt_ledgers(attempts, read, kept, succeeded=job.state is JobState.SUCCEEDED, now_s=now_s)


@given(histories())
def test_ledger_sums_exactly_to_the_spans_of_the_attempts(history):
    ledgers = ledgers_of(*history)
    _job, attempts, _, now_s = history
    for attempt in attempts:
        begin_us, end_us = span_us(attempt, now_s=now_s)
        assert ledgers[attempt.epoch].total == end_us - begin_us
    billed = sum_ledgers(ledgers[attempt.epoch].times(attempt.allocation.gpus) for attempt in attempts)
    spans = [(span_us(attempt, now_s=now_s), attempt.allocation.gpus) for attempt in attempts]
    assert billed.total == sum((end - begin) * gpus for (begin, end), gpus in spans)


@given(histories())
def test_no_category_is_negative(history):
    for ledger in ledgers_of(*history).values():
        assert all(getattr(ledger, category.value) >= 0 for category in TimeCategory)


@given(histories(), st.randoms(use_true_random=False))
def test_usage_summary_does_not_depend_on_the_order_of_anything(history, random):
    job, attempts, reports, now_s = history
    before = build_usage_summary(job, attempts, reports, now_s=now_s)
    shuffled = {
        epoch: random.sample(each, len(each)) for epoch, each in random.sample(list(reports.items()), len(reports))
    }
    assert repr(build_usage_summary(job, random.sample(attempts, len(attempts)), shuffled, now_s=now_s)) == repr(before)


@given(histories())
def test_every_step_is_kept_or_lost_and_no_number_is_kept_twice(history):
    job, attempts, reports, _ = history
    read = {epoch: read_reports(epoch, each) for epoch, each in reports.items()}
    lineage = split_steps(job, attempts, read)
    made = [record for each in read.values() for record in each.steps]
    assert sorted(map(repr, (*lineage.kept, *lineage.lost))) == sorted(map(repr, made))
    numbers = [record.step for record in lineage.kept]
    assert len(numbers) == len(set(numbers))


@given(histories())
def test_shown_seconds_add_up_and_goodput_is_a_share(history):
    job, attempts, reports, now_s = history
    usage = build_usage_summary(job, attempts, reports, now_s=now_s)
    spent = usage.gpu_seconds
    parts = (spent.productive, spent.lost, spent.saving, spent.restarting, spent.idle)
    assert sum(round(Fraction(part) * 10**6) for part in parts) == round(Fraction(spent.total) * 10**6)
    assert usage.goodput is None or 0 <= usage.goodput <= 1
