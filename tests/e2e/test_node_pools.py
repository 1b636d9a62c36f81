"""A pool of virtual nodes: it grows for a waiting gang and shrinks after it, also if the head is killed in between."""

import json
import os
import signal
import sys
import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]

SLEEP = ("--", sys.executable, "-c", "import time; time.sleep(3)")


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell("up", "--virtual", "1x1", "--port", str(free_port()))
    yield shell
    shell("down", "--cancel-jobs")


def supervisors(phalanx):
    """Folders of the supervisors that run for the pool."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            folder = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            continue
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if folder.startswith(str(phalanx.home / "pools")) and b"phalanx.app.node" in file.read():
                found.append(folder)
    return sorted(os.path.basename(folder) for folder in found)


def test_a_pool_grows_for_a_gang_survives_a_killed_head_and_shrinks(phalanx):
    phalanx("submit", "--gpus", "2xh100:2", *SLEEP, code=64)  # without a pool it can never run
    phalanx(
        *("pools", "add", "burst", "--provider", "virtual", "--node", "1xh100:2"),
        *("--min", "0", "--max", "1", "--price", "1/h", "--cap", "1/h", "--idle", "1h"),
    )
    phalanx("submit", "--gpus", "2xh100:2", *SLEEP, code=64)  # more than its maximum
    for nonsense in (("--max", "-1"), ("--min", "2"), ("--price", "2/h"), ("--cap", "0.5/h"), ("--cap", "much"), ()):
        phalanx("pools", "set", "burst", *nonsense, code=64)
    phalanx("pools", "set", "other", "--max", "2", code=64)
    phalanx("pools", "set", "burst", "--max", "2", "--price", "2/h", "--cap", "none", "--idle", "2s")
    changed = phalanx.json("pools", "show", "burst")
    assert {name: changed[name] for name in ("node", "provider", "min_nodes", "max_nodes", "price_per_h")} == {
        "node": "h100-sxm5-80gb:2",
        "provider": "virtual",
        "min_nodes": 0,
        "max_nodes": 2,
        "price_per_h": 2.0,
    }
    assert (changed["cap_per_h"], changed["idle_s"], changed["start_limit_s"]) == (None, 2.0, 600.0)
    phalanx("submit", "--gpus", "3xh100:2", *SLEEP, code=64)  # more than the pool's maximum
    gang = phalanx("submit", "--quiet", "--gpus", "2xh100:2", *SLEEP).stdout.strip()
    listed = {}
    until = time.monotonic() + 100.0
    while "burst-1" not in listed and time.monotonic() < until:  # ordered or up
        time.sleep(0.1)
        listed = {node["id"]: node for node in phalanx.json("nodes")}
    assert [listed[name]["pool"] for name in ("burst-0", "burst-1")] == ["burst"] * 2
    assert listed["burst-0"]["price_per_h"] == 2.0
    head = json.loads((phalanx.home / "head.json").read_text())["pid"]
    os.kill(head, signal.SIGKILL)
    phalanx("up")
    ended = phalanx.until(gang, "succeeded", "failed", "cancelled")
    assert ended["state"] == "succeeded"
    until = time.monotonic() + 100.0
    while phalanx.json("pools", "show", "burst")["nodes"] and time.monotonic() < until:
        assert len(supervisors(phalanx)) <= 2
        time.sleep(0.5)
    assert phalanx.json("pools", "show", "burst")["nodes"] == []
    assert supervisors(phalanx) == []
    assert [node["id"] for node in phalanx.json("nodes")] == ["n0"]
    text = phalanx("pools", "list").stdout
    assert "burst" in text
    (phalanx.home / "pools" / "nodes" / "burst-2").touch()  # its folder cannot be created
    job = phalanx("submit", "--quiet", "--gpus", "h100:2", *SLEEP).stdout.strip()
    until = time.monotonic() + 100.0
    while "tries again in" not in (why := phalanx("why", job).stdout) and time.monotonic() < until:
        time.sleep(0.5)
    assert "1 node failed to start, the last: burst-2: the provider could not start it" in why
    assert phalanx.json("pools", "show", "burst")["failures"] == 1
    phalanx("cancel", job)
    phalanx("pools", "remove", "burst")
