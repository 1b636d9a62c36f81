"""Waste on a real head with real processes: the list, what it says to do, and each action of an idle policy with short times."""

import json
import sys
import time

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(600)]

QUEUES = """\
queues:
  default: {}
  lab:
    alarms: {idle: 15s}
    queues:
      warn: {idle: {after: 30s, action: warn}}
      notify: {idle: {after: 30s, action: notify}}
      release: {idle: {after: 40s, action: release, grace: 15s, exempt: keep-gpus=yes}}
      stop: {idle: {after: 40s, action: stop, grace: 15s}}
"""
WORK_THEN_NOTHING = "import time\nend = time.time() + 6\nwhile time.time() < end: pass\ntime.sleep(100000)"
WORK = "while True: pass"
KEEPER = {
    "name": "keeper",
    "gpus": 1,
    "queue": "release",
    "labels": {"keep-gpus": "yes"},
    "run": [sys.executable, "-c", WORK_THEN_NOTHING],
}


@pytest.fixture(scope="module")
def phalanx(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("waste"))
    shell("up", "--virtual", "2x4", "--port", str(free_port()))
    (shell.work / "queues.yaml").write_text(QUEUES)
    (shell.work / "keeper.yaml").write_text(json.dumps(KEEPER))  # JSON is YAML
    shell("queues", "apply", "queues.yaml")
    yield shell
    shell("down", "--cancel-jobs")


def submit(phalanx, queue, script):
    words = ("submit", "--quiet", "-q", queue, "--gpus", "1", "--name", queue, "--", sys.executable, "-c", script)
    return phalanx(*words).stdout.strip()


def until(holds, limit_s=240.0):
    """Poll: a real head needs its own time for samples and looks."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if holds():
            return True
        time.sleep(1.0)
    return False


def kinds(phalanx, job):
    return [line["kind"] for line in phalanx.json("show", job)["story"]]


def test_idle_jobs_are_listed_warned_released_and_stopped_and_busy_ones_are_not(phalanx):
    jobs = {queue: submit(phalanx, queue, WORK_THEN_NOTHING) for queue in ("warn", "notify", "release", "stop")}
    keeper = phalanx("submit", "--quiet", "keeper.yaml").stdout.strip()
    busy = submit(phalanx, "stop", WORK)
    idle = {*jobs.values(), keeper}
    assert until(lambda: {row["job"] for row in phalanx.json("waste")["rows"]} == idle)
    rows = {row["job"]: row for row in phalanx.json("waste")["rows"]}
    assert all(row["kind"] == "idle" and row["alarm"] and row["gpu_hours"] > 0 for row in rows.values())
    assert rows[jobs["warn"]]["command"] == f"phalanx cancel {jobs['warn']}"
    assert "idle for" in phalanx("ps").stdout
    assert until(lambda: phalanx.json("show", jobs["release"])["job"]["held"])
    assert until(lambda: phalanx.json("show", jobs["stop"])["job"]["state"] == "cancelled")
    assert kinds(phalanx, jobs["release"]).count("idle_warning") == 1
    assert kinds(phalanx, jobs["stop"]).count("idle_warning") == 1
    assert kinds(phalanx, jobs["warn"]).count("idle_warning") == 1
    assert kinds(phalanx, jobs["notify"]).count("idle_notice") == 1
    why = phalanx("why", jobs["release"]).stdout
    assert "its processes have not used its 1 GPU for" in why
    assert f"phalanx release {jobs['release']}" in why
    for one in (jobs["warn"], jobs["notify"], keeper, busy):
        assert phalanx.json("show", one)["job"]["state"] == "running"
    assert "idle_warning" not in kinds(phalanx, busy) + kinds(phalanx, keeper)
    acts = [line for line in phalanx.json("audit")["lines"] if line["user"] == "idle-policy"]
    assert sorted(line["target"] for line in acts) == sorted(f"job {jobs[queue]}" for queue in ("release", "stop"))
    phalanx("release", jobs["release"])
    phalanx.until(jobs["release"], "running")
    report = phalanx.json("report", "waste", "--by", "job", "--since", "1h")
    assert {row["key"] for row in report["rows"]} >= idle
    assert busy not in {row["key"] for row in report["rows"] if row["by_state"].get("idle")}
