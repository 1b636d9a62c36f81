"""Ray with Redis behind it, real daemons: Ray's head is killed and comes back while a job runs, and the same actors go on."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from benchmarks.cluster import command_words, free_port, wait_until
from phalanx.node.processes.proctable import read_table
from tests.contract import engine_rigs
from tests.contract.engine_rigs import gated, open_gate
from tests.e2e.test_ray import held_by_us

WHY_NOT = engine_rigs.WHY_NOT["ray"]() or (
    "" if shutil.which("redis-server") else "redis-server is not installed: `make redis-tools` installs it on Debian"
)
pytestmark = [
    pytest.mark.serial,
    pytest.mark.e2e,
    pytest.mark.prove,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "Redis"),
]
HELD = {"n0": 2.0, "n1": 2.0, "n2": 2.0}


class Redis:
    """A Redis on loopback that keeps nothing on disk."""

    def __init__(self, folder):
        self.folder, self.port = str(folder), free_port()
        self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        words = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            self.folder,
        ]
        self.daemon = subprocess.Popen(["redis-server", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(lambda: self.asked("PING") == "PONG", "Redis answers")

    def kill(self):
        self.daemon.kill()
        self.daemon.wait()

    def asked(self, *words):
        done = subprocess.run(["redis-cli", "-p", str(self.port), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()


@pytest.fixture
def redis(tmp_path):
    made = Redis(tmp_path)
    yield made
    made.kill()


def actors():
    """Pids of the actors that carry our nodes, on this machine."""
    return {pid for pid in read_table() if "ray::NodeActor" in " ".join(command_words(pid)[:1])}


def test_a_killed_ray_head_comes_back_with_all_it_knew_and_the_actors_of_other_nodes_go_on(redis):
    with engine_rigs.ray("--ray-redis", redis.address) as rig:
        job = gated(rig, "gate", gpus="3x2")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        wait_until(lambda: held_by_us(rig) == HELD, "Ray's books say who has the GPUs")
        before = actors()
        rig.kill_ray("n0")
        killed_s = time.monotonic()
        wait_until(lambda: held_by_us(rig) == HELD, "Ray's books say so again")
        print(f"Ray's head killed to Ray's books right again: {time.monotonic() - killed_s:.1f} s")
        assert len(before & actors()) == 2, "those of n1 and n2 are the same processes"
        assert rig.job(job)["attempt_state"] == "running", rig.history(job)
        open_gate(rig, "gate")
        view = rig.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), rig.history(job)
        assert int(redis.asked("DBSIZE")) > 0
        rig.stop()
        assert redis.asked("DBSIZE") == "0", "what Ray kept goes with `phalanx down`"


def test_a_redis_that_is_lost_with_all_it_held_costs_ray_a_start_and_no_job(redis):
    with engine_rigs.ray("--ray-redis", redis.address) as rig:
        job = gated(rig, "gate", gpus="3x2")
        wait_until(lambda: rig.job(job)["attempt_state"] == "running", "it runs")
        wait_until(lambda: held_by_us(rig) == HELD, "Ray's books say who has the GPUs")
        redis.kill()
        wait_until(lambda: held_by_us(rig) == {}, "Ray's head is gone with it")
        redis.start()
        wait_until(lambda: held_by_us(rig) == HELD, "Ray's books say so again")
        assert rig.job(job)["attempt_state"] == "running", rig.history(job)
        open_gate(rig, "gate")
        view = rig.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 0), rig.history(job)


@pytest.mark.parametrize(
    ("given", "line", "code"),
    [
        ("", "needs a password", 64),
        ("127.0.0.1:9", "no Redis at 127.0.0.1:9: Connection refused", 69),
        ("nonsense", "not an address of the form HOST:PORT", 64),
    ],
)
def test_a_redis_that_is_none_is_told_in_one_line(redis, tmp_path, given, line, code):
    redis.asked("CONFIG", "SET", "requirepass", "secret")
    home, words = tmp_path / "home", ["--port", str(free_port()), "--ray-redis", given or redis.address]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.app.cli", "up", "--engine", "ray", "--virtual", "1x1", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PHALANX_HOME": str(home)},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n"), line in done.stderr) == (code, 1, True), done.stderr
    assert not home.exists()
