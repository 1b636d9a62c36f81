"""What a revision of a service changed, and what the command line says while a revision is rolled out."""

import msgspec
import pytest

from phalanx.cli.serve.rollout_wait import end_of_wait, progress_text, waiting_hint
from phalanx.cli.serve.service_page import service_page
from phalanx.cli.terminal import Terminal
from phalanx.core.errors import Conflict
from phalanx.core.work.job_file.request import spec_from_mapping
from phalanx.core.work.services.revision_changes import KeyChange, revision_changes
from phalanx.wire.api.services import ServiceDetail

FILE = {"type": "service", "name": "web", "run": "serve"}
SCREEN = Terminal(width=120, height=40, interactive=False, colour=False, blocks=True)


def changes(before, after):
    specs = [spec_from_mapping({**FILE, **one}, workdir="/w") for one in (before, after)]
    return [(one.key, one.before, one.after) for one in revision_changes(*specs)]


def test_changes_of_a_revision_are_the_keys_of_its_file():
    assert changes({}, {}) == []
    assert changes({"gpus": 1, "replicas": "1..4"}, {"gpus": 2, "replicas": 2, "ready": "/health"}) == [
        ("gpus", "1", "2"),
        ("replicas", "1..4", "2"),
        ("ready", "", "/health"),
    ]
    assert changes({"labels": {"a": "1"}}, {}) == [("labels a", "1", "")]
    assert changes({}, {"run": ["serve", "--with", "a b"]}) == [("run", "serve", "serve --with a b")]


def test_values_of_variables_are_in_no_change():
    found = changes({"env": {"KEY": "sesame", "OLD": "x"}}, {"env": {"KEY": "open", "NEW": "y"}})
    assert found == [("env KEY", "", ""), ("env NEW", "", ""), ("env OLD", "", "")]


def test_long_values_are_cut():
    ((_, before, after),) = changes({"run": "serve"}, {"run": "serve " + "x" * 5000})
    assert (before, len(after), after[-3:]) == ("serve", 200, "...")


def detail(replicas=(), revisions=(), **service):
    first = {"name": "web", "state": "starting", "user": "ada", "project": "p", "queue": "q", "created_s": 0}
    numbers = {"revision": 2, "served_revision": 1, "replicas": "2", "desired": 2, "ready": 0, "ready_check": "/"}
    return msgspec.convert(
        {"service": first | numbers | service, "revisions": list(revisions), "replicas": list(replicas)}, ServiceDetail
    )


def replica(number, state="running", **fields):
    first = {"id": str(number), "seq": number, "name": "web", "user": "ada", "project": "p", "queue": "q"}
    return first | {"submit_s": 0, "state": state, "revision": 2, "nodes": ["n0"], "service": "web"} | fields


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (detail(), None),
        (detail(state="ready", served_revision=1), None),
        (detail(state="degraded", served_revision=2), None),
        (detail([replica(7, restarts=5)]), None),
        (
            detail(state="ready", served_revision=2, ready=2),
            (0, "service web serves revision 2: 2 of 2 replicas ready"),
        ),
        (detail(state="sleeping", desired=0), (0, "service web has no replica, as wanted")),
        (detail(state="sleeping", asleep_wanted=2), (0, "service web sleeps: revision 2; phalanx wake web")),
        (
            detail(revision=1, failure="revision 2 was not rolled out: no"),
            (1, "revision 2 was not rolled out: no; ser"),
        ),
        (detail([replica(7, restarts=3)], served_revision=0), (1, "replica 7 failed 3 times")),
    ],
)
def test_wait_ends_when_the_revision_serves_or_cannot(found, end):
    got = end_of_wait(found, 2)
    if end is None:
        assert got is None
    else:
        assert got is not None
        assert (got[0], got[1][: len(end[1])]) == end


@pytest.mark.parametrize("found", [detail(revision=3), detail(stopped_by="bob")])
def test_wait_for_a_revision_that_was_replaced_or_stopped_ends_with_an_error(found):
    with pytest.raises(Conflict):
        end_of_wait(found, 2)


def test_progress_says_what_the_replicas_do_that_are_not_ready_and_what_to_type():
    waits = replica(8, "pending", reason="resources", detail="needs 1 x 2 GPUs; 1 free", nodes=[])
    runs = replica(9, attempt_state="running", port=8000)
    old, going = replica(3, revision=1), replica(4, cancelled_by="ada")
    found = detail([waits, runs, old, going])
    assert progress_text(found, 2) == (
        "revision 2: 0 of 2 ready; replica 8 pending: needs 1 x 2 GPUs; 1 free; replica 9 starting on n0"
    )
    assert waiting_hint(found, 2) == "phalanx why 8 says what would start replica 8"
    assert waiting_hint(detail([runs]), 2) == (
        "replica 9 runs and does not answer GET / on port 8000 yet: phalanx logs 9"
    )
    failing = replica(9, attempt_state=None, restarts=1)
    assert waiting_hint(detail([failing]), 2) == "phalanx logs 9 prints why replica 9 ended"
    assert progress_text(detail([failing]), 2).endswith("replica 9 starting on n0 (restarted 1 time)")
    moving = replica(9, attempt_state=None, nodes=[])
    assert progress_text(detail([moving]), 2) == "revision 2: 0 of 2 ready; replica 9 starting"
    assert waiting_hint(detail(), 2) == ""


def test_page_says_who_made_a_revision_and_what_it_changed():
    first = {"number": 1, "by": "ada", "created_s": 30, "replicas": "2", "gpus": "1", "command": "serve"}
    change = [msgspec.to_builtins(KeyChange(key="gpus", before="1", after="2")), {"key": "env MODEL"}]
    second = first | {"number": 2, "by": "bob", "created_s": 60, "gpus": "2", "changes": change}
    lines = service_page(detail(revisions=[second, first]), SCREEN, 120.0)
    rows = [line.split() for line in lines[-2:]]
    assert rows[0] == ["*2", "1m00s", "bob", "2", "2", "gpus", "1", "->", "2,", "env", "MODEL", "serve"]
    assert rows[1] == ["1", "1m30s", "ada", "2", "1", "serve"]
