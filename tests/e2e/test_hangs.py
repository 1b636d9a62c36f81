"""A gang of real processes hangs: it is noticed from its learned pace, the rank that held it up is named, its stack kept, and it goes on."""

import os
import sys

import pytest

from benchmarks.cluster import cluster

pytestmark = [pytest.mark.serial, pytest.mark.e2e, pytest.mark.torch, pytest.mark.timeout(180)]
TRAIN = os.path.join(os.path.dirname(__file__), "hanging_train.py")


def stacks_of(head, job):
    chunks = head.call("GET", f"/v1/jobs/{job}/logs?rank=stacks")["chunks"]
    found: dict[str, str] = {}
    for chunk in chunks:
        found[chunk["stream"]] = found.get(chunk["stream"], "") + chunk["text"]
    return found


def said(head, job, kind):
    return [line["text"] for line in head.history(job) if line["kind"] == kind]


@pytest.mark.parametrize(
    ("how", "why", "in_stack"),
    [
        ("sleeps", "is not in the collective in which 1 wait: fall_asleep (hanging_train.py:", "in fall_asleep"),
        pytest.param(
            "stops",
            "stopped by a signal: state T",
            "no stack: the process is stopped by a signal",
            marks=pytest.mark.prove,
        ),
    ],
)
def test_hang_is_noticed_its_rank_named_its_stack_kept_and_the_gang_goes_on(how, why, in_stack):
    with cluster("2x1", lease_s=8.0) as head:
        job = head.submit(
            run=[sys.executable, TRAIN, how], gpus="2x1", name="hang", warm=True, collective_timeout="12s"
        )
        view = head.wait_for_state(job, "succeeded", "failed", "cancelled")
        assert (view["state"], view["attempts"], view["restarts"]) == ("succeeded", 1, 1), head.history(job)
        told = said(head, job, "hung")
        assert "no step for" in told[0]
        assert "rank 1 on n1" in told[-1]
        assert why in told[-1]
        assert any("from step" in text for text in said(head, job, "starting"))
        stacks = stacks_of(head, job)
        assert set(stacks) == {"stacks-0", "stacks-1"}
        assert in_stack in stacks["stacks-1"]
        assert "hanging_train.py" in stacks["stacks-0"]
