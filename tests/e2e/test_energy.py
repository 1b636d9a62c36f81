"""Energy and power caps with real processes on stand-in GPUs, whose power is a timeline that the jobs write themselves."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(600)]

STAND_IN = Path(__file__).parents[1] / "fake_nvml"
IDLE_W, BUSY_W = 90, 600
PROGRAM = """
import os, sys, time
import pynvml
gpu = int(os.environ["CUDA_VISIBLE_DEVICES"])
begin = time.clock_gettime(time.CLOCK_BOOTTIME)
pynvml.set_power(gpu, 600_000)
time.sleep(float(sys.argv[1]))
pynvml.set_power(gpu, 90_000)
print("busy", time.clock_gettime(time.CLOCK_BOOTTIME) - begin, flush=True)
"""


@pytest.fixture
def phalanx(tmp_path, monkeypatch):
    gpus = importlib.import_module("tests.fake_nvml.pynvml")
    folder = tmp_path / "gpus"
    folder.mkdir()
    monkeypatch.setattr(gpus, "FOLDER", str(folder))
    for index in range(2):
        gpus.add_gpu(index, idle_mw=IDLE_W * 1000)
    shell = Shell(tmp_path)
    shell.env |= {"FAKE_NVML": str(folder), "PYTHONPATH": f"{STAND_IN}:{shell.env.get('PYTHONPATH', '')}"}
    shell.env["PORT"] = str(free_port())
    (shell.work / "draw.py").write_text(PROGRAM)
    shell("up", "--port", shell.env["PORT"])
    yield shell
    shell("down", "--cancel-jobs")


def eventually(condition):
    until = time.monotonic() + 60.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.2)
    assert condition()


def node(phalanx):
    (found,) = phalanx.json("nodes")
    return found


def kill_supervisor(phalanx):
    os.kill(phalanx.processes("phalanx.app.node")[0], signal.SIGKILL)


def submit(phalanx, seconds):
    draws = ("--", sys.executable, "draw.py", str(seconds))
    return phalanx("submit", "--quiet", "--gpus", "1", *draws).stdout.strip()


def busy_s(phalanx, job):
    return float(phalanx("logs", job).stdout.split()[-1])


def test_energy_of_jobs_is_what_they_drew_over_restarts_of_the_head_and_the_supervisor(phalanx):
    long, short = submit(phalanx, 12.0), submit(phalanx, 0.4)
    phalanx.until(short, "succeeded")
    eventually(lambda: phalanx.job(long)["attempts"][-1]["state"] == "running")
    phalanx("down", "--keep-jobs")
    time.sleep(2.0)
    phalanx("up", "--port", phalanx.env["PORT"])
    phalanx.until(long, "succeeded")
    kill_supervisor(phalanx)
    eventually(lambda: node(phalanx)["state"] == "down")
    eventually(lambda: node(phalanx)["state"] == "up")
    last = submit(phalanx, 1.0)
    phalanx.until(last, "succeeded")

    def report():
        found = phalanx.json("report", "energy", "--by", "job")
        return found, {row["key"]: row for row in found["rows"]}

    # The readings of the end come with the next request of the supervisor.
    eventually(lambda: report()[1][last]["unknown_gpu_hours"] == 0.0)
    found, rows = report()
    assert sum(row["counter_mj"] for row in found["rows"]) == found["metered_mj"]
    for job in (long, short, last):
        row, drew_s = rows[job], busy_s(phalanx, job)
        held_s = (row["gpu_hours"] - row["unknown_gpu_hours"]) * 3600
        true_j = BUSY_W * drew_s + IDLE_W * (held_s - drew_s)
        # Times that processes of a busy machine need to notice something, at 510 W.
        assert row["counter_mj"] / 1000 == pytest.approx(true_j, rel=0.01, abs=0.2 * (BUSY_W - IDLE_W)), job
    idle = rows[""]
    idle_s = (idle["gpu_hours"] - idle["unknown_gpu_hours"]) * 3600
    assert idle["counter_mj"] / 1000 == pytest.approx(IDLE_W * idle_s, rel=0.01, abs=0.2 * (BUSY_W - IDLE_W))


def test_limit_of_before_comes_back_though_the_supervisor_dies(phalanx):
    def limits():
        return [one["power_limits"]["limit_w"] for one in node(phalanx)["devices"]]

    name = node(phalanx)["id"]
    shown = phalanx("nodes", "power", name, "--limit", "300W", "--for", "8s").stdout
    assert "300 W   700 W" in shown
    assert limits() == [300.0, 300.0]
    kill_supervisor(phalanx)
    eventually(lambda: node(phalanx)["state"] == "up" and limits() == [700.0, 700.0])
    assert phalanx("nodes", "power", name, "--limit", "900W", code=64).stderr.count("200 W to 700 W") == 1
    gpus = importlib.import_module("tests.fake_nvml.pynvml")
    gpus.change(1, privileged=False)
    assert "only root" in phalanx("nodes", "power", name, "--limit", "400W", code=64).stderr
    assert limits() == [700.0, 700.0]
