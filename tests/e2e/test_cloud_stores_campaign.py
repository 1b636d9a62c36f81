"""Jobs whose data, checkpoints and outputs are in s3://, gs:// or az://: the same story with each, told by the variables of that cloud's tools."""

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
from phalanx.cli.transfers.store_removal import measure_folders, remove_folder, stored_folders
from phalanx.client import Client
from phalanx.node.data import fuse_mounts
from phalanx.node.data.rclone_remote import why_no_mounts
from tests.object_rig import SCHEMES, faulty_store, missing_tool

pytestmark = [pytest.mark.prove, pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(400)]
STEPS = 60
PHALANX = os.path.join(os.path.dirname(sys.executable), "phalanx")
BIG = bytes(range(251)) * 100_000  # 25 MB: two parts
READ = """
import hashlib, os
folder = os.environ["PHALANX_DATA_TRAIN"]
print("names", sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/sub")))
print("big", hashlib.sha256(open(f"{folder}/sub/big.bin", "rb").read()).hexdigest(), flush=True)
"""
WRITE = """
import os, sys, time
out = os.environ["PHALANX_OUTPUT_DIR"]
with open(f"{out}/log-{os.environ['RANK']}.txt", "a") as log:
    log.write(os.environ["PHALANX_EPOCH"] + "\\n")
if os.environ["RANK"] == "0":
    open(f"{out}/model [1].bin", "wb").write(bytes(range(251)) * 100_000)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module", params=SCHEMES)
def store(request):
    if why := missing_tool(request.param):
        pytest.skip(why)
    with faulty_store(request.param) as made, pytest.MonkeyPatch.context() as patch:
        for name, text in made.variables.items():
            patch.setenv(name, text)
        from phalanx.node.data.object_store import ObjectFolder

        folder = ObjectFolder(f"{made.place}/train")
        for name, data in (("a.txt", b"hello"), ("sub/big.bin", BIG), ("odd[1],x.txt", b"odd")):
            folder.replace(name, data)
        yield made


@pytest.fixture
def head(store):
    store.forget()
    with bench_cluster("3x1") as made:
        yield made
        wait_until(lambda: not fuse_mounts.mounts_below(made.home), "nothing is mounted at the end")
    store.forget()


def phalanx(head, store, *words, check=True):
    env = {**os.environ, **store.variables, "PHALANX_HOME": head.home}
    return subprocess.run(
        [PHALANX, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=check
    ).stdout


def output(head, store, job_id, rank="0"):
    return phalanx(head, store, "logs", job_id, "--rank", rank)


def stored(place):
    from phalanx.node.data.object_store import ObjectFolder

    return ObjectFolder(place).list()


def clean(head, kind):
    """As `phalanx clean --stores --yes` does for files that are old enough."""
    found = measure_folders(stored_folders(Client(home=head.home), 0.0, [kind], time.time()))
    assert found
    assert not [one.stays for one in found if one.stays]
    for one in found:
        remove_folder(one)


def reads(head, store, mode):
    return head.submit(
        run=[sys.executable, "-c", READ],
        gpus="1",
        data={"train": f"{store.place}/train", "mode": mode},
        env=store.variables,
    )


def is_read_whole(said):
    assert "names ['a.txt', 'odd[1],x.txt', 'sub'] ['big.bin']" in said
    assert f"big {hashlib.sha256(BIG).hexdigest()}" in said


def test_a_dataset_is_copied_once_and_again_when_it_has_changed(head, store):
    from phalanx.node.data.object_store import ObjectFolder

    first = reads(head, store, "stage")
    head.wait_for_state(first, "succeeded")
    is_read_whole(output(head, store, first))
    second = reads(head, store, "stage")
    head.wait_for_state(second, "succeeded")
    is_read_whole(output(head, store, second))
    node = head.call("GET", f"/v1/jobs/{first}")["attempts"][0]["grants"][0]["node_id"]
    if head.call("GET", f"/v1/jobs/{second}")["attempts"][0]["grants"][0]["node_id"] == node:
        assert "0 bytes moved" in output(head, store, second, "supervisor")
    ObjectFolder(f"{store.place}/train").replace("a.txt", b"other")
    third = reads(head, store, "stage")
    head.wait_for_state(third, "succeeded")
    assert "0 bytes moved" not in output(head, store, third, "supervisor")


def test_a_program_gets_the_address_and_reads_the_store_itself(head, store):
    script = (
        "import os, obstore; from obstore.store import from_url\n"
        "print('address', os.environ['PHALANX_DATA_TRAIN'], sorted(n for n in os.environ if n in os.environ['NAMES'].split()))"
    )
    job_id = head.submit(
        run=[sys.executable, "-c", script],
        gpus="1",
        data={"train": f"{store.place}/train", "mode": "stream"},
        env={**store.variables, "NAMES": " ".join(store.variables)},
    )
    head.wait_for_state(job_id, "succeeded")
    assert f"address {store.place}/train {sorted(store.variables)}" in output(head, store, job_id)


@pytest.mark.root
@pytest.mark.skipif(bool(why_no_mounts(os.environ["PATH"])), reason="this machine cannot mount: make mount-tools")
def test_a_bucket_is_mounted_and_so_is_one_object_of_it(head, store):
    job_id = reads(head, store, "mount")
    head.wait_for_state(job_id, "succeeded")
    is_read_whole(output(head, store, job_id))
    assert "data train: mounted in " in output(head, store, job_id, "supervisor")
    script = "import os; path = os.environ['PHALANX_DATA_TRAIN']; print('got', open(path).read(), os.listdir(os.path.dirname(path)))"
    one = head.submit(
        run=[sys.executable, "-c", script],
        gpus="1",
        data={"train": f"{store.place}/train/odd[1],x.txt", "mode": "mount"},
        env=store.variables,
    )
    head.wait_for_state(one, "succeeded")
    assert "got odd ['odd[1],x.txt']" in output(head, store, one)


@pytest.mark.parametrize("mode", ["stage", "mount"])
@pytest.mark.parametrize(
    ("place", "why"), [("bucket/nothing", "no files there"), ("no-such-bucket/x", "no such bucket")]
)
def test_what_is_not_there_ends_the_job_before_it_starts_and_says_so(head, store, mode, place, why):
    if mode == "mount" and why_no_mounts(os.environ["PATH"]):
        pytest.skip("this machine cannot mount: make mount-tools")
    job_id = head.submit(
        run=[sys.executable, "-c", "print('started')"],
        gpus="1",
        data={"train": f"{store.scheme}://{place}", "mode": mode},
        env=store.variables,
    )
    head.wait_for_state(job_id, "failed")
    assert why in json.dumps(head.job(job_id)) + head.call("GET", f"/v1/jobs/{job_id}/why")["headline"]
    assert "started" not in output(head, store, job_id)


def test_a_training_that_loses_its_node_resumes_from_the_store(head, store):
    job_id = head.submit(
        run=[sys.executable, f"{ROOT}/tests/e2e/kept_train.py", str(STEPS)],
        gpus="2x1",
        checkpoint=f"{store.place}/runs",
        env=store.variables,
    )
    wait_until(lambda: head.job(job_id)["checkpoints"], "a checkpoint is published")
    head.kill_node(head.call("GET", f"/v1/jobs/{job_id}")["attempts"][0]["grants"][1]["node_id"])
    head.wait_for_state(job_id, "succeeded")
    assert head.call("GET", f"/v1/jobs/{job_id}")["attempts"][-1]["resume_step"] >= 10
    published = [one["path"] for one in head.job(job_id)["checkpoints"]]
    assert all(path.startswith(f"{store.place}/runs/{job_id}-") for path in published)
    wanted = {path.removeprefix(f"{store.place}/runs/") for path in published}

    def steps():
        return {
            "/".join(path.split("/")[:3]) for path in stored(f"{store.place}/runs") if path.startswith(f"{job_id}-")
        }

    wait_until(lambda: steps() == wanted, "the store has the published ones only", every_s=0.3)
    clean(head, "checkpoints")
    assert steps() == {published[-1].removeprefix(f"{store.place}/runs/")}


def test_outputs_outlive_a_node_and_a_download_that_is_killed_and_are_cleaned(head, store, tmp_path):
    go, target = tmp_path / "go", tmp_path / "got"
    job_id = head.submit(
        run=[sys.executable, "-c", WRITE, str(go)], gpus="2x1", outputs=f"{store.place}/results", env=store.variables
    )
    wait_until(lambda: head.job(job_id)["state"] == "running", "it runs")
    head.kill_node(head.call("GET", f"/v1/jobs/{job_id}")["attempts"][0]["grants"][1]["node_id"])
    wait_until(lambda: head.job(job_id)["epoch"] == 2 and head.job(job_id)["state"] == "running", "a second attempt")
    go.touch()
    head.wait_for_state(job_id, "succeeded")
    place = head.job(job_id)["output_dir"]
    assert place.startswith(f"{store.place}/results/{job_id}-")
    parts = []

    def slow(path, body):
        if "model" in path:
            parts.append(path)
            while store.change is slow and len(parts) > 1:
                time.sleep(0.02)
        return body

    store.change = slow
    running = subprocess.Popen(
        [PHALANX, "get", job_id, str(target)], env={**os.environ, **store.variables, "PHALANX_HOME": head.home}
    )
    partial = target / "model [1].bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size == 16 << 20, "the first of two parts is here")
    running.send_signal(signal.SIGKILL)
    running.wait()
    store.forget()
    phalanx(head, store, "get", job_id, str(target))
    assert len([path for method, path in store.requests if method == "GET" and "model" in path]) == 1, "it went on"
    assert (target / "model [1].bin").read_bytes() == BIG
    assert (target / "log-0.txt").read_text().split()[-1] == "2"
    assert (target / "node-1/log-1.txt").exists()
    clean(head, "outputs")
    assert stored(place) == {}
