"""What Kueue's objects mean for an attempt. Conditions are as Kueue's pages on troubleshooting show them."""

# mypy: disable-error-code="var-annotated, arg-type"

from dataclasses import replace

import pytest

from phalanx.core.errors import BadRequest
from phalanx.core.state.reports import AttemptQueued, AttemptReclaimed, AttemptWithdrawn
from phalanx.core.work.attempt import EndCause, MemberState
from phalanx.core.work.states import AttemptState
from phalanx.engines.kubernetes import kueue, render
from phalanx.engines.kubernetes.kueue import NO_WORKLOAD_S, REPORT_EVERY_S, KueueTrack, evaluate
from phalanx.engines.kubernetes.parse import INDEX_ANNOTATION, parse_pod
from tests.builders import job, placed
from tests.unit.test_kubernetes_objects import OWNER, settings

S = AttemptState
PENDING = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "insufficient quota"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to accommodate another"}
QUOTA = {"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": "in cluster-queue"}


def attempt(state=S.PLACED, member=MemberState.REQUESTED, **fields):
    made = placed(on="n0:0,1 n1:0,1").attempt
    members = tuple(replace(one, state=member) for one in made.members)
    return replace(made, state=state, members=members, **fields)


def a_job(*, suspended=True, **about):
    return kueue.parse_job({"metadata": {"name": "j", "uid": "u", **about}, "spec": {"suspend": suspended}})


def workload(*conditions, active=True, **status):
    owners = [{"kind": "Job", "uid": "u"}]
    return kueue.parse_workload(
        {
            "metadata": {"ownerReferences": owners},
            "spec": {"active": active},
            "status": {"conditions": list(conditions), **status},
        }
    )


def look(track=None, one=None, found=a_job(), said=None, *, after_s=0.0, **more):  # a frozen record
    track = track or KueueTrack(queue="lq", created_s=100.0)
    more = {"reads_workloads": True, **more}
    return evaluate(track, one or attempt(), found, said, 100.0 + after_s, **more)


CHECKS = [{"name": "prov", "state": "Pending", "message": "no capacity"}, {"name": "ok", "state": "Ready"}]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, ""),
        (workload(), ""),
        (workload(PENDING), ": insufficient quota (Pending)"),
        (workload(PENDING, active=False), ": it was deactivated in Kueue"),
        (
            workload(QUOTA, admissionChecks=CHECKS),
            ": it has quota, and waits for admission checks: prov is Pending (no capacity)",
        ),
        (
            workload({"type": "Finished", "status": "True", "reason": "AdmissionChecksRejected"}),
            ": AdmissionChecksRejected",
        ),
    ],
)
def test_a_suspended_job_waits_with_the_reason_of_kueue(said, words):
    verdict = look(said=said)
    [event] = verdict.events
    assert isinstance(event, AttemptQueued)
    assert (event.why, verdict.waits) == (f"it waits in the queue lq of Kueue{words}", True)


def test_the_position_is_part_of_the_reason_and_no_workload_is_one():
    assert look(position=3).events[0].why == "it waits in the queue lq of Kueue, 3 before it"
    assert look(position=0).events[0].why == "it waits in the queue lq of Kueue, first in line"
    assert "Kueue has made no Workload" in look(after_s=NO_WORKLOAD_S).events[0].why
    assert "Workload" not in look(after_s=NO_WORKLOAD_S, reads_workloads=False).events[0].why


def test_a_reason_that_changes_often_is_told_rarely():
    first = look(said=workload(PENDING))
    assert not look(first.track, said=workload(PENDING), after_s=60.0).events
    assert not look(first.track, position=1, after_s=REPORT_EVERY_S - 0.1).events
    assert look(first.track, position=1, after_s=REPORT_EVERY_S).events


def test_a_job_that_kueue_starts_is_admitted_once():
    verdict = look(found=a_job(suspended=False))
    assert (verdict.events[0].why, verdict.admitted_now, verdict.waits) == ("", True, False)
    assert look(verdict.track, found=a_job(suspended=False)).events == ()


RUNNING = attempt(S.RUNNING, MemberState.STARTED)


def test_a_job_that_kueue_stops_is_preempted_with_its_reason():
    admitted = look(found=a_job(suspended=False)).track
    verdict = look(admitted, RUNNING, said=workload(PENDING, EVICTED))
    [event] = verdict.events
    assert isinstance(event, AttemptReclaimed)
    assert event.why == "Kueue stopped it in the queue lq: to accommodate another (Preempted)"
    assert (verdict.waits, verdict.withdrawn) == (False, False), "its pods end within their grace"
    assert look(verdict.track, RUNNING).events == ()
    [event] = look(one=RUNNING, said=workload(EVICTED)).events
    assert isinstance(event, AttemptReclaimed), "also if this head has not seen it start"


