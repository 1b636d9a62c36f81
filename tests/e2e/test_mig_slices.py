"""MIG slices live, on virtual devices: two projects on one GPU, a third job that waits, and nothing left of a slice afterwards."""

import json
import os
import signal
import sys
import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PROGRAM = """
import os, pathlib, time
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["PHALANX_MIG_PROFILE"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""
WAITS = ("--", sys.executable, "-c", PROGRAM)


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("mig"))
    up = shell("up", "--virtual", "1xh100:1+mig", "--port", str(free_port()))
    assert up.stdout.splitlines()[-1] == "next: phalanx run --gpus 1g.10gb -- python train.py"
    yield shell
    shell("down", "--cancel-jobs")


def slices(phalanx):
    """The instances of the virtual GPU, as profiles with their starts; None while the supervisor's record of its own differs."""
    found = []
    for name, key in (("virtual_mig.json", "instances"), ("slices.json", "slices")):
        (path,) = phalanx.home.glob(f"**/{name}")
        found.append({(one["profile"], one["start"]) for one in json.loads(path.read_text())[key]})
    instances, own = found
    return instances if instances == own else None


def eventually(condition):
    until = time.monotonic() + 60.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.2)
    assert condition()


def runs(phalanx, job, epoch=1):
    """Whether the ranks of this attempt run."""
    return [(one["epoch"], one["state"]) for one in phalanx.job(job)["attempts"][-1:]] == [(epoch, "running")]


def ends_well(phalanx, job):
    eventually(lambda: phalanx.job(job)["job"]["state"] not in ("pending", "running"))
    assert phalanx.job(job)["job"]["state"] == "succeeded"


def test_two_projects_share_a_gpu_by_slices_and_a_third_job_waits(phalanx):
    first = phalanx("submit", "--quiet", "--gpus", "h100.3g.40gb", *WAITS).stdout.strip()
    phalanx("projects", "add", "nlp", "--member", phalanx.json("show", first)["job"]["user"])
    second = phalanx(
        "submit", "--quiet", "--project", "nlp", "--gpus", "40GiB", "--share", "mig", *WAITS
    ).stdout.strip()
    eventually(lambda: runs(phalanx, first) and runs(phalanx, second))
    assert slices(phalanx) == {("3g.40gb", 4), ("3g.40gb", 0)}
    third = phalanx("submit", "--quiet", "--gpus", "1g.10gb", *WAITS).stdout.strip()
    eventually(lambda: "MIG" in phalanx.job(third)["job"]["detail"])
    assert "MIG" in phalanx("ps").stdout
    why = phalanx("why", third).stdout
    assert "needs 1 x 1g.10gb; 1 GPU has MIG mode on, none has room for such a slice" in why
    page = phalanx("nodes", "show", "n0").stdout
    assert f"3g.40gb on 4-7 of job {first}, 3g.40gb on 0-3 of job {second}" in page
    phalanx("submit", "--gpus", "h100:1", *WAITS, code=64)
    (phalanx.work / "go").touch()
    for job in (first, second, third):
        ends_well(phalanx, job)
    seen = [phalanx("logs", job).stdout.split() for job in (first, second)]
    assert [words[-1] for words in seen] == ["3g.40gb", "3g.40gb"]
    assert len({words[-2] for words in seen}) == 2
    assert all(words[-2].startswith("MIG-") for words in seen)
    eventually(lambda: slices(phalanx) == set())


def test_a_killed_supervisor_leaves_no_slice_and_the_job_gets_another(phalanx):
    (phalanx.work / "go").unlink()
    job = phalanx("submit", "--quiet", "--gpus", "h100.4g.40gb", *WAITS).stdout.strip()
    eventually(lambda: runs(phalanx, job))
    assert slices(phalanx) == {("4g.40gb", 0)}
    os.kill(phalanx.processes("phalanx.app.node")[0], signal.SIGKILL)
    eventually(lambda: runs(phalanx, job, epoch=2))
    assert slices(phalanx) == {("4g.40gb", 0)}
    (phalanx.work / "go").touch()
    ends_well(phalanx, job)
    eventually(lambda: slices(phalanx) == set())
