"""A job whose outputs are in an object store: its link breaks, its node is lost, the store is away at the end, and `phalanx get` is killed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import ROOT, wait_until
from benchmarks.cluster import cluster as bench_cluster
from tests.object_rig import BUCKET, MOTO, BreakingLink, faulty_store

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(MOTO is None, reason="moto_server is not installed: make s3-tools"),
]
PLACE = f"s3://{BUCKET}/results"
BIG = 48 << 20
WRITES = f"""
import os, sys, time
out, rank = os.environ["PHALANX_OUTPUT_DIR"], os.environ["RANK"]
with open(f"{{out}}/log-{{rank}}.txt", "a") as log:
    log.write(os.environ["PHALANX_EPOCH"] + "\\n")
if rank == "0" and not os.path.exists(f"{{out}}/model.bin"):
    with open(f"{{out}}/model.bin", "wb") as model:
        model.write(bytes(range(256)) * ({BIG} // 256))
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def store():
    with faulty_store() as made:
        yield made


@pytest.fixture
def link(store):
    made = BreakingLink(int(store.variables["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    yield made
    made.close()


@pytest.fixture
def head(store):
    store.forget()
    with bench_cluster("3x1") as made:
        yield made
    store.forget()


def variables(store, link):
    return {**store.variables, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}


def submit(head, env, go, *, gpus="2x1", **words):
    return head.submit(run=[sys.executable, "-c", WRITES, str(go)], gpus=gpus, outputs=PLACE, env=env, **words)


def get(head, env, job_id, folder):
    command = [os.path.join(os.path.dirname(sys.executable), "phalanx"), "get", job_id, str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **env, "PHALANX_HOME": head.home}, stdout=subprocess.PIPE, text=True
    )


def files(folder):
    return sorted(
        os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
    )


def test_a_link_that_breaks_and_a_lost_node_cost_neither_files_nor_much_traffic(head, store, link, tmp_path):
    link.breaks, link.bytes_each = 5, 3 << 20
    env, go = variables(store, link), tmp_path / "go"
    job_id = submit(head, env, go)
    wait_until(lambda: head.job(job_id)["state"] == "running", "it runs")
    first = head.call("GET", f"/v1/jobs/{job_id}")["attempts"][0]
    head.kill_node(first["grants"][1]["node_id"])
    wait_until(lambda: head.job(job_id)["epoch"] == 2 and head.job(job_id)["state"] == "running", "a second attempt")
    go.touch()
    head.wait_for_state(job_id, "succeeded")
    assert link.broken == 5
    assert store.sent_bytes < 2.5 * BIG, "only the broken requests were sent again"
    assert head.job(job_id)["output_dir"].startswith(f"{PLACE}/{job_id}-")
    assert not [one for one in os.listdir(f"{head.home}/outputs") if one.startswith(job_id)], (
        "none of it is at the head"
    )
    target = tmp_path / "got"
    assert get(head, env, job_id, target).wait() == 0
    assert {"log-0.txt", "model.bin", "node-1/log-1.txt"} == set(files(target))
    assert (target / "log-0.txt").read_text().split()[-1] == "2"
    assert (
        hashlib.sha256((target / "model.bin").read_bytes()).digest()
        == hashlib.sha256(bytes(range(256)) * (BIG // 256)).digest()
    )


def test_a_store_that_is_away_at_the_end_is_waited_for(head, store, link, tmp_path):
    env, go = variables(store, link), tmp_path / "go"
    refused = []

    def fault(method, path, _body):
        if method in {"PUT", "POST"} and "model.bin" in path:
            refused.append(path)
            return len(refused) < 9
        return False

    job_id = submit(head, env, go, gpus="1")
    wait_until(lambda: head.job(job_id)["state"] == "running", "it runs")
    store.fault = fault
    go.touch()
    head.wait_for_state(job_id, "succeeded")
    assert len(refused) >= 9
    target = tmp_path / "got"
    assert get(head, env, job_id, target).wait() == 0
    assert os.path.getsize(target / "model.bin") == BIG


def test_a_download_that_is_killed_goes_on(head, store, link, tmp_path):
    env, go = variables(store, link), tmp_path / "go"
    go.touch()
    job_id = submit(head, env, go, gpus="1")
    head.wait_for_state(job_id, "succeeded")
    ranges = []

    def slow(path, body):
        ranges.append(path)
        while store.change is slow and sum("model.bin" in one for one in ranges) > 1:
            time.sleep(0.02)
        return body

    store.change = slow
    target = tmp_path / "got"
    running = get(head, env, job_id, target)
    partial = target / "model.bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0, "a part is here")
    running.send_signal(signal.SIGKILL)
    running.wait()
    had = partial.stat().st_size
    store.forget()
    assert get(head, env, job_id, target).wait() == 0
    assert files(target) == ["log-0.txt", "model.bin"]
    assert store.read_bytes <= BIG - had + (1 << 20)
    store.forget()
    assert get(head, env, job_id, target).wait() == 0
    assert store.read_bytes < 1 << 20, "all of it was here"


def test_a_job_that_may_not_write_there_fails_at_its_start_and_says_why(head, store):
    job_id = head.submit(run=["true"], gpus="1", outputs="s3://no-such-bucket/x", env=store.variables)
    job = head.wait_for_state(job_id, "failed")
    assert "outputs: s3://no-such-bucket/x" in json.dumps(job)
