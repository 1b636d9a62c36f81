"""What the pods of an attempt mean: (attempt, its pods, now) -> events, deletions. Each test is one situation."""

# mypy: disable-error-code="var-annotated"

from dataclasses import replace

import pytest

from phalanx.core.ids import NodeId
from phalanx.core.state.reports import AttemptQueued, AttemptWithdrawn, SeatLost
from phalanx.core.work.attempt import EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes.attempt_pods import (
    IMAGE_LIMIT_S,
    LINGER_S,
    MISSING_S,
    START_LIMIT_MAX_S,
    START_LIMIT_S,
    SUPERVISOR_REPORT_S,
    WAIT_REPORT_S,
    AttemptPods,
    PodsPhase,
    awaited_by,
    evaluate,
)
from phalanx.engines.kubernetes.parse import PodState
from phalanx.wire.seat import SEAT_IMAGE_UNFIT
from tests.builders import placed

NAMES = ("p0", "p1")


def order(*states: MemberState, **fields):
    attempt = placed(on="n0:0,1 n1:0,1").attempt
    if states:
        members = tuple(replace(member, state=state) for member, state in zip(attempt.members, states, strict=True))
        attempt = replace(attempt, members=members, state=AttemptState.RUNNING)
    return AttemptPods(attempt=attempt, names=NAMES, created_s=100.0, **fields)


def pods(*given):
    """`None` is a pod that is not there; a mapping has the fields of one that is."""
    return {
        name: PodState(name=name, namespace="x", uid=name, **{"phase": "Running", "node": f"n{index}", **fields})
        for index, (name, fields) in enumerate(zip(NAMES, given, strict=True))
        if fields is not None
    }


FINE, NO_NODE = {}, {"phase": "Pending", "node": "", "unschedulable": "0/3 nodes are available"}


def after(seconds, made, *given, **options):
    return evaluate(made, pods(*given), 100.0 + seconds, **options)


def withdrawn(update):
    [event] = update.events
    assert isinstance(event, AttemptWithdrawn)
    assert update.delete, "no pod of the gang stays"
    return event


def test_pods_that_have_a_node_each_are_placed():
    assert after(1.0, order(), FINE, FINE).pods.phase is PodsPhase.PLACED
    assert after(1.0, order(), FINE, NO_NODE).pods.phase is PodsPhase.WAITING


def test_a_gang_of_which_one_pod_gets_no_node_is_withdrawn_as_a_whole():
    assert not after(START_LIMIT_S - 0.1, order(), FINE, NO_NODE).events
    update = after(START_LIMIT_S, order(), FINE, NO_NODE, holders=("pod others/x",))
    event = withdrawn(update)
    assert (event.cause, event.nodes, update.contended) == (EndCause.CONTENDED, ("n1",), ("n1",))
    assert event.why == "pod others/x took n1 within 10s: 0/3 nodes are available"


def test_a_gang_is_withdrawn_also_if_some_of_its_supervisors_are_ready():
    made = order(MemberState.READY, MemberState.REQUESTED)
    made = replace(made, attempt=replace(made.attempt, state=AttemptState.PLACED))
    event = withdrawn(after(START_LIMIT_S, made, FINE, NO_NODE))
    assert (event.cause, event.nodes) == (EndCause.CONTENDED, ("n1",))
    first = after(1.0, made, {"phase": "Failed", "exit_code": 137}, FINE)
    [lost] = after(1.0 + SUPERVISOR_REPORT_S, first.pods, {"phase": "Failed", "exit_code": 137}, FINE).events
    assert isinstance(lost, SeatLost), "a supervisor that was ready and died is a lost seat"


def test_the_wait_is_longer_while_pods_of_ours_still_end_there():
    assert not after(START_LIMIT_S, order(), FINE, NO_NODE, cleaning_up=True).events
    assert after(START_LIMIT_MAX_S, order(), FINE, NO_NODE, cleaning_up=True).events


