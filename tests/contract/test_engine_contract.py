"""What every engine does alike: one suite, run on each of them with real daemons. `make test-engines` runs just this.

Files under the rig's folder are the signals; nothing here measures time.
"""

# Ids are written as plain words here, as in a drawing.
# mypy: disable-error-code="arg-type, var-annotated"

import os
import signal
import sys
from functools import partial

import pytest

from benchmarks.cluster import ROOT, wait_until
from tests.contract.engine_rigs import RIGS, WHY_NOT, gated, open_gate

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(240)]
TRAIN = os.path.join(ROOT, "examples", "train_gpt", "train.py")
SMALL = ["--d-model", "32", "--layers", "1", "--heads", "2", "--seq", "32", "--batch", "4", "--print-every", "1"]


@pytest.fixture(scope="module", params=sorted(RIGS), ids=lambda name: f"on_{name}")
def rig(request):
    why_not = WHY_NOT[request.param]()
    if why_not:
        pytest.skip(why_not)
    with RIGS[request.param]() as made:
        yield made


@pytest.fixture
def whole(rig):
    """All nodes up, nothing running."""
    wait_until(partial(is_whole, rig), "all nodes are up")
    yield rig
    for job in rig.call("GET", "/v1/jobs")["jobs"]:
        if job["state"] in ("pending", "running"):
            rig.call("POST", f"/v1/jobs/{job['id']}/cancel")
            rig.wait_for_state(job["id"], "cancelled", "failed", "succeeded")


def names(rig):
    """Of its three nodes."""
    return getattr(rig, "names", ("n0", "n1", "n2"))


def ended(rig, job):
    return rig.wait_for_state(job, "succeeded", "failed", "cancelled", "timeout")


def runs(rig, job):
    wait_until(lambda: rig.job(job)["attempt_state"] == "running", f"job {job} runs")


def log_of(rig, job, rank=None):
    text, cursor, of_rank = "", "", "" if rank is None else f"&rank={rank}"
    while True:
        reply = rig.call("GET", f"/v1/jobs/{job}/logs?cursor={cursor}{of_rank}")
        text += "".join(chunk["text"] for chunk in reply["chunks"])
        cursor = reply["cursor"]
        if not reply["more"]:
            return text


def train(rig, *, steps, **body):
    run = [sys.executable, TRAIN, "--steps", str(steps), "--save-every-steps", "20", *SMALL]
    return rig.submit(run=run, name="train", warm=True, **body)


def losses_by_step(rig, job):
    found = {}
    for step in rig.call("GET", f"/v1/jobs/{job}/steps?limit=10000")["steps"]:
        found.setdefault(step["step"], set()).add(round(step["loss"], 4))
    return found


def kinds(rig, job):
    return [line["kind"] for line in rig.history(job)]


def test_a_submitted_gang_runs_with_its_variables_and_its_lines_are_kept(whole):
    script = 'echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK here, $PHALANX_NUM_GPUS GPUs"; echo wrong >&2'
    job = whole.submit(run=script, tasks_per_node=2, gpus="3x2", name="gang")
    view = ended(whole, job)
    assert (view["state"], sorted(view["nodes"])) == ("succeeded", list(names(whole))), whole.history(job)
    for rank in range(6):
        text = log_of(whole, job, rank)
        assert f"rank {rank} of 6, {rank % 2} here, 6 GPUs\n" in text
        assert "wrong\n" in text


