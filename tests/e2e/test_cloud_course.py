"""The whole course of a burst: a gang waits, its queue's rule rents two hosts, it trains there, one is taken back, it goes on, comes home, everything is
released, and the cloud's bill is the ledger. The cloud is moto's server; hosts are network namespaces with real supervisors and ranks.
"""

import sys
import time

import pytest

from benchmarks.clouds.judge import judge, read_history
from benchmarks.cluster import ROOT
from tests.e2e.cloud_hosts import HEAD, HEAD_PORT, CloudHosts, why_not

pytestmark = [
    pytest.mark.prove,
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
QUEUES = "queues:\n  default: {burst: when wait > 10m and price < 40}\n"
TRAIN = ("--", sys.executable, f"{ROOT}/tests/e2e/kept_train.py", "100000")


@pytest.fixture
def hosts(tmp_path):
    made = CloudHosts(tmp_path)
    yield made
    made.close()


def wait_for(condition, what, within_s=240.0):
    until_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < until_s, what
        time.sleep(0.5)
    return found


def test_a_gang_bursts_loses_a_host_comes_home_and_the_bill_is_the_ledger(hosts):
    wait_for(hosts.ask, "the cloud answers")
    hosts("up", "--virtual", "2x1", "--listen", f"{HEAD}:{HEAD_PORT}", "--min-run", "1s", "--min-stay", "1s")
    (hosts.folder / "work" / "queues.yaml").write_text(QUEUES)
    hosts("queues", "apply", "queues.yaml")
    hosts.add_pool("spot", "--max", "4", "--price", "1/h", "--idle", "5s")
    first = hosts("submit", "--quiet", "--gpus", "2x1", "--time", "10h", "--no-preempt", "--", "sleep", "36000").strip()
    wait_for(lambda: hosts.json("show", first)["job"]["state"] == "running", "the own nodes are busy")
    job = hosts("submit", "--quiet", "--gpus", "2x1", "--time", "1h", "--grace", "20s", *TRAIN).strip()

    def shown():
        return hosts.json("show", job)

    def trains(attempt):
        """The gang has saved in this attempt: its nodes and the newest saved step."""
        seen = shown()
        if len(seen["attempts"]) < attempt:
            return None
        now = seen["attempts"][-1]
        saved = [one["step"] for one in seen["job"]["checkpoints"] if one["epoch"] == now["epoch"]]
        return ([one["node_id"] for one in now["grants"]], saved[-1]) if saved else None

    nodes, step = wait_for(lambda: trains(1), "it trains on rented hosts")
    assert sorted(nodes) == ["spot-0", "spot-1"]
    machines = {one["node"]: one["machine"] for one in hosts.ask()["machines"]}
    begun_s = time.monotonic()
    hosts.take_back(machines["spot-1"])
    nodes, later = wait_for(lambda: trains(2), "it trains again without the host that is taken back")
    back_s = time.monotonic() - begun_s
    assert "spot-1" not in nodes
    assert all(node.startswith("spot-") for node in nodes)
    lost = shown()["attempts"][0]
    assert "EC2 takes the spot instance back" in lost["why"], lost
    assert shown()["attempts"][1]["resume_step"] >= step, "it saved after the notice"
    assert later > step

    hosts("cancel", first)
    wait_for(lambda: sorted(nodes_at_home(trains(3))) == ["n0", "n1"], "it comes home")
    third = shown()["attempts"][-1]
    assert third["resume_step"] >= later
    hosts("cancel", job)
    wait_for(lambda: not hosts.json("pools", "show", "spot")["nodes"], "all hosts are released")
    hosts("pools", "remove", "spot")
    wait_for(lambda: not hosts.json("pools"), "the pool ends")
    found = hosts.ask()["machines"]
    hosts("down")
    verdict = judge(found, read_history(hosts.folder / "home" / "phalanx.db"))
    assert verdict["machines"] >= 3
    assert (verdict["leaked"], verdict["doubled"], verdict["without_a_ledger_line"]) == (0, 0, 0), verdict
    assert abs(verdict["billed_minus_ledger_s"]) <= 1.0, verdict
    print(f"{verdict}; training again {back_s:.0f} s after the notice")


def nodes_at_home(seen):
    return seen[0] if seen else []
