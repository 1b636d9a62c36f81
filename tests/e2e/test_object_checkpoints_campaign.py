"""A job whose checkpoints are in an object store: its node is lost, the store fails, an upload is killed, an object is changed."""

import json
import os
import re
import signal
import sys
import time

import pytest

from benchmarks.cluster import ROOT, command_words, wait_until
from benchmarks.cluster import cluster as bench_cluster
from tests.object_rig import BUCKET, MOTO, faulty_store

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools"),
]
STEPS = 60
PLACE = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def store():
    with faulty_store() as made:
        yield made


@pytest.fixture
def head(store):
    store.forget()
    with bench_cluster("3x1") as made:
        yield made
    store.forget()


def submit(head, store, **words):
    return head.submit(
        run=[sys.executable, f"{ROOT}/tests/e2e/kept_train.py", str(STEPS)],
        gpus="2x1",
        checkpoint=PLACE,
        env=store.variables,
        **words,
    )


def losses(head, job_id):
    """The losses by step, from the outputs of node rank 0; a step made again must have the loss it had."""
    (folder,) = [one for one in os.listdir(f"{head.home}/outputs") if one.startswith(f"{job_id}-")]
    found: dict[int, str] = {}
    with open(f"{head.home}/outputs/{folder}/losses.txt", encoding="ascii") as file:
        for step, loss in (line.split() for line in file):
            assert found.setdefault(int(step), loss) == loss
    return found


def attempts(head, job_id):
    return head.call("GET", f"/v1/jobs/{job_id}")["attempts"]


def kept_files(head):
    return [path for path, _, names in os.walk(f"{head.home}/checkpoints") for name in names if name.endswith(".pt")]


def log(head, job_id):
    return "\n".join(json.dumps(one) for one in head.history(job_id))


def test_a_job_that_loses_its_node_resumes_from_the_store_with_the_same_losses(head, store):
    plain = submit(head, store)
    head.wait_for_state(plain, "succeeded")
    expected = losses(head, plain)
    assert sorted(expected) == list(range(1, STEPS + 1))
    job_id = submit(head, store)
    wait_until(lambda: head.job(job_id)["checkpoints"], "a checkpoint is published")
    head.kill_node(attempts(head, job_id)[0]["grants"][1]["node_id"])
    head.wait_for_state(job_id, "succeeded")
    last = attempts(head, job_id)[-1]
    assert last["resume_step"] >= 10
    assert losses(head, job_id) == expected
    published = head.job(job_id)["checkpoints"]
    assert [one["path"].startswith(f"{PLACE}/{job_id}-") for one in published] == [True, True]
    assert kept_files(head) == [], "none of it is at the head"

    def steps():
        from phalanx.node.data.object_store import ObjectFolder

        with pytest.MonkeyPatch.context() as patch:
            for name, text in store.variables.items():
                patch.setenv(name, text)
            found = ObjectFolder(PLACE).list()
        return {"/".join(path.split("/")[:3]) for path in found if path.startswith(f"{job_id}-")}

    wanted = {one["path"].removeprefix(f"{PLACE}/") for one in published}
    wait_until(lambda: steps() == wanted, "the store has the published ones only", every_s=0.3)


def test_a_store_that_fails_for_a_while_delays_checkpoints_and_does_not_stop_the_training(head, store):
    seen = []

    def fault(method, path, _body):
        if method == "PUT" and "/objects/" in path:
            seen.append(path)
            return len(seen) < 9
        return False

    store.fault = fault
    job_id = submit(head, store)
    head.wait_for_state(job_id, "succeeded")
    assert len(seen) >= 9
    assert len(head.job(job_id)["checkpoints"]) == 2
    assert len(attempts(head, job_id)) == 1


def test_an_upload_that_is_killed_goes_on_and_the_earlier_checkpoint_is_used_meanwhile(head, store):
    job_id = submit(head, store)
    first = wait_until(lambda: head.job(job_id)["checkpoints"], "a checkpoint is published")[-1]["step"]
    stuck = []

    def fault(method, path, _body):
        if method == "PUT" and "/objects/" in path and f"step-{first:08d}" not in path:
            stuck.append(path)
            while store.fault is fault:
                time.sleep(0.05)
        return False

    store.fault = fault
    wait_until(lambda: stuck, "an upload is under way")
    pids = [
        pid
        for node in ("n0", "n1", "n2")
        for pid in head.node_pids(node)
        if "phalanx.node.data.job_objects_main" in command_words(pid)
    ]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    head.kill_node(attempts(head, job_id)[0]["grants"][0]["node_id"])
    wait_until(lambda: len(attempts(head, job_id)) == 2, "a second attempt")
    store.forget()
    head.wait_for_state(job_id, "succeeded")
    assert attempts(head, job_id)[1]["resume_step"] == first
    assert sorted(losses(head, job_id)) == list(range(1, STEPS + 1))


def test_a_changed_object_is_refused_and_the_checkpoint_before_it_is_used(head, store):
    job_id = submit(head, store)
    published = wait_until(lambda: len(found := head.job(job_id)["checkpoints"]) == 2 and found, "two checkpoints")
    bad = re.compile(f"step-{published[1]['step']:08d}/objects/")
    store.change = lambda path, body: b"x" + body[1:] if bad.search(path) else body
    head.kill_node(attempts(head, job_id)[0]["grants"][1]["node_id"])
    head.wait_for_state(job_id, "succeeded")
    resumed = attempts(head, job_id)[1]["resume_step"]
    newest = published[1]["step"]
    assert resumed != newest
    assert sorted(losses(head, job_id)) == list(range(1, STEPS + 1))


def test_a_job_that_may_not_write_there_fails_at_its_start_and_says_why(head, store):
    job_id = head.submit(run=["true"], gpus="1", checkpoint="s3://no-such-bucket/x", env=store.variables)
    job = head.wait_for_state(job_id, "failed")
    assert "checkpoint: s3://no-such-bucket/x" in json.dumps(job)