@pytest.mark.parametrize(("how", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_code_is_that_of_the_task_that_failed_by_itself(whole, how, code):
    job = whole.submit(
        run=f'[ "$RANK" != 1 ] || {{ sleep 0.2; {how}; }}; sleep 30',
        tasks_per_node=1,
        gpus="2x1",
        name="ends",
        grace="1s",
    )
    view = ended(whole, job)
    assert (view["state"], view["exit_code"]) == ("failed", code), whole.history(job)


def test_a_cancelled_job_ends_everywhere_and_never_runs_again(whole):
    job = gated(whole, "never", gpus="2x2")
    runs(whole, job)
    whole.call("POST", f"/v1/jobs/{job}/cancel")
    assert ended(whole, job)["state"] == "cancelled"
    assert "over" not in log_of(whole, job)
    wait_until(lambda: not any(node["jobs"] for node in whole.nodes()), "its devices are free")


def test_an_array_runs_every_element_with_its_own_number(whole):
    array, _ = whole.submit(run="echo element $PHALANX_ARRAY_TASK_ID", gpus="1", name="many", array="0-6%3").split("_")
    for index in range(7):
        element = f"{array}_{index}"
        assert ended(whole, element)["state"] == "succeeded"
        assert log_of(whole, element) == f"element {index}\n"


def test_a_dependent_starts_after_its_parent_and_not_after_a_failed_one(whole):
    parent = gated(whole, "parent", gpus="1")
    child = whole.submit(run="echo child", gpus="1", name="child", depends_on=f"afterok:{parent}")
    runs(whole, parent)
    assert whole.job(child)["state"] == "pending"
    open_gate(whole, "parent")
    assert ended(whole, child)["state"] == "succeeded"
    assert whole.job(child)["started_s"] >= whole.job(parent)["ended_s"]
    failing = whole.submit(run="exit 3", gpus="1", name="fails")
    orphan = whole.submit(run="true", gpus="1", name="orphan", depends_on=f"afterok:{failing}")
    assert ended(whole, orphan)["state"] == "cancelled"


@pytest.mark.torch
def test_a_preempted_training_saves_and_resumes_where_it_was(whole):
    training = train(whole, steps=300, gpus="2x1")
    wait_until(lambda: len(losses_by_step(whole, training)) >= 10, "it trains")
    urgent = gated(whole, "urgent", gpus="3x2", priority=10)
    runs(whole, urgent)
    assert (whole.job(training)["state"], whole.job(training)["checkpoints"] != []) == ("pending", True)
    open_gate(whole, "urgent")
    assert ended(whole, urgent)["state"] == "succeeded"
    assert ended(whole, training)["state"] == "succeeded", whole.history(training)
    usage = whole.call("GET", f"/v1/jobs/{training}/receipt")
    assert [attempt["cause"] for attempt in usage["attempts"]] == ["preempted", "succeeded"]
    assert usage["attempts"][1]["resumed_from_step"] >= 10
    assert (usage["steps_lost"], usage["overlapping_steps"]) == (0, 0)
    assert sorted(losses_by_step(whole, training)) == list(range(1, 301))


def test_a_gang_with_a_failed_task_starts_again_in_place(whole):
    script = (
        'echo "life $PHALANX_RESTART_COUNT"; [ "$PHALANX_RESTART_COUNT" != 0 ] || [ "$RANK" != 1 ] || exit 9; sleep 1'
    )
    job = whole.submit(run=script, tasks_per_node=1, gpus="2x1", name="again", retry=1, grace="1s")
    view = ended(whole, job)
    assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 1), whole.history(job)
    assert "life 1\n" in log_of(whole, job, 0)


@pytest.mark.torch
def test_a_training_whose_node_dies_goes_on_elsewhere_from_its_checkpoint(whole):
    job = train(whole, steps=400, gpus="2x1")
    wait_until(lambda: "checkpoint" in kinds(whole, job), "it has saved")
    dead = whole.job(job)["nodes"][1]
    whole.kill_node(dead, signal.SIGKILL)
    view = ended(whole, job)
    assert (view["state"], view["attempts"]) == ("succeeded", 2), whole.history(job)
    usage = whole.call("GET", f"/v1/jobs/{job}/receipt")
    assert usage["attempts"][1]["resumed_from_step"] >= 20
    for step, losses in losses_by_step(whole, job).items():
        assert max(losses) - min(losses) < 1e-3, f"step {step} was made twice with different losses: {losses}"
    wait_until(partial(is_whole, whole), "the node is back, or another in its place")


def is_whole(rig):
    return sum(node["state"] == "up" for node in rig.nodes()) == 3


def test_a_head_that_is_killed_and_comes_back_is_not_noticed_by_a_job(whole):
    job = gated(whole, "head", gpus="3x1")
    runs(whole, job)
    whole.kill_head()
    whole.start(wait_nodes=False)
    wait_until(lambda: whole.job(job)["attempt_state"] == "running", "the head knows the job")
    open_gate(whole, "head")
    view = ended(whole, job)
    assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), whole.history(job)
    assert log_of(whole, job, 2) == "begun\nover\n"