def test_the_reason_of_a_stop_may_arrive_after_the_stop():
    admitted = look(found=a_job(suspended=False)).track
    stopped = look(admitted, RUNNING, said=workload(PENDING))
    assert stopped.events == ()
    [event] = look(stopped.track, RUNNING, said=workload(EVICTED), after_s=0.1).events
    assert "to accommodate another" in event.why
    [event] = look(stopped.track, RUNNING, after_s=1.0).events
    assert event.why == "Kueue stopped it in the queue lq: its Job was suspended"
    [event] = look(admitted, RUNNING, reads_workloads=False).events
    assert isinstance(event, AttemptReclaimed), "no reason can arrive"


def test_a_job_that_is_stopped_before_its_ranks_run_is_withdrawn_as_preempted():
    admitted = look(found=a_job(suspended=False)).track
    for one in (attempt(), attempt(member=MemberState.READY)):
        verdict = look(admitted, one, said=workload(EVICTED))
        assert isinstance(verdict.events[0], AttemptWithdrawn)
        assert (verdict.events[0].cause, verdict.withdrawn) == (EndCause.PREEMPTED, True)


@pytest.mark.parametrize("gone", [None, a_job(deletionTimestamp="now")])
def test_a_job_that_is_deleted_in_the_queue_is_withdrawn_and_one_that_runs_is_left_to_its_pods(gone):
    verdict = look(found=gone)
    assert (verdict.events[0].cause, verdict.withdrawn) == (EndCause.CONTENDED, True)
    assert look(one=RUNNING, found=gone).events == ()


def test_a_stop_takes_a_job_out_of_the_queue():
    verdict = look(one=attempt(S.STOPPING, stop_cause=EndCause.CANCELLED))
    assert (verdict.events[0].cause, verdict.withdrawn) == (EndCause.CANCELLED, True)


def test_a_job_of_kueue_has_equal_indexed_pods_without_a_node_of_ours():
    case = placed(job("17", time_limit_s=3600.0), on="n0:0,1 n1:0,1")
    labels = {"metadata": {"labels": {"team": "vision", "kueue.x-k8s.io/priority-class": "high"}}}
    made = kueue.attempt_job(settings(template=labels), OWNER, case.job, case.attempt, "lq")
    spec, template = made["spec"], made["spec"]["template"]
    assert (spec["suspend"], spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (True, 2, 2, 0)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lq"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert (template["metadata"]["labels"]["team"], "phalanx/node-rank" in template["metadata"]["labels"]) == (
        "vision",
        False,
    )
    assert "affinity" not in template["spec"]
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["spec"]["terminationGracePeriodSeconds"] > case.job.spec.grace_s
    names = [one["name"] for one in template["spec"]["containers"][0]["env"]]
    assert ("PHALANX_SEAT_RANK" in names, "PHALANX_NODE_ID" in names) == (True, False)


def test_pods_of_a_job_are_found_by_their_index():
    def pod(name, index, **about):
        annotations = {INDEX_ANNOTATION: str(index)}
        return parse_pod({"metadata": {"name": name, "annotations": annotations, **about}}, "nvidia.com/gpu")

    old, new, first = pod("b", 1, deletionTimestamp="now"), pod("c", 1), pod("a", 0)
    found = kueue.pods_by_slot(("s0", "s1"), [old, new, first, pod("x", 7)])
    assert {slot: one.name for slot, one in found.items()} == {"s0": "a", "s1": "c"}
    assert kueue.pods_by_slot(("s0", "s1"), [new, old])["s1"].name == "c"


def test_nodes_with_different_parts_fit_no_job():
    assert kueue.uneven_parts(placed(on="n0:0,1 n1:0,1").attempt) == ""
    assert "2 + 1 GPUs" in kueue.uneven_parts(placed(on="n0:0,1 n1:0").attempt)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", {}), ("lq", {"": "lq"}), ("lq,urgent=high", {"": "lq", "urgent": "high"}), ("a=x,b=y", {"a": "x", "b": "y"})],
)
def test_queues_are_named_for_all_or_by_queue(text, found):
    assert kueue.parse_queues(text) == found


@pytest.mark.parametrize("text", ["a=", "lq,lq", "a b", "lq;x", "x=y,x=z"])
def test_nonsense_is_no_queue(text):
    with pytest.raises(BadRequest):
        kueue.parse_queues(text)


def test_a_job_finds_the_queue_of_its_queue():
    one = job("1")
    assert kueue.queue_of({"": "lq", "default": "x"}, one) == "x"
    assert kueue.queue_of({"": "lq"}, one) == "lq"
    assert kueue.queue_of({"other": "x"}, one) == ""
    assert render.attempt_name(settings(), "17", 1) == "phalanx-0a1b2c3d-j17-e1"