def test_where_an_autoscaler_starts_nodes_a_gang_waits_for_them_and_says_so():
    wait_s = {"node_wait_s": 600.0}
    first = after(START_LIMIT_S, order(), FINE, NO_NODE, **wait_s)
    [event] = first.events
    assert isinstance(event, AttemptQueued)
    assert event.why == (
        "no node in Kubernetes yet for n1: 0/3 nodes are available; given up in 9m50s unless an autoscaler starts one"
    )
    assert not after(START_LIMIT_S + 1.0, first.pods, FINE, NO_NODE, **wait_s).events
    assert after(START_LIMIT_S + WAIT_REPORT_S, first.pods, FINE, NO_NODE, **wait_s).events
    placed_now = after(300.0, first.pods, FINE, FINE, **wait_s)
    assert [event.why for event in placed_now.events] == [""], "limits and bills begin now"
    assert placed_now.pods.phase is PodsPhase.PLACED
    assert withdrawn(after(600.0, first.pods, FINE, NO_NODE, **wait_s)).cause is EndCause.CONTENDED


def test_the_places_whose_pods_wait_for_an_autoscaler_are_known():
    wait_s = {"node_wait_s": 600.0}
    both = after(START_LIMIT_S, order(), NO_NODE, NO_NODE, **wait_s)
    assert both.pods.awaited == ("n0", "n1")
    one = after(START_LIMIT_S + 1.0, both.pods, FINE, NO_NODE, **wait_s)
    assert one.pods.awaited == ("n1",)
    assert len(one.events) == 1, "that a node has come is reported at once"
    assert (awaited_by(NodeId("n0"), [one.pods]), awaited_by(NodeId("n1"), [one.pods])) == (
        "",
        f"job {one.pods.attempt.job_id}",
    )
    placed_now = after(START_LIMIT_S + 2.0, one.pods, FINE, FINE, **wait_s).pods
    assert (placed_now.awaited, awaited_by(NodeId("n1"), [placed_now])) == ((), "")
    assert awaited_by(NodeId("n1"), [one.pods, placed_now]) == "", "another pod runs at the same place"
    withdrawn_now = after(600.0, one.pods, FINE, NO_NODE, **wait_s).pods
    assert awaited_by(NodeId("n1"), [withdrawn_now]) == ""


def test_a_gang_that_is_stopped_while_a_pod_has_no_node_is_withdrawn_at_once():
    made = order(MemberState.READY, MemberState.REQUESTED)
    stopped = replace(made.attempt, state=AttemptState.STOPPING, stop_cause=EndCause.CANCELLED)
    event = withdrawn(after(1.0, replace(made, attempt=stopped), FINE, NO_NODE))
    assert event.cause is EndCause.CANCELLED


def test_an_image_that_cannot_be_pulled_is_tried_for_a_while():
    failing = {"phase": "Pending", "waiting": "ImagePullBackOff", "waiting_text": "not found"}
    first = after(1.0, order(), FINE, failing)
    assert (first.events, first.pods.pulling_s) == ((), 101.0)
    assert after(2.0, first.pods, FINE, FINE).pods.pulling_s is None, "it was pulled in the end"
    event = withdrawn(after(1.0 + IMAGE_LIMIT_S, first.pods, FINE, failing, image="x/y"))
    assert (event.cause, event.why) == (EndCause.START_FAIL, "n1 cannot pull the image x/y: not found")


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull"])
def test_an_image_that_can_never_be_pulled_is_not_waited_for(reason):
    assert withdrawn(after(0.1, order(), FINE, {"phase": "Pending", "waiting": reason})).cause is EndCause.START_FAIL


def test_a_container_that_cannot_be_made_says_why():
    stuck = {"phase": "Pending", "waiting": "CreateContainerConfigError", "waiting_text": "container has runAsNonRoot"}
    assert "runAsNonRoot" in withdrawn(after(SUPERVISOR_REPORT_S, order(), FINE, stuck)).why


def ended_twice(made, *given):
    first = after(5.0, made, *given)
    assert not first.events, "its supervisor's own report says more"
    return after(5.0 + SUPERVISOR_REPORT_S, first.pods, *given, head_url="https://head", image="x/y")


