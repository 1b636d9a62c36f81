"""Arrays and later begins on the screen, and the words that a command answers with."""

# The heads here are drawings.
# mypy: disable-error-code="arg-type"

import time
from types import SimpleNamespace

import pytest

from phalanx.cli.jobs.array_logs import print_array_logs
from phalanx.cli.jobs.array_page import array_page, array_view
from phalanx.cli.jobs.job_actions import _summary
from phalanx.cli.jobs.job_end import end_summary
from phalanx.cli.jobs.job_lookup import resolve_job, resolve_node
from phalanx.cli.jobs.ps import job_lines, waiting_reason
from phalanx.cli.terminal import Terminal
from phalanx.cli.top.rendering import job_line
from phalanx.core.errors import NotFound
from phalanx.core.ids import Epoch
from phalanx.core.work.states import JobState
from phalanx.wire.api.output import LogChunk, LogsReply
from tests.golden.cli.views import NOW_S, job

WIDE = Terminal(width=160, height=40, interactive=False, colour=False, blocks=True)
PENDING = JobState.PENDING


def element(index, state=PENDING, **more):
    fields = {"array_id": "17", "array_index": index, "array_size": 100, "gpus": "1", "gpu_count": 1, "shape": "1 x 1"}
    return job(17 + index, "eval", state, **{"id": f"17_{index}", **fields, **more})


def whole(states, detail="", state=PENDING, **more):
    fields = {"array_max": 8, "elements": "0-99", "states": states, "detail": detail, "array_index": None}
    return element(0, state, id="17", **fields, **more)


@pytest.mark.parametrize(
    ("word", "job_id"),
    [
        ("17_3", "17_3"),
        ("eval", "17"),
        ("eval_3", "17_3"),
        ("eval_03", "17_3"),
        ("run_5", "9"),
        ("run", "8"),
    ],
)
def test_a_job_is_named_by_its_number_or_name_and_an_element_by_that_of_its_array(word, job_id):
    assert resolve_job(NamedHead(), word) == job_id


@pytest.mark.parametrize("word", ["run_7", "eval_", "eval_x", "_3", "eval_3_4", "other_3", ""])
def test_a_word_that_names_no_element_names_no_job(word):
    with pytest.raises(NotFound, match="no job"):
        resolve_job(NamedHead(), word)


def test_a_node_of_an_element_is_named_too():
    for word, place in (("eval_3.1", ("17_3", 1)), ("17_3.2", ("17_3", 2)), ("run", ("8", 0)), ("run.1", ("8", 1))):
        assert resolve_node(NamedHead(), word) == place
    assert resolve_node(NamedHead(), "gpt-0.5") == ("7", 0), "the name of a job may end like a rank"


class NamedHead:
    """A head with an array `eval`, and with jobs `run`, `run_5` and `gpt-0.5`."""

    def jobs(self, name, limit):
        assert limit == 1
        run, fine = job(8, "run", PENDING), job(9, "run_5", PENDING)
        known = {"eval": element(99), "run": run, "run_5": fine, "gpt-0.5": job(7, "gpt-0.5", PENDING)}
        found = known.get(name)
        return SimpleNamespace(jobs=[] if found is None else [found])


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
    assert array_view(whole({JobState.SUCCEEDED: 100}, state=JobState.SUCCEEDED)).next_command == "phalanx get 17"
    failed = whole(
        {JobState.SUCCEEDED: 99, JobState.FAILED: 1},
        state=JobState.FAILED,
        state_elements={JobState.SUCCEEDED: "0-4,6-99", JobState.FAILED: "5"},
    )
    assert array_view(failed).next_command == "phalanx logs 17_5"
    assert [line.split()[-1] for line in array_page(failed, WIDE)[-2:]] == ["0-4,6-99", "5"]


def test_ended_elements_are_one_line():
    fields = {"started_s": NOW_S - 9, "ended_s": NOW_S - 5}
    lines = job_lines(
        [
            element(
                7, JobState.FAILED, elements="2,7", array_max=8, exit_code=3, detail="rank 0: exit code 3", **fields
            ),
            element(9, JobState.FAILED, exit_code=4, detail="rank 0: exit code 4", **fields),
        ],
        WIDE,
        NOW_S,
    )
    assert lines[1].split() == [
        "17_[2,7]",
        "eval",
        "failed",
        "1x1",
        "ada",
        *["17_7:", "rank", "0:", "exit", "code", "3"],
    ]
    assert lines[2].split()[:5] == ["17_9", "eval", "failed", "1x1", "4.0s"]


def test_output_of_all_elements_names_each(capsys):
    head = ArrayHead({0: ["zero\n"], 1: ["one\npart"], 2: []}, {"succeeded": "0-1", "pending": "2"})
    head.print_logs(follow=False)
    assert capsys.readouterr().out == "[17_0] zero\n[17_1] one\n[17_1] part\n"
    assert "17_2" not in head.read, "it has not started"


def test_following_an_array_ends_with_its_last_element(capsys, monkeypatch):
    head = ArrayHead(
        {0: ["a", "b\n"], 1: ["late\n"]},
        {"running": "0", "pending": "1"},
        {"running": "0-1"},
        {"succeeded": "0", "failed": "1"},
    )
    monkeypatch.setattr("time.sleep", lambda _: head.go_on())
    head.print_logs(follow=True)
    assert capsys.readouterr().out == "[17_0] ab\n[17_1] late\n"


class ArrayHead:
    """A head with one array: pieces of output by index, one in each answer, and the states of its elements, one step after the other."""

    def __init__(self, pieces, *steps):
        self.pieces = {f"17_{index}": list(parts) for index, parts in pieces.items()}
        self.steps = list(steps)
        self.read = []

    def print_logs(self, *, follow):
        print_array_logs(self, self.array(), rank=None, tail=None, attempt=None, follow=follow, as_json=False)

    def go_on(self):
        self.steps.pop(0)

    def array(self):
        elements = {JobState(state): numbers for state, numbers in self.steps[0].items()}
        state = (
            PENDING if PENDING in elements else JobState.RUNNING if JobState.RUNNING in elements else JobState.FAILED
        )
        return whole(dict.fromkeys(elements, 1), state=state, state_elements=elements)

    def job(self, job_id):
        if job_id == "17":
            return SimpleNamespace(job=self.array())
        return SimpleNamespace(attempts=[SimpleNamespace(grants=[SimpleNamespace(tasks=1)])])

    def logs(self, job_id, *, rank, epoch, cursor):
        self.read.append(job_id)
        parts = self.pieces[job_id]
        if self.steps[0].get("running") or not parts:
            texts = [parts.pop(0)] if parts else []
        else:
            texts, self.pieces[job_id] = parts, []
        return LogsReply(
            chunks=[LogChunk(stream="rank-0", rank=0, epoch=Epoch(1), offset=0, end=0, text=text) for text in texts],
            cursor="c",
        )


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("cancel", "are cancelled"),
        ("hold", "are held"),
        ("release", "are released"),
        ("park", "are parked"),
        ("resume", "are resumed"),
    ],
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
