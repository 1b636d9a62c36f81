"""What must be seen, on real processes: heads killed, nodes stopped and killed, jobs cancelled. Nothing here measures time."""

import os
import signal
import sys
import time

import pytest

from benchmarks.cluster import (
    ROOT,
    BenchmarkCluster,
    cluster,
    command_words,
    wait_until,
)
from benchmarks.fence import drill_round

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]
TRAIN = os.path.join(ROOT, "examples", "train_gpt", "train.py")
SMALL = ["--d-model", "32", "--layers", "1", "--heads", "2", "--seq", "32", "--batch", "4", "--print-every", "1"]


def train(head: BenchmarkCluster, *, steps: int, every: int = 20, **body) -> str:
    run = [sys.executable, TRAIN, "--steps", str(steps), "--save-every-steps", str(every), *SMALL]
    return head.submit(run=run, gpus="2x1", name="train", warm=True, **body)


def steps_of(head: BenchmarkCluster, job: str) -> list[dict]:
    steps: list[dict] = head.call("GET", f"/v1/jobs/{job}/steps?limit=10000")["steps"]
    return steps


def kinds(head: BenchmarkCluster, job: str) -> list[str]:
    return [line["kind"] for line in head.history(job)]


def log_of(head: BenchmarkCluster, job: str, rank: int) -> str:
    text, cursor = "", ""
    while True:
        reply = head.call("GET", f"/v1/jobs/{job}/logs?rank={rank}&cursor={cursor}")
        text += "".join(chunk["text"] for chunk in reply["chunks"])
        cursor = reply["cursor"]
        if not reply["more"]:
            return text


@pytest.mark.torch
def test_head_killed_and_back_within_the_lease_costs_no_step_and_no_log_line():
    with cluster("2x1", lease_s=8.0) as head:
        job = train(head, steps=400)
        wait_until(lambda: len(steps_of(head, job)) >= 20, "it trains")
        head.kill_head()
        head.start()
        view = head.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert view["state"] == "succeeded", head.history(job)
        assert (view["attempts"], view["restarts"]) == (1, 0)
        assert [step["step"] for step in steps_of(head, job)] == list(range(1, 401))
        printed = [line.split()[1] for line in log_of(head, job, 0).splitlines() if line.startswith("step ")]
        assert printed == [str(step) for step in range(1, 401)]


@pytest.mark.torch
def test_head_away_long_past_the_lease_costs_only_what_was_not_saved():
    with cluster("2x1", lease_s=2.0) as head:
        job = train(head, steps=600, collective_timeout="4s")
        wait_until(lambda: "checkpoint" in kinds(head, job), "it has saved")
        head.kill_head()
        time.sleep(7.0)  # lease 2 s, then frozen for more than half of 4 s
        head.start()
        view = head.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert view["state"] == "succeeded", head.history(job)
        resumed = [line["text"] for line in head.history(job) if line["kind"] in ("restart", "starting")]
        assert any("freeze" in text for text in resumed), resumed
        assert any("from step" in text for text in resumed), resumed
        losses: dict[int, float] = {}
        for step in steps_of(head, job):
            first = losses.setdefault(step["step"], step["loss"])
            assert step["loss"] == pytest.approx(first, rel=1e-4)
        assert sorted(losses) == list(range(1, 601))


@pytest.mark.torch
@pytest.mark.parametrize("number", [0, 1])
def test_no_step_is_begun_by_a_node_that_slept_past_its_lease(number):
    late, _, resumed, _ = drill_round(number, bare=False, lease_s=2.0)
    assert (late, resumed) == (0, 0)


def test_bare_script_of_a_node_that_slept_is_ended_and_nothing_of_it_resumed():
    late, _, resumed, _ = drill_round(1, bare=True, lease_s=2.0)
    print(f"steps that the bare script made late: {late}")
    assert resumed == 0


def leftovers(marker: str) -> list[list[str]]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [words for words in map(command_words, pids) if any(marker in word for word in words)]


