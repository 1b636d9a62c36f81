"""A training rents a node because waiting costs more, comes home with its checkpoint when the fleet frees up, and the node is released."""

import json
import sys
import time

import pytest

from benchmarks.cluster import ROOT, free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

QUEUES = """queues:
  default: {burst: when wait > 2h and price < 40}
"""
TRAIN = ("--", sys.executable, f"{ROOT}/tests/e2e/kept_train.py", "4000")


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell("up", "--virtual", "1x1", "--min-stay", "1s", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def wait_for(condition, within_s=100.0):
    until_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < until_s, condition
        time.sleep(0.2)
    return found


def nodes_of(phalanx, job):
    return [grant["node_id"] for grant in phalanx.job(job)["attempts"][-1]["grants"]]


def test_a_training_rents_a_node_and_comes_home_with_its_checkpoint(phalanx):
    (phalanx.work / "queues.yaml").write_text(QUEUES)
    phalanx("queues", "apply", "queues.yaml")
    phalanx(
        "pools", "add", "cloud", "--provider", "virtual", "--node", "1", "--max", "1", "--price", "16/h", "--idle", "2s"
    )
    first = phalanx("submit", "--quiet", "--gpus", "1", "--time", "10h", "--", "sleep", "3600").stdout.strip()
    phalanx.until(first, "running")
    asked = phalanx("submit", "--dry-run", "--json", "--gpus", "1", "--time", "3h", *TRAIN)
    dear = json.loads(asked.stdout)["burst"]
    assert (dear["there"], dear["refusal"], dear["price"]) == (False, "price < 40", 48.0)
    assert 35_900.0 < dear["here_s"] <= 36_000.0
    job = phalanx("submit", "--quiet", "--gpus", "1", "--time", "1h", "--name", "train", *TRAIN).stdout.strip()
    wait_for(lambda: phalanx.json("pools", "show", "cloud")["nodes"])
    phalanx.until(job, "running")
    assert nodes_of(phalanx, job) == ["cloud-0"]
    saved = wait_for(lambda: phalanx.json("show", job)["job"]["checkpoints"])[-1]["step"]
    phalanx("cancel", first)
    wait_for(lambda: nodes_of(phalanx, job) == ["n0"])
    wait_for(lambda: phalanx.json("show", job)["job"]["checkpoints"][-1]["step"] > saved)
    shown = phalanx.job(job)
    there, home = shown["attempts"]
    assert (there["cause"], home["resume_step"] >= saved) == ("moved", True)
    assert "moved to n0: own nodes are free: the rest of its run would cost $1" in there["why"]
    pool = wait_for(lambda: (found := phalanx.json("pools", "show", "cloud"))["nodes"] == [] and found)
    assert pool["spent_this_month"] > 0.0
    assert pool["boot_s"] > 0.0
    assert "this month: $0." in phalanx("pools", "show", "cloud").stdout
