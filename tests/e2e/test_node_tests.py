"""`nodes test` with real nodes and processes: a node that is throttled fails and is cordoned, sound ones pass, busy ones are refused."""

import os
import signal
import threading
import time

import pytest

from benchmarks.cluster import free_port
from phalanx.node.processes.proctable import process_environment
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(600)]
STOPPED_S, RUNNING_S = 0.09, 0.01  # a tenth of the speed


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell.env["PHALANX_HOOKS"] = ""
    shell("up", "--virtual", "3x1", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


class Throttle:
    """Stops the ranks of one node for most of the time, as a GPU that is too hot does."""

    def __init__(self, node: str, home: str) -> None:
        self.node, self.home, self.ended = node, home, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def ranks(self):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                found = process_environment(int(name))
                key, folder = (
                    found.get(b"PHALANX_NODE_KEY", b"").decode(),
                    found.get(b"PHALANX_OUTPUT_DIR", b"").decode(),
                )
                if key.startswith(f"{self.node}-") and folder.startswith(self.home) and b"RANK" in found:
                    yield int(name)

    def run(self):
        pids: list[int] = []
        looked_s = 0.0
        while not self.ended.is_set():
            for number, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNNING_S)):
                for pid in pids:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        looked_s = 0.0
                self.ended.wait(pause_s)
                # Looking takes longer than a burst of the measurement, so the ranks that are known stand still meanwhile.
                if number == signal.SIGSTOP and not (pids and time.monotonic() - looked_s < 1.0):
                    pids, looked_s = list(self.ranks()), time.monotonic()


def test_throttled_node_fails_and_is_cordoned_and_a_busy_one_is_refused(phalanx, tmp_path):
    sound = phalanx("nodes", "test", "n[0-2]", "--threshold", "70%")
    assert "3 of 3 nodes pass" in sound.stdout
    with Throttle("n1", str(tmp_path)):
        slow = phalanx("nodes", "test", "n[0-2]", "--threshold", "70%", code=1)
    assert "n1 fails: matmul" in slow.stdout
    cordons = {node["id"]: node["cordon"] for node in phalanx.json("nodes") if node.get("cordon")}
    assert list(cordons) == ["n1"]
    assert cordons["n1"]["by"] == "node-test"
    assert cordons["n1"]["why"].startswith("test: matmul")
    (history,) = phalanx.json("nodes", "test", "n1", "--history")
    assert [one["passed"] for one in history["tests"]] == [True, False]
    assert "failed: matmul" in phalanx("nodes", "show", "n1").stdout
    phalanx("nodes", "test", "n1")  # as it is: the cordon stays
    cordons = {node["id"]: node["cordon"] for node in phalanx.json("nodes") if node.get("cordon")}
    assert cordons["n1"]["why"].startswith("test: matmul")
    phalanx("nodes", "undrain", "n1")
    phalanx("submit", "--gpus", "3x1", "--", "sleep", "600")
    phalanx("nodes", "test", "n0", code=75)


def test_a_drained_node_is_tested_as_it_is_and_stays_drained(phalanx):
    phalanx("nodes", "drain", "n0", "--why", "a new fan")
    waits = phalanx("submit", "--quiet", "--gpus", "3x1", "--", "true").stdout.strip()
    assert "n0" in phalanx("nodes", "test", "n[0-2]", "--no-drain").stdout
    (node,) = [one for one in phalanx.json("nodes") if one["id"] == "n0"]
    assert (node["cordon"]["why"], node["cordon"]["drain"], node["reserved"]) == ("a new fan", True, [])
    assert phalanx.json("show", waits)["job"]["state"] == "pending", "nobody else had the node"
    assert "tested" in phalanx("nodes", "show", "n0").stdout
    phalanx("nodes", "test", "n0", "--undrain")
    assert [one for one in phalanx.json("nodes") if one.get("cordon")] == []
    phalanx.until(waits, "succeeded")
