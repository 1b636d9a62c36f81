"""What the scheduler promises, on a real head with real ranks on virtual devices. Nothing here measures time; files are the signals."""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.cluster import (
    ROOT,
    BenchmarkCluster,
    cluster,
    wait_until,
)
from tests.e2e.test_cli_head import Shell

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.timeout(300)]
TRAIN = os.path.join(ROOT, "examples", "train_gpt", "train.py")
SMALL = ["--d-model", "32", "--layers", "1", "--heads", "2", "--seq", "32", "--batch", "4", "--print-every", "1"]
SOON = (
    "--min-run",
    "1s",
    "--min-run-by-right",
    "1s",
    "--min-stay",
    "1s",
)  # a job's guarantees, short enough for a test


@contextlib.contextmanager
def fleet(virtual: str, *words: str) -> Iterator[BenchmarkCluster]:
    with cluster(virtual, head_arguments=words) as head:
        yield head


def train(head: BenchmarkCluster, *, steps: int, **body) -> str:
    run = [sys.executable, TRAIN, "--steps", str(steps), "--save-every-steps", "20", *SMALL]
    return head.submit(run=run, name="train", warm=True, **body)


def waits_for(head: BenchmarkCluster, gate: str, **body) -> str:
    """A job that ends well once the gate is open; each rank says that it has begun."""
    script = f"echo begun; while [ ! -e {os.path.join(head.home, gate)} ]; do sleep 0.05; done"
    return head.submit(run=script, tasks_per_node=1, name=gate, grace="1s", **body)


def open_gate(head: BenchmarkCluster, gate: str) -> None:
    with open(os.path.join(head.home, gate), "w", encoding="utf-8"):
        pass


def runs(head: BenchmarkCluster, *jobs: str) -> None:
    for job in jobs:
        wait_until(partial(_runs, head, job), f"job {job} runs")


def _runs(head: BenchmarkCluster, job: str) -> bool:
    return bool(head.job(job)["attempt_state"] == "running")


def said(head: BenchmarkCluster, job: str) -> str:
    return "\n".join(line["text"] for line in head.history(job))


def losses_by_step(head: BenchmarkCluster, job: str) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for step in head.call("GET", f"/v1/jobs/{job}/steps?limit=10000")["steps"]:
        found.setdefault(step["step"], set()).add(round(step["loss"], 4))
    return found


@pytest.mark.torch
def test_gang_of_higher_priority_preempts_a_training_job_which_saves_and_resumes():
    with fleet("2x1", *SOON) as head:
        training = train(head, steps=300, gpus="2x1")
        wait_until(lambda: len(losses_by_step(head, training)) >= 10, "it trains")
        urgent = waits_for(head, "gate", gpus="2x1", priority=10)
        runs(head, urgent)
        why = f"preempted by job {urgent}, which has a higher priority"
        view = head.job(training)
        assert (view["state"], view["checkpoints"] != []) == ("pending", True)
        assert why in said(head, training)
        open_gate(head, "gate")
        assert head.wait_for_state(urgent, "succeeded", "failed")["state"] == "succeeded"
        assert head.wait_for_state(training, "succeeded", "failed")["state"] == "succeeded", head.history(training)
        usage = head.call("GET", f"/v1/jobs/{training}/receipt")
        assert [attempt["cause"] for attempt in usage["attempts"]] == ["preempted", "succeeded"]
        assert usage["attempts"][1]["resumed_from_step"] >= 10
        assert (usage["steps_lost"], usage["overlapping_steps"]) == (0, 0)
        assert sorted(losses_by_step(head, training)) == list(range(1, 301))


def test_array_keeps_to_its_limit_and_who_depends_on_it_starts_after_the_last():
    with fleet("1x4") as head:
        array, _ = waits_for(head, "gate", gpus="1", array="0-7%2").split("_")
        after = head.submit(run="true", gpus="1", name="after", depends_on=f"afterok:{array}")
        elements = [f"{array}_{index}" for index in range(8)]
        runs(head, *elements[:2])
        waiting = [head.job(element) for element in elements[2:]]
        assert {(one["state"], one["reason"]) for one in waiting} == {("pending", "array_limit")}
        assert head.job(after)["unmet"] == [f"afterok:{array}"]
        open_gate(head, "gate")
        ended = [head.wait_for_state(element, "succeeded", "failed") for element in elements]
        started = head.wait_for_state(after, "succeeded", "failed")["started_s"]
        assert {one["state"] for one in ended} == {"succeeded"}
        assert started >= max(one["ended_s"] for one in ended)
        begun = sorted((one["started_s"], one["ended_s"]) for one in ended)
        for index, (start_s, _) in enumerate(begun):
            assert sum(end_s > start_s for _, end_s in begun[:index]) < 2, begun


