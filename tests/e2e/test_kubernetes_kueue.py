"""Jobs in a queue of Kueue. The API server, its nodes, the controller of Jobs and Kueue are the fakes of `tests/kubernetes`; head and pods are real processes."""

import contextlib
import os

import pytest

from benchmarks.cluster import wait_until
from tests.contract.engine_rigs import gated, open_gate
from tests.contract.kubernetes_rig import kubernetes
from tests.kubernetes.fake_kueue import PENDING, FakeKueue
from tests.kubernetes.fake_store import KINDS

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
PODS, JOBS = KINDS["", "pods"], KINDS["batch", "jobs"]


@contextlib.contextmanager
def playing(made, fake):
    kueue = FakeKueue(fake)
    kueue.start()
    made.append(kueue)
    try:
        yield
    finally:
        kueue.stop()


@pytest.fixture(scope="module")
def shared():
    made: list[FakeKueue] = []
    words = ("--min-run", "1s", "--kubernetes-queue", "user-queue", "--kubernetes-nodes", "3x2")
    with kubernetes(words, prepare=lambda fake: playing(made, fake)) as rig:
        yield rig, made[0]


@pytest.fixture
def rig(shared):
    made, kueue = shared
    yield made
    kueue.makes_pods = True
    made.fake_nodes.unscheduled.clear()
    for job in made.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            made.call("POST", f"/v1/jobs/{job['id']}/cancel")
            made.wait_for_state(job["id"], "cancelled", "failed", "succeeded")
    wait_until(lambda: not kueue.jobs() and not pods(made), "nothing is left")


@pytest.fixture
def kueue(shared):
    return shared[1]


def pods(rig):
    return rig.fake.store.select(PODS, "default", "", "")[0]


def why(rig, job):
    return rig.call("GET", f"/v1/jobs/{job}/why")["headline"]


def says(rig, job, words):
    """Wait until the reason of a wait has these words."""
    try:
        wait_until(lambda: words in why(rig, job), words)
    except TimeoutError:
        asked = [request for request in rig.fake.requests if "kueue" in request[1]]
        raise AssertionError(f"{why(rig, job)} | {story(rig, job)} | {asked[-5:]}") from None


def story(rig, job):
    return " | ".join(line["text"] for line in rig.history(job))


def in_queue(rig, kueue, job, *, attempt=1):
    """The suspended Job of an attempt."""

    def found():
        return [
            one
            for one in kueue.jobs()
            if (one["metadata"]["labels"]["phalanx/job"], one["metadata"]["labels"]["phalanx/epoch"])
            == (job, str(attempt))
        ]

    [item] = wait_until(found, f"attempt {attempt} of job {job} is in the queue")
    assert item["spec"]["suspend"]
    return item


def runs(rig, job):
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", f"job {job} runs")


def test_a_job_waits_for_kueue_with_its_reason_and_position_and_runs_when_admitted(rig, kueue):
    first = gated(rig, "first", gpus="2x1")
    item = in_queue(rig, kueue, first)
    assert item["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "user-queue"
    says(rig, first, PENDING)
    assert not pods(rig)
    kueue.say(item, "Inadmissible", "LocalQueue user-queue doesn't exist")
    says(rig, first, "LocalQueue user-queue doesn't exist (Inadmissible)")
    kueue.admit(item)
    runs(rig, first)
    places = rig.job(first)["nodes"]
    assert {one["spec"]["nodeName"] for one in pods(rig)} <= {"n0", "n1", "n2"}
    assert len(places) == 2
    open_gate(rig, "first")
    view = rig.wait_for_state(first, "succeeded", "failed")
    assert (view["state"], view["attempts"]) == ("succeeded", 1), story(rig, first)
    wait_until(lambda: not kueue.jobs(), "its Job goes with the attempt")


def test_a_job_that_kueue_preempts_saves_within_its_grace_and_is_queued_again(rig, kueue):
    marker = os.path.join(rig.home, "saved")
    script = f"trap 'sleep 10; touch {marker}; exit 0' TERM; echo begun; while :; do sleep 0.05; done"
    job = rig.submit(run=script, gpus="2x1", tasks_per_node=1, name="saves", grace="25s")
    item = in_queue(rig, kueue, job)
    kueue.admit(item)
    runs(rig, job)
    kueue.preempt(item)
    again = in_queue(rig, kueue, job, attempt=2)
    assert os.path.exists(marker), "a save of 10 s is longer than any fixed time of ours"
    assert (
        "attempt 1 ended (preempted): Kueue stopped it in the queue user-queue: Preempted to accommodate a higher priority Workload (Preempted)"
        in story(rig, job)
    )
    assert again["metadata"]["uid"] != item["metadata"]["uid"]
    wait_until(lambda: len(kueue.jobs()) == 1, "the Job of the attempt before is deleted")


def test_a_job_that_is_cancelled_in_the_queue_ends_at_once(rig, kueue):
    job = gated(rig, "cancelled", gpus="1")
    in_queue(rig, kueue, job)
    says(rig, job, "of Kueue")
    rig.call("POST", f"/v1/jobs/{job}/cancel")
    assert rig.wait_for_state(job, "cancelled", "failed")["state"] == "cancelled"
    wait_until(lambda: not kueue.jobs(), "its Job leaves the queue")


def test_a_job_that_is_deleted_by_hand_in_the_queue_is_queued_again(rig, kueue):
    job = gated(rig, "deleted", gpus="1")
    item = in_queue(rig, kueue, job)
    says(rig, job, "of Kueue")
    rig.fake.store.delete(JOBS, "default", item["metadata"]["name"], {})
    in_queue(rig, kueue, job, attempt=2)
    assert "was deleted in Kubernetes while it waited" in story(rig, job)


def test_a_gang_of_which_kueue_admits_all_and_no_pod_comes_is_withdrawn_as_a_whole(rig, kueue):
    kueue.makes_pods = False
    job = gated(rig, "podless", gpus="2x1")
    item = in_queue(rig, kueue, job)
    says(rig, job, "of Kueue")
    kueue.admit(item)
    in_queue(rig, kueue, job, attempt=2)
    assert "-e1 has no pod for pod-0 after 10 s: kubectl describe job/phalanx-" in story(rig, job)
    assert not pods(rig)


def test_a_head_that_comes_back_finds_its_jobs_in_the_queue(rig, kueue):
    job = gated(rig, "back", gpus="2x1")
    item = in_queue(rig, kueue, job)
    says(rig, job, "of Kueue")
    rig.kill_head()
    kueue.admit(item)
    rig.start(wait_nodes=False)
    runs(rig, job)
    open_gate(rig, "back")
    view = rig.wait_for_state(job, "succeeded", "failed")
    assert (view["state"], view["attempts"]) == ("succeeded", 1), story(rig, job)


def test_a_position_is_shown_where_kueue_lets_us_see_it(rig, kueue):
    job = gated(rig, "third", gpus="1")
    item = in_queue(rig, kueue, job)
    other = {"metadata": {"name": "other", "uid": "u-other"}}
    kueue.show_positions("user-queue", other, {"metadata": {"name": "x", "uid": "u-x"}}, item)
    rig.kill_head()  # the head before has seen that there are none, and asks again in ten minutes
    rig.start(wait_nodes=False)
    says(rig, job, ", 2 before it:")
