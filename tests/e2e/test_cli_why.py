"""`why`, dry runs and `whatif --since` against a real head with virtual nodes, as a user types them."""

import json
import sys

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

PYTHON = sys.executable
SLEEPS = ("--", PYTHON, "-c", "import time; time.sleep(600)")


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("why"))
    shell("up", "--virtual", "2x2", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def submitted(phalanx, *words):
    return phalanx("submit", "--quiet", *words).stdout.strip()


def test_dry_run_tells_nodes_start_and_gpu_hours_and_submits_nothing(phalanx):
    told = phalanx("submit", "--dry-run", "--gpus", "2x2", "--time", "1h", *SLEEPS).stdout
    assert "nothing was submitted" in told
    assert "would start now on n0, n1" in told
    assert "runs at most 1h00m, 4 GPU-hours (its time limit)" in told
    assert phalanx.json("ps", "-a") == []
    found = json.loads(phalanx("run", "--dry-run", "--json", "--gpus", "1", *SLEEPS).stdout)
    assert (found["starts"], found["gpus"], found["gpu_hours_high"]) == (True, 1, None)
    refused = phalanx("submit", "--dry-run", "--gpus", "64", *SLEEPS, code=64).stderr
    assert "64" in refused


def test_why_of_a_job_that_waits_runs_and_is_over(phalanx):
    holder = submitted(phalanx, "--gpus", "2x2", "--time", "10m", "--no-preempt", "--name", "holder", *SLEEPS)
    phalanx.until(holder, "running")
    assert f"job {holder} has run for" in phalanx("why", "holder").stdout
    late = submitted(phalanx, "--gpus", "2", "--name", "late", *SLEEPS)
    page = phalanx("why", late).stdout
    assert f"job {late} waits (resources): needs 1 x 2 GPUs; 0 free in total" in page
    assert "expected to start within 10 min" in page
    assert f"wait for job {holder} to finish" in page
    row = next(line for line in page.splitlines() if line.split()[:1] == [holder])
    assert "holder" in row
    assert "within 10 min" in row
    found = phalanx.json("why", late)
    assert [one["id"] for one in found["blockers"]] == [holder]
    told = phalanx("submit", "--dry-run", "--gpus", "1", *SLEEPS).stdout
    assert "would wait (" in told
    phalanx("hold", late)
    assert phalanx("why", late).stdout.splitlines()[-1] == f"next: phalanx release {late}"
    phalanx("release", late)
    phalanx("cancel", holder)
    phalanx.until(late, "running")
    phalanx("cancel", late)
    phalanx.until(late, "cancelled")
    assert f"job {late} cancelled" in phalanx("why", late).stdout


def test_what_ended_here_is_replayed_on_another_fleet(phalanx):
    for _ in range(2):
        phalanx("submit", "--wait", "--quiet", "--gpus", "2", "--", PYTHON, "-c", "print('done')")
    found = phalanx.json("whatif", "--since", "1h", "--add", "2x2", "--price", "2")
    assert (found["now"]["nodes"], found["then"]["nodes"], found["now"]["gpus"]) == (2, 4, 4)
    assert found["jobs"] >= 2
    assert (found["now"]["cost_per_day"], found["then"]["cost_per_day"]) == (192.0, 384.0)
    assert "no change given" in phalanx("whatif", "--since", "1h", code=64).stderr
