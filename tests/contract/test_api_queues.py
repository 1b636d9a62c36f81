"""The queue tree through the client: put at once or not at all, and its figures."""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated, list-item, dict-item, union-attr, attr-defined"

import pytest

from phalanx.client import Client
from phalanx.controller.driver import ControllerDriver
from phalanx.core.errors import BadRequest, Conflict, NotFound, NotPermitted
from phalanx.core.state.events import ChangeQueue, PutQueue, PutQueues
from phalanx.core.state.reports import SupervisorRegistered
from phalanx.wire.api.queues import QueueSettings
from tests.contract.api_head import JOB, TOKENS, make_node, until

TREE = [
    QueueSettings(id="default"),
    QueueSettings(id="research", quota_gpus=4),
    QueueSettings(id="nlp", parent="research", quota_gpus=2, budget_gpu_h=10.0),
    QueueSettings(id="prod", quota_gpus=2, weight=3.0),
]


@pytest.fixture
def operator(head):
    with head.served() as url:
        yield Client(url, TOKENS["operator"])


def names(client):
    return [queue.id for queue in client.queues()]


def test_a_tree_is_put_at_once_and_says_what_changed(operator):
    applied = operator.put_queues(TREE)
    assert (applied.added, applied.changed, applied.removed, applied.unchanged) == (
        ["research", "nlp", "prod"],
        [],
        [],
        1,
    )
    again = operator.put_queues(TREE)
    assert (again.added, again.changed, again.unchanged) == ([], [], 4)
    changed = operator.put_queues([QueueSettings(id="prod", quota_gpus=2, weight=1.0)])
    assert [(change.id, change.before, change.after) for change in changed.changed] == [
        ("prod", {"weight": 3.0}, {"weight": 1.0})
    ]
    assert names(operator) == ["default", "nlp", "prod", "research"]


def test_a_dry_run_changes_nothing_and_refuses_the_same(operator):
    assert operator.put_queues(TREE, dry_run=True).added == ["research", "nlp", "prod"]
    assert names(operator) == ["default"]
    for dry_run in (True, False):
        with pytest.raises(BadRequest, match="its parent 'none' does not exist"):
            operator.put_queues([QueueSettings(id="a"), QueueSettings(id="b", parent="none")], dry_run=dry_run)
    assert names(operator) == ["default"]


@pytest.mark.parametrize(
    ("queues", "message"),
    [
        ([QueueSettings(id="a", parent="b"), QueueSettings(id="b", parent="a")], "its own ancestor"),
        (
            [QueueSettings(id="a", quota_gpus=4), QueueSettings(id="b", parent="a", quota_gpus=5)],
            "its quota is 4 GPUs, but the quotas below it sum to 5",
        ),
        ([QueueSettings(id="a", quota_gpus=-1)], "quota is -1"),
        ([QueueSettings(id="a", weight=0.0)], "weight is 0"),
        ([QueueSettings(id="a", budget_period_s=1.0)], "budget period is 1"),
        ([QueueSettings(id="a"), QueueSettings(id="a")], "is listed twice"),
        ([QueueSettings(id="a b")], "is not a valid name"),
        ([QueueSettings(id=f"q{n}", parent=f"q{n - 1}" if n else None) for n in range(9)], "more than 8 deep"),
    ],
)
def test_what_is_no_tree_is_refused_whole(operator, queues, message):
    with pytest.raises(BadRequest, match=message):
        operator.put_queues([QueueSettings(id="good"), *queues])
    assert names(operator) == ["default"]


def test_prune_removes_what_is_not_named_but_default_and_queues_with_jobs(head, operator):
    head.ask(SupervisorRegistered(node=make_node(), supervisor_id="s1"))
    operator.put_queues(TREE)
    operator.submit({**JOB, "queue": "nlp", "gpus": 1})
    for dry_run in (True, False):
        with pytest.raises(Conflict, match="queue nlp still has"):
            operator.put_queues([QueueSettings(id="prod")], prune=True, dry_run=dry_run)
    kept = [QueueSettings(id="research", quota_gpus=4), QueueSettings(id="nlp", parent="research")]
    assert operator.put_queues(kept, prune=True).removed == ["prod"]
    assert names(operator) == ["default", "nlp", "research"]
    with pytest.raises(NotFound):
        operator.queue("prod")


