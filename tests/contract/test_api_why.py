"""`why` and dry runs over HTTP: what they say, that they write nothing, and who may ask."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined, index"

import re

import pytest

from phalanx.cli.jobs.why import why_page, with_commands
from phalanx.cli.terminal import Terminal
from phalanx.client import Client
from phalanx.core.errors import BadFile, NeverFits, NotFound, NotPermitted, TryLater
from phalanx.core.state.events import CordonNode
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.ports.store import JobFilter
from phalanx.wire.api.queues import QueueSettings
from tests.contract.api_head import JOB, TOKENS, Supervisor, make_node, until

WHOLE = {**JOB, "gpus": 4}
PLAIN = Terminal(width=120, height=40, interactive=False, colour=False, blocks=True)


@pytest.fixture
def ada(head):
    head.ask(SupervisorRegistered(node=make_node(), supervisor_id="s1"))
    with head.served() as url, Client(url, TOKENS["user"]) as client:
        yield client


def waiting(client, job_id):
    until(lambda: client.job(job_id).job.reason != "new")
    return client.why(job_id)


def test_full_fleet_names_who_holds_it_and_until_when(ada):
    first = ada.submit({**WHOLE, "time": "10m", "preemptible": False}).id
    found = waiting(ada, ada.submit({**WHOLE, "name": "late"}).id)
    assert (found.state, found.reason) == ("pending", "resources")
    assert found.headline.startswith("waits (resources): needs 1 x 4 GPUs; 0 free in total")
    (holder,) = found.blockers
    assert (holder.id, holder.user, holder.name, holder.gpus, holder.state) == (first, "ada", "train", 4, "running")
    assert 590 < found.start.latest_s - found.now_s <= 600
    assert [(one.kind, one.text) for one in found.changes] == [("wait", f"wait for job {first} to finish")]


def test_smallest_changes_that_start_it_are_told_as_commands(ada):
    ada.submit({**JOB, "gpus": 3, "preemptible": False})
    found = waiting(ada, ada.submit({**JOB, "gpus": 2}).id)
    assert [(one.kind, one.hint_code, one.hint_args) for one in found.changes] == [
        ("fewer", "submit-with", {"key": "gpus", "value": "1"}),
        ("wait", "", {}),
    ]
    assert [one.command for one in with_commands(found).changes] == ["phalanx submit --gpus 1 ...", ""]
    held = ada.submit({**JOB, "gpus": 1, "hold": True}).id
    release = ada.why(held).changes[0]
    assert (release.kind, release.hint, release.operator) == ("release", f"release job {held}", False)
    assert ada.why(held).start.unknown == "the job is held"


def test_drained_node_and_full_quota_are_an_operators_to_mend(head, ada):
    head.ask(CordonNode(node_id="n0", by="opal", why="disk", drain=False))
    found = waiting(ada, ada.submit(JOB).id)
    assert found.reason == "no_nodes"
    assert [(one.kind, one.command, one.operator) for one in with_commands(found).changes] == [
        ("undrain", "phalanx nodes undrain n0", True)
    ]


def test_quota_names_its_holders_and_another_queue_with_room(head, ada):
    with head.served() as url, Client(url, TOKENS["operator"]) as operator:
        operator.put_queues(
            [
                QueueSettings(id="default", quota_gpus=2, borrow_gpus=0),
                QueueSettings(id="red", quota_gpus=2, borrow_gpus=0),
            ]
        )
    first = ada.submit(JOB).id
    second = ada.submit(JOB).id
    found = waiting(ada, second)
    assert (found.reason, [one.id for one in found.blockers]) == ("quota", [first])
    kinds = [(one.kind, one.command) for one in with_commands(found).changes]
    assert kinds == [
        ("queue", f"phalanx update {second} --queue red"),
        ("wait", ""),
        ("quota", "phalanx queues apply FILE"),
    ]
    assert "raise the quota of queue default by 2" in found.changes[-1].text


def test_dependency_waits_for_its_parents_and_their_limit(ada):
    parent = ada.submit({**WHOLE, "time": "10m"}).id
    child = ada.submit({**JOB, "depends_on": parent}).id
    found = waiting(ada, child)
    assert (found.reason, [one.id for one in found.blockers]) == ("dependency", [parent])
    assert 590 < found.start.latest_s - found.now_s <= 600
    assert found.changes == []


def test_unknown_end_is_told_as_unknown(ada):
    first = ada.submit(WHOLE).id
    found = waiting(ada, ada.submit({**WHOLE, "name": "late"}).id)
    assert found.start.latest_s is None
    assert found.start.unknown == f"job {first} has no time limit, and too few similar jobs have finished"


def test_job_that_runs_or_is_over_says_so(head, ada):
    with head.calling() as call:
        node = Supervisor(call)
        node.hello()
        job_id = ada.submit(JOB).id
        until(lambda: ada.job(job_id).job.state == "running")
        node.run(job_id)
        found = ada.why(job_id)
        assert (found.reason, found.nodes, found.changes) == ("", ["n0"], [])
        assert found.headline.startswith("has run for ")
        assert found.headline.endswith(" on n0")
        node.end(job_id, code=3)
        until(lambda: ada.job(job_id).job.state == "failed")
        assert re.fullmatch(r"failed \S+ ago: rank 0 on n0: exit code 3", ada.why(job_id).headline)
    with pytest.raises(NotFound):
        ada.why("999")


def test_dry_run_says_where_it_would_start_and_writes_nothing(head, ada):
    found = ada.dry_run({**JOB, "time": "2h"})
    assert (found.starts, found.nodes, found.gpus, found.reason) == (True, ["n0"], 2, "")
    assert (found.run.high_s, found.run.ends, found.gpu_hours_high) == (7200.0, 0, 4.0)
    assert found.notes[0].startswith("1 node x 2")
    assert head.store.jobs(JobFilter()) == []
    assert head.driver.controller.world.jobs == {}
    assert ada.submit(JOB).id == "1"  # no number was used up


def test_dry_run_of_what_waits_gives_reason_and_changes(head, ada):
    first = ada.submit({**JOB, "gpus": 3, "preemptible": False, "time": "10m"}).id
    until(lambda: ada.job(first).job.state == "running")
    found = ada.dry_run({**JOB, "gpus": 2})
    assert (found.starts, found.reason, [one.id for one in found.blockers]) == (False, "resources", [first])
    assert [one.hint_code for one in found.changes] == ["submit-with", ""]
    assert 0 < found.start.latest_s - found.now_s <= 600
    assert found.gpu_hours_high is None
    array = ada.dry_run({**JOB, "array": "0-9", "gpus": 1, "time": "1h"})
    assert (array.jobs, array.gpu_hours_high) == (10, 10.0)


def test_dry_run_refuses_what_a_submit_refuses(head, ada):
    for wrong, error in (({"gpus": 64}, NeverFits), ({"queue": "none"}, NotFound), ({"gpus": "many"}, BadFile)):
        with pytest.raises(error):
            ada.dry_run({**JOB, **wrong})
    assert head.driver.controller.world.jobs == {}
    with head.served() as url, Client(url, TOKENS["viewer"]) as viewer:
        with pytest.raises(NotPermitted):
            viewer.dry_run(JOB)
        job_id = ada.submit({**WHOLE, "hold": True}).id
        assert viewer.why(job_id).reason == "held"


@pytest.fixture
def operator(head, ada):
    """Queue `nlp` allows 2 GPUs a user."""
    with head.served() as url, Client(url, TOKENS["operator"]) as client:
        client.put_queues([QueueSettings(id="nlp", gpus_per_user=2)])
        yield client


NLP = {**JOB, "queue": "nlp"}
ABOVE = "3 GPUs asked; queue nlp allows 2 a user"


def test_what_can_never_start_is_refused_with_the_limit_and_accepted_on_request(operator, ada):
    for refused in (ada.submit, ada.dry_run):
        with pytest.raises(NeverFits) as error:
            refused({**NLP, "gpus": 3})
        assert (error.value.message, error.value.exit_code) == (ABOVE, 64)
    dry = ada.dry_run({**NLP, "gpus": 3, "allow_never": True})
    assert (dry.starts, dry.reason, dry.detail, dry.warnings) == (
        False,
        "never",
        ABOVE,
        [f"it can never start: {ABOVE}"],
    )
    taken = ada.submit({**NLP, "gpus": 3, "allow_never": True})
    assert taken.warnings == [f"it can never start: {ABOVE}"]
    array = ada.submit({**NLP, "gpus": 3, "allow_never": True, "array": "0-1"})
    assert array.warnings == taken.warnings
    assert ada.submit(NLP).warnings == []


def test_why_says_never_with_the_limit_and_what_would_help(operator, ada):
    job_id = ada.submit({**NLP, "gpus": 3, "allow_never": True, "hold": True}).id
    found = waiting(ada, job_id)
    assert (found.never, found.limit, found.reason, found.detail) == (True, "users.gpus", "never", ABOVE)
    assert found.headline == f"can NEVER start (users.gpus): {ABOVE}"
    assert found.start is None
    shown = ada.job(job_id).job
    assert (shown.state, shown.reason, shown.detail) == ("pending", "never", ABOVE)
    page = why_page(with_commands(found), PLAIN)
    assert page[0] == f"job {job_id} {found.headline}"
    assert not any("expected to start" in line for line in page)
    ada.release(job_id)
    found = waiting(ada, job_id)
    assert [one.kind for one in found.changes] == ["queue", "fewer", "user_limit"]
    assert "what would let it start" in why_page(with_commands(found), PLAIN)
    ordinary = waiting(ada, ada.submit({**WHOLE, "hold": True}).id)
    assert (ordinary.never, ordinary.limit) == (False, "")


def test_what_nothing_can_run_now_is_accepted_with_a_warning(head, ada):
    head.ask(CordonNode(node_id="n0", by="opal", why="disk", drain=True))
    says = "nothing here now can run this (1 node x 2 = 2 GPUs): n0 is drained (disk)"
    assert ada.submit(JOB).warnings == ada.dry_run(JOB).warnings == [says]
    with pytest.raises(NeverFits):
        ada.submit({**JOB, "gpus": 8})


def test_a_job_is_not_moved_to_a_queue_where_it_can_never_start(operator, ada):
    job_id = ada.submit({**JOB, "gpus": 3, "hold": True}).id
    with pytest.raises(NeverFits, match="queue nlp allows 2 a user"):
        ada.update(job_id, queue="nlp")


def test_ends_are_learned_and_foretell_the_next(head, ada):
    with head.calling() as call:
        node = Supervisor(call)
        node.hello()
        for number in range(10):
            job_id = ada.submit(JOB).id
            until(lambda job_id=job_id: ada.job(job_id).job.state == "running")
            node.run(job_id)
            node.end(job_id)
            until(lambda job_id=job_id: ada.job(job_id).job.state == "succeeded")
            assert ada.dry_run(JOB).run.ends == number + 1
        run = ada.dry_run(JOB).run
        assert run.likes == "of ada named train, with this command and 2 GPUs"
        assert 0.0 <= run.low_s <= run.high_s < 20.0


def test_stopping_head_answers_no_more_questions(head):
    assert head.driver.read_snapshot().result(timeout=60).hypothetical_jobs == ()
    head.close()
    with pytest.raises(TryLater):
        head.driver.read_snapshot().result(timeout=60)
