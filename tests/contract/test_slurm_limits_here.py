"""Limits of a real Slurm, in turn: each ends an attempt at once, with Slurm's reason and what to change."""

import pytest

from benchmarks.cluster import wait_until
from tests.contract.slurm_rig import slurm
from tests.slurm_here import why_not

pytestmark = [
    pytest.mark.serial,
    pytest.mark.prove,
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def rig():
    with slurm(()) as started:
        yield started


@pytest.fixture
def update(rig):
    """Change something in Slurm; undone afterwards."""
    undo = []

    def change(what, setting, before):
        rig.slurm.run("scontrol", "update", what, *setting)
        undo.append((what, before))

    yield change
    for what, before in undo:
        rig.slurm.run("scontrol", "update", what, *before)
    wait_until(lambda: all(node["state"] == "up" and not node["cordon"] for node in rig.nodes()), "all nodes are back")


@pytest.mark.parametrize(
    ("limit", "before", "asked", "why"),
    [
        ("MaxTime=1:00:00", "MaxTime=INFINITE", {"gpus": 1, "time": "2h"}, "set a shorter"),
        ("MaxNodes=1", "MaxNodes=UNLIMITED", {"gpus": "2x2"}, "PartitionNodeLimit; ask for fewer nodes"),
    ],
)
def test_a_job_over_a_limit_of_its_partition_ends_at_its_first_attempt(rig, update, limit, before, asked, why):
    update("PartitionName=here", [limit], [before])
    job = rig.submit(run="true", **asked)
    view = rig.wait_for_state(job, "failed", "succeeded")
    assert (view["state"], view["attempts"]) == ("failed", 1), rig.history(job)
    assert why in view["detail"]


def test_a_closed_partition_lets_jobs_wait_and_names_the_command_that_opens_it(rig, update):
    update("PartitionName=here", ["State=DOWN"], ["State=UP"])
    job = rig.submit(run="true", gpus=1)
    wait_until(lambda: all(node["cordon"] for node in rig.nodes()), "its nodes are cordoned")
    assert "partition here is DOWN" in rig.nodes()[0]["cordon"]["why"]
    assert rig.job(job)["attempts"] <= 1
    rig.slurm.run("scontrol", "update", "PartitionName=here", "State=UP")
    assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", rig.history(job)


def test_a_drain_of_slurm_is_undone_in_slurm(rig, update):
    update("NodeName=n1", ["State=DRAIN", "Reason=fan"], ["State=RESUME"])
    wait_until(lambda: [node["id"] for node in rig.nodes() if node["cordon"]] == ["n1"], "it is cordoned")
    with pytest.raises(AssertionError, match=r"409 .* engine, slurm: Slurm state drain: fan.*NodeName=n1 State=RESUME"):
        rig.call("POST", "/v1/nodes/n1/undrain")


@pytest.mark.parametrize("cancels", [False, True])
def test_a_node_that_goes_down_before_the_start_costs_seconds(rig, update, cancels):
    job = rig.submit(run="sleep 1", gpus="2x2")
    allocated: list[str] = []

    def allocates():
        allocated[:] = rig.slurm.run("squeue", "--noheader", "--states=R", "--format=%N").split()
        return allocated and "[" in allocated[-1]  # both nodes: a job that ends beside it has other ones

    wait_until(allocates, "Slurm allocates it")
    second = f"n{allocated[-1][-2]}"
    update(f"NodeName={second}", ["State=DOWN", "Reason=power"], ["State=RESUME"])
    if cancels:
        rig.call("POST", f"/v1/jobs/{job}/cancel", {})
        assert rig.wait_for_state(job, "cancelled", "failed")["state"] == "cancelled", rig.history(job)
    else:
        assert rig.wait_for_state(job, "succeeded", "failed")["state"] == "succeeded", rig.history(job)