def test_a_changed_tree_names_the_waiting_jobs_that_it_makes_impossible(head, operator):
    head.ask(SupervisorRegistered(node=make_node(), supervisor_id="s1"))
    operator.put_queues([QueueSettings(id="nlp")])
    jobs = [operator.submit({**JOB, "queue": "nlp", "gpus": 3, "hold": True}).id for _ in range(103)]
    small = operator.submit({**JOB, "queue": "nlp", "gpus": 2, "hold": True}).id
    narrow = [QueueSettings(id="nlp", gpus_per_user=2)]
    assert operator.put_queues([QueueSettings(id="nlp", gpus_per_user=3)], dry_run=True).impossible == []
    for applied in (operator.put_queues(narrow, dry_run=True), operator.put_queues(narrow)):
        assert [(one.id, one.why) for one in applied.impossible] == [
            (job_id, "3 GPUs asked; queue nlp allows 2 a user") for job_id in jobs[:100]
        ]
        assert applied.impossible_more == 3
    assert operator.why(small).reason == "held"
    again = operator.put_queues([QueueSettings(id="nlp", gpus_per_user=1)])
    assert [one.id for one in again.impossible] == [small]


def test_operators_alone_put_queues(head):
    with head.served() as url:
        for role in ("viewer", "user"):
            with pytest.raises(NotPermitted):
                Client(url, TOKENS[role]).put_queues([QueueSettings(id="mine")])
            assert names(Client(url, TOKENS[role])) == ["default"]


def test_figures_tell_what_is_used_borrowed_and_lent(head, operator):
    head.ask(SupervisorRegistered(node=make_node(), supervisor_id="s1"))
    operator.put_queues([QueueSettings(id="red", quota_gpus=2), QueueSettings(id="blue", quota_gpus=2)])
    operator.submit({**JOB, "queue": "red", "gpus": 3})
    operator.submit({**JOB, "queue": "red", "gpus": 2})
    until(lambda: operator.queue("red").running and operator.queue("red").pending)
    views = {queue.id: queue for queue in operator.queues()}
    red, blue = views["red"], views["blue"]
    assert (red.used_gpus, red.borrowed_gpus, red.room_gpus, red.running, red.pending, red.pending_gpus) == (
        3,
        1,
        1,
        1,
        1,
        2,
    )
    assert (blue.used_gpus, blue.lent_gpus, blue.room_gpus, blue.factor) == (0, 1, 1, 1.0)
    assert [(wait.jobs, wait.gpus) for wait in red.waiting] == [(1, 2)]
    assert operator.queue("red").used_gpus == 3
    operator.put_queues([QueueSettings(id="blue", quota_gpus=40)])
    assert operator.queue("blue").room_gpus == 1, "a quota larger than the fleet makes no room"
    operator.drain("n0", "a fan")
    assert operator.queue("blue").room_gpus == 0


def delayed(head, monkeypatch, meanwhile):
    """Have the next request of a queue wait in the inbox behind `meanwhile`, which nobody has read yet."""
    asking = ControllerDriver.request

    def request(driver, submission, told=None):
        if (
            isinstance(submission, (ChangeQueue, PutQueue, PutQueues))
            and submission is not meanwhile
            and told is not None
        ):
            asking(driver, meanwhile)
        return asking(driver, submission, told)

    monkeypatch.setattr(ControllerDriver, "request", request)


def test_a_queue_that_is_being_closed_is_not_opened_by_a_change_of_its_priority(head, operator, monkeypatch):
    """Found by reading: the route merged a change into the record last committed, and so undid one that waited in the inbox."""
    operator.put_queue("night", priority=1)
    delayed(head, monkeypatch, ChangeQueue(queue_id="night", open=False))
    changed = operator.put_queue("night", priority=5)
    assert (changed.priority, changed.open) == (5, False)


def test_a_queue_that_is_being_closed_is_not_opened_by_a_tree_that_says_nothing_of_it(head, operator, monkeypatch):
    """Found by reading: as above, of a whole tree."""
    operator.put_queues(TREE)
    delayed(head, monkeypatch, ChangeQueue(queue_id="prod", open=False))
    operator.put_queues([QueueSettings(id="prod", quota_gpus=1)])
    (prod,) = [queue for queue in operator.queues() if queue.id == "prod"]
    assert (prod.quota_gpus, prod.open) == (1, False)