def test_queue_borrows_what_is_idle_and_gives_it_back_when_the_owner_wants_it():
    with fleet("1x4", *SOON) as head:
        tree = [{"id": "prod", "quota_gpus": 4}, {"id": "guest"}]
        head.call("PUT", "/v1/queues", {"queues": tree})
        borrower = waits_for(head, "guest-gate", gpus="4", queue="guest")
        runs(head, borrower)
        owner = waits_for(head, "prod-gate", gpus="3", queue="prod")
        runs(head, owner)
        taken_back = f"preempted by job {owner}, whose queue reclaims the GPUs it had lent"
        assert taken_back in said(head, borrower)
        view = head.job(borrower)
        assert (view["state"], view["attempts"]) == ("pending", 1)
        open_gate(head, "prod-gate")
        head.wait_for_state(owner, "succeeded")
        runs(head, borrower)
        open_gate(head, "guest-gate")
        assert head.wait_for_state(borrower, "succeeded", "failed")["attempts"] == 2
        assert head.job(owner)["attempts"] == 1


@pytest.mark.torch
def test_elastic_job_starts_wide_shrinks_for_another_and_grows_again():
    with fleet("3x1", *SOON) as head:
        elastic = train(head, steps=100_000, gpus="1..3x1", grace="20s")
        wait_until(lambda: len(losses_by_step(head, elastic)) >= 5, "it trains")
        assert len(head.job(elastic)["nodes"]) == 3
        other = waits_for(head, "gate", gpus="1x1")
        runs(head, other)
        assert f"to make room for job {other}: an elastic job shrinks" in said(head, elastic)
        wait_until(lambda: head.job(elastic)["attempts"] == 2, "it goes on")
        runs(head, elastic)
        assert len(head.job(elastic)["nodes"]) == 2
        wait_until(lambda: (head.job(elastic)["progress"] or {}).get("epoch") == 2, "it trains on two nodes")
        open_gate(head, "gate")
        wait_until(lambda: head.job(elastic)["attempts"] == 3, "it is started again")
        runs(head, elastic)
        assert len(head.job(elastic)["nodes"]) == 3
        assert "more nodes are idle" in said(head, elastic)
        wait_until(lambda: (head.job(elastic)["progress"] or {}).get("epoch") == 3, "it trains on three nodes again")
        head.call("POST", f"/v1/jobs/{elastic}/cancel")
        head.wait_for_state(elastic, "cancelled")
        usage = head.call("GET", f"/v1/jobs/{elastic}/receipt")
        assert [attempt["cause"] for attempt in usage["attempts"][:2]] == ["moved", "moved"]
        steps = losses_by_step(head, elastic)
        assert sorted(steps) == list(range(1, len(steps) + 1))


def test_gang_of_a_drained_node_gets_its_place_back_before_a_newcomer():
    with fleet("3x1", *SOON) as head:
        gang = waits_for(head, "gang-gate", gpus="2x1")
        holder = waits_for(head, "gate", gpus="1x1")
        runs(head, gang, holder)
        newcomer = waits_for(head, "gate", gpus="1x1")
        drained = head.job(gang)["nodes"][0]
        head.call("POST", f"/v1/nodes/{drained}/drain", {"why": "fan"})
        wait_until(lambda: head.job(gang)["attempts"] == 2, "the gang is placed again")
        runs(head, gang)
        assert drained not in head.job(gang)["nodes"]
        assert f"preempted by job {gang}, which lost a node and gets its place back" in said(head, holder)
        assert (head.job(newcomer)["state"], head.job(newcomer)["attempts"]) == ("pending", 0)
        open_gate(head, "gang-gate")
        open_gate(head, "gate")
        for job in (gang, holder, newcomer):
            assert head.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded"


def test_head_that_comes_back_schedules_as_it_was_told_once():
    with fleet("1x1", "--policy", "fifo") as head:
        head.kill_head()
        head.head_arguments = ()
        head.start()
        with open(os.path.join(head.home, "head.log"), encoding="utf-8") as log:
            assert log.read().count("1 nodes, fifo") == 2


def test_up_refuses_what_no_live_head_can_follow_and_passes_on_the_rest(tmp_path):
    phalanx = Shell(tmp_path)
    refused = phalanx("up", "--policy", "srtf", code=64).stderr
    assert "unknown for live jobs" in refused
    assert "a head accepts: default, throughput, fifo, skip, backfill, las, fair" in refused
    assert "has no unit" in phalanx("up", "--min-run", "30", code=64).stderr
    unit = phalanx("up", "--systemd", "--policy", "default", "--min-run", "10m", "--no-preemption").stdout
    assert "-m phalanx.app.head --policy default --min-run 10m --no-preemption\n" in unit


def test_a_gang_moves_to_faster_devices_when_they_come_free_and_says_why():
    with fleet("2xfast:2,2xslow:2", *SOON) as head:
        first = waits_for(head, "first", gpus="2xfast:2")
        runs(head, first)
        gang = waits_for(head, "gang", gpus="fast,slow:4", speeds={"fast": 100, "slow": 1}, saves_on_stop=True)
        runs(head, gang)
        open_gate(head, "first")
        # The scheduler expects a run to last as long again as it has lasted: after about a minute the move pays.
        wait_until(lambda: head.job(gang)["attempts"] == 2, "the gang moves", limit_s=240.0)
        runs(head, gang)
        assert sorted(head.job(gang)["nodes"]) == ["n0", "n1"]
        assert "moved to n0, n1; 100x faster on virtual fast" in str(head.history(gang))
