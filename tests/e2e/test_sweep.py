"""A sweep of 20 on a real head: early stops, a killed command that goes on, a preempted trial that resumes, and the picture."""

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.cluster import cluster, wait_until
from phalanx.client import Client

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.prove, pytest.mark.timeout(400)]
TRAIN = """
import argparse, math, time, torch
import phalanx.torch as rank
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--layers", type=int)
given = parser.parse_args()
run = rank.init()
rank.plan(steps_total=54)
model = torch.nn.Linear(2, 2)
saver = rank.checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), every_steps=10)
first = saver.resume().step + 1
print("first step", first, flush=True)
for step in range(first, 55):
    time.sleep(0.15)
    rank.report(step=step, loss=1 + 0.5 * (math.log10(given.lr) + 3) ** 2 + 0.3 * (given.layers != 4) + 4 / step)
    saver.save_if_due(step)
    if rank.should_stop():
        break
rank.finish()
"""


def test_sweep_of_twenty_with_a_killed_command_and_a_preempted_trial(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    words = [
        "--name",
        "s",
        "--lr",
        "log:1e-5..1e-2",
        "--layers",
        "2,4",
        "--samples",
        "20",
        "--stop",
        "asha",
        "--gpus",
        "1",
        "--warm",
        "--json",
        "--grace",
        "30s",
    ]
    command = [sys.executable, "-m", "phalanx.app.cli", "sweep"]
    with cluster("2x2", revive_s=0.5) as made:
        head = Client(home=made.home)
        env = {**made.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
        env.pop("PHALANX_URL", None)

        def phalanx(*more, **options):
            return subprocess.Popen(
                [*command, *more], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, **options
            )

        begun = phalanx(*words, "--", sys.executable, "train.py")
        wait_until(lambda: len(head.jobs().jobs) >= 8, "the sweep is on its way")
        begun.send_signal(signal.SIGKILL)
        # The next command may judge these late, at a rung that they passed meanwhile.
        before = {job.id for job in head.jobs(limit=100).jobs}
        first = begun.communicate()[0]
        again = phalanx("--resume", "s", "--json")

        def long_runner():
            live = head.jobs(state=["running"]).jobs
            later = [job for job in live if job.id not in before]
            past = (job for job in later if job.progress and 36 < job.progress.step < 50)  # the last rung: not stopped
            return next(past, None)

        preempted = wait_until(long_runner, "a trial that goes on")
        head.requeue(preempted.id)
        second = again.communicate(timeout=300)[0]
        assert again.returncode == 0
        shown = json.loads(
            subprocess.check_output([*command, "show", "s", "--json", "--plot", "s.svg"], env=env, cwd=tmp_path)
        )
        jobs = head.jobs(limit=100).jobs
        detail = head.job(preempted.id)
    trials = shown["trials"]
    assert len(jobs) == 20
    assert sorted(int(job.labels["trial"]) for job in jobs) == list(range(20))
    assert {one["state"] for one in trials} == {"complete", "stopped"}
    assert sum(one["state"] == "stopped" for one in trials) >= 8
    assert detail.job.state == "succeeded"
    assert detail.attempts[-1].resume_step, "it resumed from its checkpoint"
    events = [json.loads(line) for line in (first + second).splitlines() if line.endswith("}")]
    freed = [one["freed_s"] for one in events if one["kind"] == "freed"]
    print("freed after, s:", sorted(freed), "preempted", preempted.id, "resumed at", detail.attempts[-1].resume_step)
    assert freed
    assert sorted(freed)[len(freed) // 2] < 2.0, "the median, since the machine may be busy"
    assert (tmp_path / "s.svg").read_text().count("<title>trial ") >= 15
    assert os.listdir(tmp_path / "state/phalanx/sweeps") == ["s"]
