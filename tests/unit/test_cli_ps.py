"""The short list of `phalanx ps`: what ended lately, failures first, and reasons in the clock of the reader."""

from types import SimpleNamespace

from phalanx.cli.jobs import ps, show
from phalanx.cli.terminal import Terminal
from phalanx.core.work.states import JobState
from tests.golden.cli.views import NOW_S, job

NARROW = Terminal(width=60, height=40, interactive=False, colour=False, blocks=True)


def ended(seq, state, ago_s, **more):
    return job(seq, f"job-{seq}", state, started_s=NOW_S - ago_s - 5, ended_s=NOW_S - ago_s, **more)


class Head:
    """A head with ended jobs; it answers only what was asked for."""

    def __init__(self, *jobs, page=1000):
        self._jobs, self._page = jobs, page

    def jobs(self, *, state, limit, ended_since_s=None, **_):
        found = [one for one in self._jobs if one.state in state]
        if ended_since_s is not None:
            found = [one for one in found if one.ended_s >= ended_since_s]
        limit = min(limit, self._page)
        return SimpleNamespace(jobs=found[:limit], next="more" if len(found) > limit else None)

    def services(self):
        return []


def listed(monkeypatch, head, limit=100):
    monkeypatch.setattr("time.time", lambda: NOW_S)
    return ps._shown(head, everything=False, states=(), limit=limit, filters={}, with_services=True)


def test_a_failure_of_a_minute_ago_is_shown_behind_a_hundred_newer_successes(monkeypatch):
    successes = [ended(seq, JobState.SUCCEEDED, 30) for seq in range(101, 1, -1)]
    failures = [ended(1, JobState.FAILED, 60, exit_code=3), ended(200, JobState.TIMEOUT, 400)]
    view = listed(monkeypatch, Head(*successes, *failures, ended(201, JobState.FAILED, 700)))
    assert [one.seq for one in view.value] == [1, 200, 101, 100, 99]
    assert view.notes == ("97 more ended in the last 10 minutes: phalanx ps -a",)
    assert view.next_command == "phalanx logs 1"


def test_failures_without_a_row_are_counted(monkeypatch):
    rows = [ended(seq, JobState.FAILED, 30) for seq in range(1, 6)]
    folded = ended(30, JobState.FAILED, 40, array_id="20", array_index=10, elements="0-9")
    view = listed(monkeypatch, Head(*rows, folded, ended(40, JobState.SUCCEEDED, 5)))
    assert view.notes == ("11 more ended in the last 10 minutes, 10 failed: phalanx ps -a",)


def test_a_count_of_one_page_says_that_there_are_more(monkeypatch):
    view = listed(monkeypatch, Head(*[ended(seq, JobState.SUCCEEDED, 30) for seq in range(20)], page=10))
    assert view.notes == ("at least 5 more ended in the last 10 minutes: phalanx ps -a",)


def test_next_command_is_one_that_the_caller_may_type(monkeypatch):
    theirs = job(9, "theirs", JobState.RUNNING, started_s=NOW_S, command="")
    assert listed(monkeypatch, Head(theirs)).next_command == "phalanx show 9"
    assert listed(monkeypatch, Head(theirs, ended(3, JobState.SUCCEEDED, 5))).next_command == "phalanx show 9"
    mine = job(8, "mine", JobState.RUNNING, started_s=NOW_S)
    assert listed(monkeypatch, Head(theirs, mine)).next_command == "phalanx logs -f 8"
    assert show._next(theirs, has_files=False) == "phalanx usage 9"
    assert show._next(mine, has_files=False) == "phalanx logs -f 8"


def empty(head, everything=False, states=(), **filters):
    """The lines and the next command of an empty list."""
    view = ps._shown(head, everything=everything, states=states, limit=9, filters=filters, with_services=False)
    return view.lines(NARROW), view.next_command


def test_an_empty_list_says_whether_only_some_jobs_were_asked_for():
    run = "phalanx run --gpus 1 -- python train.py"
    assert empty(Head(), fold=True, label=()) == (["no running or waiting jobs"], run)
    assert empty(Head(), everything=True, label=()) == (["no jobs yet"], run)
    for filters in (
        {"queue": "nope"},
        {"label": ("exp=7",)},
        {"states": ("failed",)},
        {"everything": True, "name": "x"},
    ):
        assert empty(Head(), **filters) == (["no job matches"], "phalanx ps -a")


def test_the_line_below_the_table_does_not_count_down_from_an_old_answer():
    waits = job(
        5, "later", JobState.PENDING, reason="begin_time", detail="requested begin time is in 2h00m", begin_s=NOW_S + 60
    )
    lines = ps.job_lines([waits], Terminal(width=44, height=40, interactive=False, colour=False, blocks=True), NOW_S)
    assert lines[-1].startswith("job 5 waits: not before ")


def test_a_short_reason_is_not_repeated_below_the_table():
    waits = job(5, "x", JobState.PENDING, reason="held", detail="held")
    assert len(ps.job_lines([waits], NARROW, NOW_S)) == 2