@pytest.mark.parametrize(
    ("fields", "cause", "words"),
    [
        ({"exit_code": 127}, EndCause.START_FAIL, "check that the image x/y has python3"),
        ({"exit_code": 69}, EndCause.START_FAIL, "cannot reach the head at https://head"),
        ({"exit_code": 76}, EndCause.START_FAIL, "reject the certificate"),
        ({"reason": "OutOfnvidia.com/gpu"}, EndCause.CONTENDED, "OutOfnvidia.com/gpu"),
        ({"reason": "Evicted"}, EndCause.CONTENDED, "Evicted"),
        ({"reason": "OOMKilled", "exit_code": 137}, EndCause.START_FAIL, "OOMKilled with code 137"),
    ],
)
def test_a_pod_that_ends_before_its_supervisor_connects_withdraws_the_gang(fields, cause, words):
    event = withdrawn(ended_twice(order(), FINE, {"phase": "Failed", **fields}))
    assert event.cause is cause
    assert words in event.why


def test_an_image_that_cannot_run_the_supervisor_fails_the_job_with_its_line():
    unfit = {"phase": "Failed", "exit_code": SEAT_IMAGE_UNFIT, "message": "phalanx: this image has Python 3.12"}
    event = withdrawn(ended_twice(order(), FINE, unfit))
    assert event.cause is EndCause.FAILED
    assert event.why == "the image x/y cannot run the supervisor: phalanx: this image has Python 3.12"


def test_a_pod_that_was_never_made_or_was_deleted_withdraws_the_gang():
    assert not after(MISSING_S - 0.1, order(), FINE, None).events
    first = after(0.0, order(), FINE, None)
    assert withdrawn(after(MISSING_S, first.pods, FINE, None)).cause is EndCause.CONTENDED
    assert withdrawn(after(1.0, order(), FINE, {"deleting": True})).cause is EndCause.CONTENDED


RUNNING = (MemberState.STARTED, MemberState.STARTED)


def test_a_container_that_died_under_a_running_gang_loses_its_seat_once():
    update = ended_twice(order(*RUNNING), FINE, {"phase": "Failed", "exit_code": 137})
    [event] = update.events
    assert isinstance(event, SeatLost)
    assert (event.node_ids, update.delete) == (("n1",), False)
    assert not after(20.0, update.pods, FINE, {"phase": "Failed", "exit_code": 137}).events


@pytest.mark.parametrize("gone", [None, {"phase": "Failed", "reason": "NodeLost"}, {"deleting": True}])
def test_a_pod_whose_processes_nobody_saw_end_is_left_to_its_lease(gone):
    first = after(5.0, order(*RUNNING), FINE, gone)
    update = after(60.0, first.pods, FINE, gone)
    assert (update.events, update.delete) == ((), False)


def test_pods_that_waited_a_long_time_do_not_matter_once_supervisors_are_there():
    assert not after(100.0, order(MemberState.READY, MemberState.REQUESTED), FINE, NO_NODE).events


def over(made, at_s=200.0, **fields):
    return replace(made, attempt=replace(made.attempt, state=AttemptState.ENDED, **fields), attempt_ended_s=at_s)


def test_pods_of_an_ended_attempt_end_by_themselves_and_are_then_deleted():
    made = over(order(*RUNNING))
    assert not after(101.0, made, FINE, {"phase": "Succeeded"}).delete
    update = after(101.0, made, {"phase": "Succeeded"}, {"phase": "Failed"})
    assert (update.delete, update.grace_s) == (True, None)
    assert after(102.0, update.pods, None, {"phase": "Failed"}).pods is not None
    assert after(103.0, update.pods, None, None).pods is None


def test_pods_that_do_not_end_are_deleted_after_a_while():
    assert not after(100.0 + LINGER_S - 0.1, over(order(*RUNNING)), FINE, FINE).delete
    assert after(100.0 + LINGER_S, over(order(*RUNNING)), FINE, FINE).delete


def test_after_the_loss_of_a_member_the_other_pods_are_deleted_at_once():
    made = over(order(*RUNNING))
    members = (made.attempt.members[0], replace(made.attempt.members[1], state=MemberState.LOST))
    update = after(100.1, replace(made, attempt=replace(made.attempt, members=members)), FINE, None)
    assert (update.delete, update.grace_s) == (True, 5)
