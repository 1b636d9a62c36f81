"""Training and a service on the same GPUs, live: a real training saves and gives its GPUs to replicas when requests come, and goes on when they end."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import free_port
from phalanx.client import Client
from tests.e2e.test_cli_head import Shell
from tests.e2e.test_gateway import Gateway, run, words

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SERVICE = f"""
type: service
name: chat
run: exec {sys.executable} -m tests.fake_engine --port $PORT --chunks 20 --pause 0.05
env: {{PYTHONPATH: "{ROOT}"}}
gpus: 1
priority: 10
replicas: 0..3
ready: /health
scale: {{in_flight: 4, queue: 5s, idle: 12s}}
"""
TRAIN = os.path.join(ROOT, "examples", "train_gpt", "train.py")
SMALL = "--d-model 32 --layers 1 --heads 2 --seq 32 --batch 4 --print-every 1"
TRAINING = f"""
name: train
run: exec {sys.executable} {TRAIN} --steps 100000 --save-every-steps 200 {SMALL}
gpus: 2
"""
WAVES, CLIENTS, ASKS = 2, 12, 6


@pytest.fixture
def phalanx(tmp_path):
    shell = Shell(tmp_path)
    shell("up", "--virtual", "1x4", "--port", str(free_port()), "--min-run", "1s", "--min-run-by-right", "1s")
    yield shell
    shell("down", "--cancel-jobs")


def until(what, condition):
    limit_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit_s, what
        time.sleep(0.3)


async def wave(gateway, session):
    """Let all clients ask, each one question after the other; returns the answers."""

    async def client(name):
        return [await gateway.chat(session, f"hello {name}", stream=True, user=f"{name}-") for _ in range(ASKS)]

    return [
        one for found in await asyncio.gather(*(client(f"c{number}") for number in range(CLIENTS))) for one in found
    ]


def test_training_gives_way_at_its_checkpoint_and_goes_on_when_the_load_ends(phalanx):
    (phalanx.work / "chat.yaml").write_text(SERVICE)
    (phalanx.work / "train.yaml").write_text(TRAINING)
    client = Client(home=str(phalanx.home))
    phalanx("submit", "chat.yaml")
    trainings = [phalanx("submit", "train.yaml").stdout.split()[1] for _ in range(2)]

    def steps_of(job):
        found, after, more = [], "", True
        while more:
            reply = client.steps(job, after=after)
            found += [one.step for one in reply.steps]
            after, more = reply.cursor, reply.more
        return found

    def newest_step(job):
        return max(steps_of(job), default=0)

    def preemptions():
        return max(sum(one["cause"] == "preempted" for one in client.usage(job)["attempts"]) for job in trainings)

    def desired():
        return client.service("chat").service.desired

    reached = dict.fromkeys(trainings, 0)
    gateway = Gateway(phalanx, "--per-replica", "8")
    try:
        for number in range(WAVES):
            for job in trainings:
                until(f"job {job} trains on", lambda job=job: newest_step(job) > reached[job])
            answers = run(lambda session: wave(gateway, session))
            assert desired() == 3
            for status, body in answers:
                text, _, errors = words(body)
                assert (status, errors, len(text)) == (200, [], 20), body
            assert preemptions() > number, "no training gave way"
            reached = {job: newest_step(job) for job in trainings}
            until("no replica is left", lambda: desired() == 0)
        for job in trainings:
            until(f"job {job} trains on", lambda job=job: newest_step(job) > reached[job])
    finally:
        assert gateway.stop() == 0
    for job in trainings:
        attempts = client.usage(job)["attempts"]
        assert {one["cause"] for one in attempts[:-1]} <= {"preempted"}, attempts
        usage = client.usage(job)
        assert (usage["steps_lost"], usage["overlapping_steps"]) == (0, 0)
        steps = steps_of(job)
        assert steps == list(range(1, len(steps) + 1)), "a step is missing, or was made twice"