@pytest.mark.parametrize("containment", ["auto", "session"])
def test_cancel_leaves_nothing_behind_even_of_a_double_fork(containment, monkeypatch):
    marker = f"marker-{containment}-{os.getpid()}"
    daemon = f"import os,sys,time\nif os.fork():\n os._exit(0)\nos.setsid()\nif os.fork():\n os._exit(0)\nos.execve(sys.executable,[sys.executable,'-c','import time; time.sleep(600)','{marker}'],{{}})"
    script = f'{sys.executable} -c "$DAEMON"; exec {sys.executable} -c \'import socket,time; s=socket.socket(); s.bind(("127.0.0.1",0)); s.listen(); time.sleep(600)\' {marker}'
    monkeypatch.setenv("PHALANX_CONTAINMENT", containment)
    with cluster("1x2") as head:
        job = head.submit(run=script, gpus="1x2", tasks_per_node=2, env={"DAEMON": daemon}, grace="1s")
        wait_until(lambda: len(leftovers(marker)) >= 4, "ranks and their daemons run")
        head.call("POST", f"/v1/jobs/{job}/cancel")
        assert head.wait_for_state(job, "cancelled")["state"] == "cancelled"
        assert leftovers(marker) == []
        node = os.path.join(head.home, "nodes", "n0")
        wait_until(lambda: not scratch_of(node, job), "the scratch folder is gone", limit_s=20)
        assert not cgroups_of(head.node_records()["n0"]["node_key"])


def scratch_of(node: str, job: str) -> list[str]:
    return [
        os.path.join(path, name)
        for path, folders, _ in os.walk(node)
        for name in folders
        if name.split(".")[0] == job or name == f"job-{job}"
    ]


def cgroups_of(node_key: str) -> list[str]:
    """cgroups of attempts of one node."""
    return [
        os.path.join(path, name)
        for path, folders, _ in os.walk("/sys/fs/cgroup")
        if path.endswith(node_key)
        for name in folders
    ]


@pytest.mark.torch
def test_node_killed_in_mid_training_resumes_elsewhere_and_repeats_its_losses():
    with cluster("3x1") as head:
        job = train(head, steps=400)
        wait_until(lambda: "checkpoint" in kinds(head, job), "it has saved")
        head.kill_node(head.job(job)["nodes"][1], signal.SIGKILL)
        view = head.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert view["state"] == "succeeded", head.history(job)
        assert view["attempts"] == 2
        usage = head.call("GET", f"/v1/jobs/{job}/receipt")
        assert usage["overlapping_steps"] == 0
        assert [attempt["cause"] for attempt in usage["attempts"]] == ["node_fail", "succeeded"]
        assert usage["attempts"][1]["resumed_from_step"] > 0
        losses: dict[int, float] = {}
        for step in steps_of(head, job):
            assert step["loss"] == pytest.approx(losses.setdefault(step["step"], step["loss"]), rel=1e-4)
        assert sorted(losses) == list(range(1, 401))


def test_a_script_that_knows_only_torch_distributed_runs_unchanged():
    script = os.path.join(ROOT, "examples", "bare_allreduce", "train.py")
    with cluster("2x2") as head:
        job = head.submit(run=[sys.executable, script], gpus="2x2", name="bare")
        assert head.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", log_of(head, job, 0)
        assert "loss" in log_of(head, job, 0)


def test_planned_stop_of_the_head_is_not_noticed_by_a_job_even_past_the_lease():
    # Without a child: a shell whose `sleep` got the signal first would say "Terminated" before it ended too.
    count = "import itertools, time\nfor number in itertools.count(1):\n    print(number)\n    time.sleep(0.05)\n"
    counting = [sys.executable, "-uc", count]
    with cluster("2x1", lease_s=2.0) as head:
        job = head.submit(run=counting, gpus="2x1", name="count", grace="1s")
        wait_until(lambda: len(log_of(head, job, 1).split()) > 5, "it counts")
        assert head.head is not None
        head.head.send_signal(signal.SIGTERM)
        head.head.wait(timeout=30)
        assert not os.path.exists(os.path.join(head.home, "head.json"))
        before = len(log_of_spool(head.home, job))
        time.sleep(4.0)  # twice the lease
        assert len(log_of_spool(head.home, job)) > before
        head.start()
        assert (head.job(job)["attempts"], head.job(job)["restarts"]) == (1, 0)
        head.call("POST", f"/v1/jobs/{job}/cancel")
        head.wait_for_state(job, "cancelled")
        counted = log_of(head, job, 1).split()
        assert counted == [str(number) for number in range(1, len(counted) + 1)]


def log_of_spool(home: str, job: str) -> bytes:
    """What the supervisors have of the job's output, whether shipped or not."""
    found = b""
    for path, _, names in os.walk(os.path.join(home, "nodes")):
        for name in names:
            if name.startswith("rank-") and f"{os.sep}{job}" in path:
                with open(os.path.join(path, name), "rb") as file:
                    found += file.read()
    return found
