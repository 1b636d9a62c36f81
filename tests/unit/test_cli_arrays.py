"""Arrays and later begins on the screen, and the words that a command answers with."""

import time

import pytest

from phalanx.cli.jobs.array_page import array_page, array_view
from phalanx.cli.jobs.job_actions import _summary
from phalanx.cli.jobs.job_end import end_summary
from phalanx.cli.jobs.ps import job_lines, waiting_reason
from phalanx.cli.terminal import Terminal
from phalanx.cli.top.rendering import job_line
from phalanx.core.work.job import JobState
from tests.golden.cli.views import NOW_S, job

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)
PENDING = JobState.PENDING


def element(index, state=PENDING, **more):
    fields = {"array_id": "17", "array_index": index, "array_size": 100, "gpus": "1", "gpu_count": 1, "shape": "1 x 1"}
    return job(17 + index, "eval", state, **{"id": f"17_{index}", **fields, **more})


def whole(states, detail="", state=PENDING):
    return element(0, state, id="17", array_max=8, elements="0-99", states=states, detail=detail, array_index=None)


def test_waiting_elements_are_one_line():
    lines = job_lines(
        [element(99, elements="40-99", array_max=8, detail="enough run"), element(3, JobState.RUNNING, nodes=["n0"])],
        WIDE,
        NOW_S,
    )
    assert [line.split()[0] for line in lines] == ["JOB", "17_[40-99]%8", "17_3"]


def test_a_job_that_can_never_start_says_so():
    why = "8 GPUs asked; queue nlp allows 6 a user"
    never = job(7, "train", PENDING, reason="never", detail=why)
    assert job_lines([never], WIDE, NOW_S)[1].endswith(f"NEVER: {why}")
    narrow = Terminal(width=60, height=40, interactive=False, colour=False, blocks=True)
    assert job_lines([never], narrow, NOW_S)[-1] == f"job 7 waits: NEVER: {why}"
    assert job_line(never).startswith(f"job 7 waits: NEVER: {why}")


def test_many_ranges_are_cut_at_a_comma():
    (_, line) = job_lines([element(99, elements=",".join(map(str, range(0, 90, 3))))], WIDE, NOW_S)
    assert line.split()[0] == "17_[0,3,6,9,12,15,18,21,24,...]"


def test_a_whole_array_on_one_screen():
    page = array_page(
        whole(
            {PENDING: 60, JobState.RUNNING: 8, JobState.FAILED: 2, JobState.SUCCEEDED: 30},
            "60 pending; unsuccessful: 3,9",
        ),
        WIDE,
    )
    assert page[0] == "array 17 eval: 100 elements, 17_[0-99], at most 8 at once"
    assert [line.split()[:2] for line in page if line.startswith(("pending", "running", "failed", "succeeded"))] == [
        ["pending", "60"],
        ["running", "8"],
        ["succeeded", "30"],
        ["failed", "2"],
    ]
    assert page[-1] == "unsuccessful: 3,9"


def test_what_comes_next_depends_on_whether_any_is_left():
    assert array_view(whole({PENDING: 100})).next_command == "phalanx ps --name eval"
    assert array_view(whole({JobState.SUCCEEDED: 100}, state=JobState.SUCCEEDED)).next_command == "phalanx logs 17_0"


@pytest.mark.parametrize(
    ("verb", "words"),
    [("cancel", "are cancelled"), ("hold", "are held"), ("release", "are released"), ("requeue", "are requeued")],
)
def test_verbs_tell_of_the_whole_array(verb, words):
    told = _summary(whole({PENDING: 100}, "100 pending"), verb)
    assert words in told
    assert "(100 pending)" in told


def test_the_end_of_an_array_counts_its_elements():
    over = whole(
        {JobState.SUCCEEDED: 98, JobState.FAILED: 2}, "98 succeeded, 2 failed; unsuccessful: 3,9", JobState.FAILED
    )
    assert end_summary(over) == "array 17 failed: 98 succeeded, 2 failed; unsuccessful: 3,9"


def test_a_job_ended_for_its_parent_says_which():
    why = "job 12 failed, so afterok:12 can never be met"
    assert end_summary(job(13, "x", JobState.CANCELLED, detail=why)) == f"job 13 was cancelled: {why}"
    assert (
        end_summary(job(13, "x", JobState.CANCELLED, detail="no need", cancelled_by="ada"))
        == "job 13 was cancelled by ada"
    )


def test_begin_is_told_by_the_clock_here(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    waits = job(5, "x", PENDING, reason="begin_time", detail="starts in 2h", begin_s=1_893_484_800.0)
    assert waiting_reason(waits, NOW_S) == "not before 2030-01-01 08:00"
    monkeypatch.undo()
    time.tzset()
